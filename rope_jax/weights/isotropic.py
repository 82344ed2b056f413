"""Name tables of isotropic ViTs: one function per source."""

import numpy as np
from flax import nnx

from rope_jax.models.description import Preprocessing
from rope_jax.positions.absolute import Absolute, Learned
from rope_jax.weights.layouts import DEPTHWISE, QV_BIAS, SAME, square
from rope_jax.weights.tables import APE, Row, Table, dense, halves, isotropic

_DINO_SCALES = ("ls1.gamma", "ls2.gamma")


def deit(model: nnx.Module) -> Table:
    """facebookresearch/deit: DeiT (models.py) and DeiT-III (models_v2.py).

    DeiT is evaluated on the central 224 of 256 pixels, DeiT-III, which has LayerScale, on whole
    images.
    """
    third = getattr(model.options, "layer_scale", None) is not None
    preprocessing = Preprocessing(crop=1.0 if third else 0.875)
    return Table([*isotropic(), APE], preprocessing=preprocessing)


def lape(model: nnx.Module) -> Table:
    """Ingrid725/LaPE: DeiT with one more layer norm in each block.

    Sinusoids are stored in its files, as tables of [T, C].
    """
    rows = [
        *isotropic(),
        APE,
        ("position.lape.scale.{i}", "blocks.{i}.pe_norm.weight", SAME),
        ("position.lape.bias.{i}", "blocks.{i}.pe_norm.bias", SAME),
    ]
    return Table(rows, frozen=(("pos_embed", _lape_sinusoids),))


def _lape_sinusoids(
    model: nnx.Module, numbers: dict[str, int], shape: tuple[int, ...]
) -> np.ndarray | None:
    position = getattr(model, "position", None)
    scheme = getattr(position, "inner", position)
    if not isinstance(scheme, Absolute) or isinstance(scheme, Learned) or len(shape) != 2:
        return None
    return absolute_table(scheme, *shape)


def absolute_table(scheme: Absolute, tokens: int, channels: int) -> np.ndarray | None:
    """A scheme's table for a file's number of tokens, on a square map where possible."""
    stage = scheme.stage
    if channels != stage.channels or tokens > 2**16:  # a file may have any shape
        return None
    return np.asarray(scheme.table(square(tokens - stage.embed_prefix) or stage.grid))


def dinov2(model: nnx.Module) -> Table:
    """facebookresearch/dinov2: backbones with and without registers, and linear classifiers.

    A backbone's file has no head. Linear classifiers of one layer are separate files: add their two
    tensors as head.weight and head.bias.
    """
    rows: list[Row] = [("registers", "register_tokens", SAME), APE]
    if getattr(model.options, "feed_forward", None) == "swiglu":
        rows += dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w12")
        rows += dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3")
    rows += isotropic(scales=_DINO_SCALES)
    return Table(rows, "half", dropped=("mask_token",))


def dinov3(model: nnx.Module) -> Table:
    """facebookresearch/dinov3; a backbone's file has no head, see `dinov2`.

    The bias of k is masked. Its periods are those of base 100 rounded to bfloat16, which rotates
    the official code's tokens by up to 0.01 radians more or less; here and in timm they are exact.
    Norms for small crops and mask tokens are for pretraining only.
    """
    rows: list[Row] = [
        ("registers", "storage_tokens", SAME),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.qkv.bias", QV_BIAS),
    ]
    if getattr(model.options, "feed_forward", None) == "swiglu":
        rows += halves("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.w1", "blocks.{i}.mlp.w2")
        rows += dense("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.w3")
    rows += isotropic(scales=_DINO_SCALES)
    dropped = (
        "mask_token",
        "rope_embed.periods",
        "blocks.{i}.attn.qkv.bias_mask",
        "local_cls_norm.weight",
        "local_cls_norm.bias",
    )
    return Table(rows, "half", dropped=dropped)


def resformer(model: nnx.Module) -> Table:
    """ruitian12/resformer; its evaluation is DeiT's."""
    rows = [
        *isotropic(),
        ("position.gpe.kernel", "pos_embed.embed_layer.weight", DEPTHWISE),
        ("position.gpe.bias", "pos_embed.embed_layer.bias", SAME),
        ("position.lpe.kernel.{i}", "blocks.{i}.attn.get_v.weight", DEPTHWISE),
        ("position.lpe.bias.{i}", "blocks.{i}.attn.get_v.bias", SAME),
    ]
    return Table(rows)
