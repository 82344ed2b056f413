"""Name table of detrex: DINO with its backbones, or its transformer by itself."""

import dataclasses

from flax import nnx

from rope_jax.weights.dense import deformable, detectron2
from rope_jax.weights.hierarchical import swin_rows
from rope_jax.weights.layouts import SAME
from rope_jax.weights.links import CLASSIFIER
from rope_jax.weights.tables import Row, Table, conv, dense, norm, torch_attention, within

# A file has classifiers and boxes twice, as parts of the transformer and of the whole model.
_TWICE = (
    *(f"class_embed.{{i}}.{kind}" for kind in ("weight", "bias")),
    *(f"bbox_embed.{{i}}.layers.{{j}}.{kind}" for kind in ("weight", "bias")),
)


def detrex(model: nnx.Module) -> Table:
    """IDEA-Research/detrex: DINO behind ViTDet and Swin.

    In its code maps are padded to whole windows by zeros for tokens: create models with
    window_padding="tokens".
    """
    if hasattr(model, "encoder") and not hasattr(model, "backbone"):  # the transformer by itself
        return Table(_transformer(model.width))
    if not hasattr(getattr(model, "head", None), "transformer"):  # another model
        return Table([])
    rows = within("transformer.", _transformer(model.head.options.width), "head.transformer.")
    rows += within("neck.", _neck(), "head.neck.")
    rows.append(("head.label_embed", "label_enc.weight", SAME))
    if model.backbone.hierarchical:
        rows += within("backbone.", _stage_norms(model), "")
        swin = [row for row in swin_rows() if not row[0].startswith(CLASSIFIER)]
        rows += within("backbone.", swin, "backbone.")
        return Table(rows, dropped=_TWICE)
    table = detectron2(model)
    rows += within("backbone.", table.rows, "")
    return dataclasses.replace(table, rows=rows, dropped=_TWICE)


def _stage_norms(model: nnx.Module) -> list[Row]:
    """Rows of the norms of maps, which are numbered by their stages."""
    rows = []
    for place, stage in enumerate(model.stages):
        rows += norm(f"neck.norms.{place}", f"norm{stage}")
    return rows


def _neck() -> list[Row]:
    rows = []
    for ours, theirs in (("same.{i}", "convs.{i}"), ("extra.{i}", "extra_convs.{i}")):
        rows += conv(f"{ours}.conv", f"{theirs}.conv") + norm(f"{ours}.norm", f"{theirs}.norm")
    return rows


def _transformer(width: int) -> list[Row]:
    encoder, decoder = "encoder.layers.{i}", "decoder.layers.{i}"
    rows: list[Row] = [
        ("level_embed", "level_embeds", SAME),
        ("content", "tgt_embed.weight", SAME),
        *dense("choice", "enc_output"),
        *norm("choice_norm", "enc_output_norm"),
        *deformable("encoder.{i}.attn", f"{encoder}.attentions.0"),
        *norm("encoder.{i}.norm", f"{encoder}.norms.0"),
        *_feed_forward("encoder.{i}.mlp", encoder, "1"),
        *torch_attention("decoder.{i}.attn", f"{decoder}.attentions.0.attn", width),
        *norm("decoder.{i}.norm1", f"{decoder}.norms.0"),
        *deformable("decoder.{i}.cross", f"{decoder}.attentions.1"),
        *norm("decoder.{i}.norm2", f"{decoder}.norms.1"),
        *_feed_forward("decoder.{i}.mlp", decoder, "2"),
        *dense("position.{i}", "decoder.ref_point_head.layers.{i}"),
        *norm("norm", "decoder.norm"),
        *dense("classes.{i}", "decoder.class_embed.{i}"),
        *dense("boxes.{i}.layers.{j}", "decoder.bbox_embed.{i}.layers.{j}"),
    ]
    return rows


def _feed_forward(ours: str, theirs: str, last: str) -> list[Row]:
    return [
        *dense(f"{ours}.fc1", f"{theirs}.ffns.0.layers.0.0"),
        *dense(f"{ours}.fc2", f"{theirs}.ffns.0.layers.1"),
        *norm(f"{ours}.norm", f"{theirs}.norms.{last}"),
    ]
