"""Name table of huggingface/transformers.

Its files have names of their own, also for weights that others released first, and q, k and v
apart. Those of a classifier begin with the name of the architecture, those of a backbone do not.
"""

import dataclasses
from collections.abc import Sequence

from flax import nnx

from rope_jax.models.description import Preprocessing
from rope_jax.positions.rotary_models import DinoV3
from rope_jax.weights.layouts import FIRST, OFFSETS, SAME, TOKENS, WINDOW_OFFSETS, find_rotary
from rope_jax.weights.tables import (
    Row,
    Table,
    conv,
    cosine_attention,
    dense,
    norm,
    parts,
    projections,
    within,
)
from rope_jax.weights.timm import has_prefix_offsets, prefix_offsets

_HALF = (0.5,) * 3


def transformers(model: nnx.Module) -> Table:
    """transformers' names, of ViT and DeiT, DINOv2, DINOv3, BEiT, Swin, Swin V2, NAT and DiNAT.

    Names are those in files, which `save_pretrained` of every version writes; version 5 has others
    in memory. The norms of its ViT, DeiT and BEiT have an epsilon of 1e-12, where the authors have
    1e-6: with `norm_epsilon=1e-12` results are the same. Poolers that no head reads are dropped,
    and so are mask tokens.
    """
    if model.hierarchical:
        return (_swin if hasattr(model.patch_embed.proj, "kernel") else _nat)(model)
    if isinstance(find_rotary(model.position), DinoV3):
        return _dinov3(model)
    if not model.options.k_bias:
        return _beit(model)
    return _vit(model) if model.options.layer_scale is None else _dinov2(model)


