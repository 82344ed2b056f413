"""Name table of huggingface/pytorch-image-models.

For DeiT, DeiT-III, DINOv2 (vision_transformer.py), RoPE-ViT, DINOv3 (eva.py), BEiT, Swin and
Swin V2.
"""

import dataclasses

from flax import nnx

from rope_jax.models.description import Preprocessing
from rope_jax.positions.rotary_models import DinoV3
from rope_jax.weights.hierarchical import SWIN_FROZEN, swin_rows
from rope_jax.weights.layouts import DENSE, FREQS, Q_BIAS, SAME, V_BIAS, WINDOW_OFFSETS, find_rotary
from rope_jax.weights.tables import APE, Row, Table, dense, isotropic, norm, parts


def timm(model: nnx.Module) -> Table:
    """timm's names.

    ViTs with a rotation, or without a bias of k, are in eva.py, with other names for LayerScale.

    DeiT, DeiT-III, BEiT and Swin for 384 pixels, and DINO, are evaluated on whole images, and all
    others for 224 on nine tenths of them. (DeiT-III tagged fb_in22k_ft_in1k is also evaluated on
    whole images, but the weights do not reveal the tag.) Files of DINO have no head.
    """
    if model.hierarchical:
        # A stage begins with the downsampling that ends the previous one in Microsoft's code.
        rows = swin_rows(downsample="layers.{next}.downsample", head="head.fc")
        evaluation = _evaluation(4 * max(model.stages[0].position.stage.grid))
        return Table(rows, "interleaved", evaluation, frozen=SWIN_FROZEN)
    options, rotary = model.options, find_rotary(model.position)
    eva = rotary is not None or not options.k_bias
    table = "attn.relative_position_bias_table"
    rows: list[Row] = [
        ("registers", "reg_token", SAME),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.q_bias", Q_BIAS),
        ("blocks.{i}.attn.qv_bias", "blocks.{i}.attn.v_bias", V_BIAS),
        APE,
        ("position.rope_mixed.mixed", "rope.freqs", FREQS),
    ]
    if eva and options.feed_forward == "swiglu":
        rows += parts(
            dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1_g"),
            dense("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1_x"),
        )
    if options.pool_norm:
        rows += norm("norm", "fc_norm")
    if has_prefix_offsets(model):
        rows += prefix_offsets(f"blocks.{{i}}.{table}")
    rows += isotropic(scales=("gamma_1", "gamma_2") if eva else ("ls1.gamma", "ls2.gamma"))
    dino = isinstance(rotary, DinoV3) or options.patch_size == 14
    if dino or options.pooling == "class_mean":
        return Table(rows, "half", Preprocessing(crop=1.0))
    if rotary is not None:
        return Table(rows, "interleaved", Preprocessing(crop=0.9))
    evaluation = _evaluation(options.patch_size * max(model.position.stage.grid))
    if eva:
        evaluation = dataclasses.replace(evaluation, mean=(0.5,) * 3, std=(0.5,) * 3)
    shared = (f"blocks.{{i}}.{table}", table.replace("attn", "rel_pos_bias"))
    return Table(rows, "interleaved", evaluation, _PRETRAINING, alternatives=(shared,))


# Of BEiT before its fine-tuning; these files have one table for all blocks, which takes part in
# the fine-tuning as each block's own.
_PRETRAINING = ("mask_token", "lm_head.weight", "lm_head.bias")


def has_prefix_offsets(model: nnx.Module) -> bool:
    """True for a model with BEiT's biases between class token and patches."""
    modules = (module for _, module in nnx.iter_modules(model.position))
    return any(getattr(module, "prefix_offsets", None) is not None for module in modules)


def prefix_offsets(theirs: str) -> list[Row]:
    """Rows of BEiT's tables, whose last three rows are for class and register tokens."""
    return [
        ("position.rpb.offsets.{i}", theirs, dataclasses.replace(WINDOW_OFFSETS, cut=slice(-3))),
        (
            "position.rpb.prefix_offsets.{i}",
            theirs,
            dataclasses.replace(DENSE, cut=slice(-3, None)),
        ),
    ]


def _evaluation(side: int) -> Preprocessing:
    return Preprocessing(crop=1.0 if side >= 384 else 0.9)
