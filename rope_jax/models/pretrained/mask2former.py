"""Name table of Mask2Former: a Swin with the head, or the head by itself."""

from dataclasses import replace

from flax import nnx

from rope_jax.models.pretrained.dense import deformable
from rope_jax.models.pretrained.hierarchical import SWIN_DROPPED, swin_rows
from rope_jax.models.pretrained.layouts import DENSE, POINTWISE, SAME
from rope_jax.models.pretrained.links import CLASSIFIER
from rope_jax.models.pretrained.tables import Row, Table, conv, dense, norm, within


def mask2former(model: nnx.Module) -> Table:
    """facebookresearch/Mask2Former: a Swin with its norms and the head, or the head alone.

    In its code maps are padded to whole windows by zeros for tokens: create a Swin with
    window_padding="tokens".
    """
    head = getattr(model, "head", model)
    rows = [*_pixel_decoder("pixel_decoder"), *_masked_decoder("predictor", head.options.width)]
    if head is model:
        return Table(rows)
    own = [row for row in swin_rows() if not row[0].startswith(CLASSIFIER)]
    rows = within("sem_seg_head.", rows, "head.") + within("backbone.", own, "backbone.")
    rows += norm("neck.norms.{i}", "backbone.norm{i}")
    dropped = tuple(f"backbone.{name}" for name in SWIN_DROPPED)
    return Table(rows, dropped=(*dropped, "criterion.empty_weight"))


def _pixel_decoder(theirs: str) -> list[Row]:
    """Mask2Former's, whose 1 x 1 convolutions are linear layers here."""
    ours, layer = "pixel_decoder", f"{theirs}.transformer.encoder.layers.{{i}}"
    return [
        *dense(f"{ours}.projections.{{i}}", f"{theirs}.input_proj.{{i}}.0", POINTWISE),
        *norm(f"{ours}.norms.{{i}}", f"{theirs}.input_proj.{{i}}.1"),
        (f"{ours}.levels", f"{theirs}.transformer.level_embed", SAME),
        *deformable(f"{ours}.layers.{{i}}.attn", f"{layer}.self_attn"),
        *norm(f"{ours}.layers.{{i}}.norm", f"{layer}.norm1"),
        *_feed_forward(f"{ours}.layers.{{i}}.mlp", layer, "norm2"),
        *dense(f"{ours}.lateral", f"{theirs}.adapter_1", POINTWISE),
        *norm(f"{ours}.lateral_norm", f"{theirs}.adapter_1.norm"),
        *conv(f"{ours}.smooth", f"{theirs}.layer_1"),
        *norm(f"{ours}.smooth_norm", f"{theirs}.layer_1.norm"),
        *dense(f"{ours}.pixels", f"{theirs}.mask_features", POINTWISE),
    ]


def _masked_decoder(theirs: str, width: int) -> list[Row]:
    ours, layer = "decoder", "decoder.layers.{i}"
    cross, own, mlp = (
        f"{theirs}.transformer_{name}_layers.{{i}}"
        for name in ("cross_attention", "self_attention", "ffn")
    )
    return [
        (f"{ours}.queries", f"{theirs}.query_feat.weight", SAME),
        (f"{ours}.positions", f"{theirs}.query_embed.weight", SAME),
        (f"{ours}.levels", f"{theirs}.level_embed.weight", SAME),
        *_attention(f"{layer}.cross", f"{cross}.multihead_attn", width),
        *norm(f"{layer}.cross_norm", f"{cross}.norm"),
        *_attention(f"{layer}.attn", f"{own}.self_attn", width),
        *norm(f"{layer}.norm", f"{own}.norm"),
        *_feed_forward(f"{layer}.mlp", mlp, "norm"),
        *norm(f"{ours}.norm", f"{theirs}.decoder_norm"),
        *dense(f"{ours}.classify", f"{theirs}.class_embed"),
        *dense(f"{ours}.embed.{{i}}", f"{theirs}.mask_embed.layers.{{i}}"),
    ]


def _attention(ours: str, theirs: str, width: int) -> list[Row]:
    """torch's MultiheadAttention, which holds three layers of `width` outputs in one tensor."""
    rows: list[Row] = []
    for place, name in enumerate("qkv"):
        share = slice(place * width, (place + 1) * width)
        rows += [
            (f"{ours}.{name}.{leaf}", f"{theirs}.in_proj_{tensor}", replace(rule, cut=share))
            for leaf, tensor, rule in (("kernel", "weight", DENSE), ("bias", "bias", SAME))
        ]
    return rows + dense(f"{ours}.out", f"{theirs}.out_proj")


def _feed_forward(ours: str, theirs: str, last: str) -> list[Row]:
    return [
        *dense(f"{ours}.fc1", f"{theirs}.linear1"),
        *dense(f"{ours}.fc2", f"{theirs}.linear2"),
        *norm(f"{ours}.norm", f"{theirs}.{last}"),
    ]