_EMBEDDINGS: list[Row] = [
    ("class_token", "embeddings.cls_token", SAME),
    ("distillation_token", "embeddings.distillation_token", SAME),
    ("registers", "embeddings.register_tokens", SAME),
    ("position.ape.embedding", "embeddings.position_embeddings", TOKENS),
    *conv("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    *norm("patch_embed.norm", "embeddings.norm"),
]
_DROPPED = ("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias")


def _table(
    starts: tuple[str, ...],
    rows: list[Row],
    preprocessing: Preprocessing,
    *,
    outside: Sequence[Row] = (),
    head: str = "classifier",
) -> Table:
    """The table of a backbone and its classifier.

    Args:
        starts: of the names of a backbone within a classifier.
        rows: of the backbone.
        preprocessing: of the source's evaluation.
        outside: rows beyond the backbone, beside the classifier.
        head: the classifier.
    """
    rows = [*within(starts[0], rows, ""), *outside, *dense("head", head)]
    dropped = tuple(f"{starts[0]}{name}" for name in _DROPPED)
    return Table(rows, None, preprocessing, dropped, starts=(*starts, ""))


def _attention(ours: str, theirs: str, inner: str) -> list[Row]:
    names = (f"{theirs}.{inner}.{name}" for name in ("query", "key", "value"))
    return [*projections(ours, *names), *dense(f"{ours}.proj", f"{theirs}.output.dense")]


def _layer(ours: str, theirs: str, *, inner: str = "attention") -> list[Row]:
    """Rows of a block as in transformers' port of BERT."""
    return [
        *norm(f"{ours}.norm1", f"{theirs}.layernorm_before"),
        *_attention(f"{ours}.attn", f"{theirs}.attention", inner),
        *norm(f"{ours}.norm2", f"{theirs}.layernorm_after"),
        *dense(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}.output.dense"),
    ]


def _dino_layer(ours: str, theirs: str) -> list[Row]:
    """Rows of a block of DINOv2 and DINOv3 without attention and MLP."""
    rows = [*norm(f"{ours}.norm1", f"{theirs}.norm1"), *norm(f"{ours}.norm2", f"{theirs}.norm2")]
    scales = ((f"{ours}.scale{n}.gamma", f"{theirs}.layer_scale{n}.lambda1", SAME) for n in (1, 2))
    return [*rows, *scales]


_BLOCK, _LAYER = "blocks.{i}", "encoder.layer.{i}"


def _vit(model: nnx.Module) -> Table:
    rows = [*_EMBEDDINGS, *_layer(_BLOCK, _LAYER), *norm("norm", "layernorm")]
    if model.options.distilled:
        outside = dense("distillation_head", "distillation_classifier")
        return _table(("deit.",), rows, Preprocessing(), outside=outside, head="cls_classifier")
    return _table(("vit.", "deit."), rows, Preprocessing(_HALF, _HALF, 1.0, "bilinear"))


def _beit(model: nnx.Module) -> Table:
    theirs = "relative_position_bias.relative_position_bias_table"
    table, common = f"{_LAYER}.attention.attention.{theirs}", f"encoder.{theirs}"
    rows = [*_EMBEDDINGS, *_layer(_BLOCK, _LAYER)]
    if has_prefix_offsets(model):
        rows += prefix_offsets(table)
    rows += [(f"{_BLOCK}.scale{n}.gamma", f"{_LAYER}.lambda_{n}", SAME) for n in (1, 2)]
    outside: Sequence[Row] = ()
    if model.options.pool_norm:
        rows += norm("norm", "pooler.layernorm")
    else:  # of pretraining
        outside = norm("norm", "layernorm")
    preprocessing = Preprocessing(_HALF, _HALF, 1.0, "bilinear")
    result = _table(("beit.",), rows, preprocessing, outside=outside)
    dropped = (*result.dropped, "lm_head.weight", "lm_head.bias")
    shared = ((f"beit.{table}", f"beit.{common}"),)
    return dataclasses.replace(result, dropped=dropped, alternatives=shared)


def _dinov2(model: nnx.Module) -> Table:
    rows = [
        *_EMBEDDINGS,
        *_dino_layer(_BLOCK, _LAYER),
        *_attention(f"{_BLOCK}.attn", f"{_LAYER}.attention", "attention"),
        *norm("norm", "layernorm"),
    ]
    fc1, fc2 = ("weights_in", "weights_out") if _is_gated(model) else ("fc1", "fc2")
    rows += dense(f"{_BLOCK}.mlp.fc1", f"{_LAYER}.mlp.{fc1}")
    rows += dense(f"{_BLOCK}.mlp.fc2", f"{_LAYER}.mlp.{fc2}")
    return _table(("dinov2.", "dinov2_with_registers."), rows, Preprocessing())


def _dinov3(model: nnx.Module) -> Table:
    """The names of backbones; classifiers have none."""
    ours, theirs = f"{_BLOCK}.mlp", "layer.{i}.mlp"
    attention = "layer.{i}.attention"
    rows: list[Row] = [
        *conv("patch_embed.proj", "embeddings.patch_embeddings"),
        *_EMBEDDINGS,
        *_dino_layer(_BLOCK, "layer.{i}"),
        *projections(f"{_BLOCK}.attn", *(f"{attention}.{name}_proj" for name in "qkv")),
        *dense(f"{_BLOCK}.attn.proj", f"{attention}.o_proj"),
        *dense(f"{ours}.fc2", f"{theirs}.down_proj"),
        *norm("norm", "norm"),
        *dense("head", "classifier"),
    ]
    if _is_gated(model):
        rows += parts(
            dense(f"{ours}.fc1", f"{theirs}.gate_proj"), dense(f"{ours}.fc1", f"{theirs}.up_proj")
        )
    else:
        rows += dense(f"{ours}.fc1", f"{theirs}.up_proj")
    return Table(rows, "half", Preprocessing(crop=1.0, interpolation="bilinear"), _DROPPED)


def _is_gated(model: nnx.Module) -> bool:
    return model.options.feed_forward == "swiglu"


def _swin(model: nnx.Module) -> Table:
    stage = "encoder.layers.{s}"
    layer, attention = f"{stage}.blocks.{{j}}", f"{stage}.blocks.{{j}}.attention.self"
    offsets = f"{attention}.relative_position_bias_table"
    ours = "stages.{s}.position"
    rows = [
        (f"stages.0.{name}" if name.startswith("position.") else name, theirs, rule)
        for name, theirs, rule in _EMBEDDINGS
    ]
    rows += [
        *_layer("stages.{s}.blocks.{j}", layer, inner="self"),
        (f"{ours}.rpb.offsets.{{j}}", offsets, WINDOW_OFFSETS),
        *cosine_attention(attention, "continuous_position_bias_mlp"),
        *dense("stages.{s}.downsample.reduction", f"{stage}.downsample.reduction"),
        *norm("stages.{s}.downsample.norm", f"{stage}.downsample.norm"),
        *norm("norm", "layernorm"),
    ]
    start = "swinv2." if model.options.cosine else "swin."
    return _table((start,), rows, Preprocessing())


def _nat(model: nnx.Module) -> Table:
    """NAT's and DiNAT's names, which tell whether the weights are those of dilated attention."""
    stage, ours = "encoder.levels.{s}", "stages.{s}.blocks.{j}"
    layer = f"{stage}.layers.{{j}}"
    stem = "embeddings.patch_embeddings.projection"
    rows = [
        *conv("patch_embed.proj.{i}", f"{stem}.{{i}}"),
        *norm("patch_embed.norm", "embeddings.norm"),
        *_layer(ours, layer, inner="self"),
        ("stages.{s}.position.rpb.offsets.{j}", f"{layer}.attention.self.rpb", OFFSETS),
        *conv("stages.{s}.downsample.reduction", f"{stage}.downsample.reduction"),
        *norm("stages.{s}.downsample.norm", f"{stage}.downsample.norm"),
        *norm("norm", "layernorm"),
    ]
    for place in (0, 1):  # both LayerScales of a block are one tensor
        rule = dataclasses.replace(FIRST, cut=slice(place, place + 1))
        rows.append((f"{ours}.scale{place + 1}.gamma", f"{layer}.layer_scale_parameters", rule))
    dilated = any(dilation > 1 for dilation in getattr(model.options, "dilations", ()))
    return _table(("dinat." if dilated else "nat.",), rows, Preprocessing())
