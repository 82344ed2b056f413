"""Names of huggingface/pytorch-image-models: DeiT, DeiT-III, DINOv2 (vision_transformer.py), RoPE-ViT, DINOv3 (eva.py), BEiT and Swin."""

import dataclasses

from flax import nnx

from rope_jax.models.pretrained import swin
from rope_jax.models.pretrained.preprocessing import Preprocessing
from rope_jax.models.pretrained.rows import Row, Table, halves, has_stages, isotropic, norm
from rope_jax.models.pretrained.tensors import DENSE, FREQS, Q_BIAS, SAME, TOKENS, V_BIAS, WINDOW_OFFSETS, rotary_of
from rope_jax.positions.rotary_relatives import DinoV3


def table(model: nnx.Module) -> Table:
    """Its ViTs with a rotation, or without bias of k, are of other files than those with neither, with other names for LayerScale.

    It evaluates DeiT, DeiT-III, BEiT and Swin of 384 pixels and DINO's on whole images, and everything else of 224 on nine tenths of them.
    (But its DeiT-III with a tag of fb_in22k_ft_in1k on whole images, too: the weights do not tell.) DINO's files have no head.
    """
    if has_stages(model):
        # A stage begins with the downsampling that Microsoft's code puts at the end of the one before.
        rows = swin.rows(downsample="layers.{next}.downsample", head="head.fc")
        return Table(rows, "interleaved", _evaluation(4 * max(model.stages[0].position.stage.grid)), swin.DROPPED)
    options, rotary = model.options, rotary_of(model.position)
    of_eva = rotary is not None or not getattr(options, "k_bias", True)
    gated = of_eva and getattr(options, "feed_forward", None) == "swiglu"
    rows = [
        ("registers", "reg_token", SAME),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.q_bias", Q_BIAS),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.v_bias", V_BIAS),
        *(halves("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1_g", "blocks.{i}.mlp.fc1_x") if gated else []),
        *(norm("norm", "fc_norm") if getattr(options, "pool_norm", False) else []),
        *(_PREFIXED if _has_prefix_offsets(model) else []),
        *isotropic(scales=("gamma_1", "gamma_2") if of_eva else ("ls1.gamma", "ls2.gamma")),
        ("position.ape.embedding", "pos_embed", TOKENS),
        ("position.rope_mixed.mixed", "rope.freqs", FREQS),
    ]
    patch = getattr(options, "patch_size", 16)
    if isinstance(rotary, DinoV3) or patch == 14 or getattr(options, "pooling", None) == "class_mean":
        return Table(rows, "half", Preprocessing(crop=1.0), optional=("head.weight", "head.bias"))
    if rotary is not None:
        return Table(rows, "interleaved", Preprocessing(crop=0.9))
    evaluation = _evaluation(patch * max(model.position.stage.grid))
    if of_eva:
        evaluation = dataclasses.replace(evaluation, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Table(rows, "interleaved", evaluation, ("blocks.{i}.attn.relative_position_index",))


_BIAS_TABLE = "blocks.{i}.attn.relative_position_bias_table"
_PREFIXED: list[Row] = [  # of BEiT: the last three rows are of class and register tokens
    ("position.rpb.offsets.{i}", _BIAS_TABLE, dataclasses.replace(WINDOW_OFFSETS, cut=slice(-3))),
    ("position.rpb.prefix_offsets.{i}", _BIAS_TABLE, dataclasses.replace(DENSE, cut=slice(-3, None))),
]


def _has_prefix_offsets(model: nnx.Module) -> bool:
    return any(getattr(module, "prefix_offsets", None) is not None for _, module in nnx.iter_modules(model.position))


def _evaluation(side: int) -> Preprocessing:
    return Preprocessing(crop=1.0 if side >= 384 else 0.9)
