"""Name tables of backbones of detection and segmentation: one function per source."""

from flax import nnx

from rope_jax.models.pretrained.layouts import PATCH_TOKENS, SAME
from rope_jax.models.pretrained.tables import Row, Table, conv, isotropic, norm


def detectron2(model: nnx.Module) -> Table:
    """facebookresearch/detectron2: ViTDet's backbone and feature pyramid.

    The entry of the class token in the table of positions is not used and is dropped. The map is
    padded to whole windows by zeros for tokens: create the model with window_padding="tokens".
    """
    (prefix,) = model.parts()
    rows: list[Row] = [
        *isotropic(),
        ("position.ape.embedding", "pos_embed", PATCH_TOKENS),
        ("position.decomposed.rows.{i}", "blocks.{i}.attn.rel_pos_h", SAME),
        ("position.decomposed.columns.{i}", "blocks.{i}.attn.rel_pos_w", SAME),
    ]
    rows = [(f"{prefix}{ours}", f"net.{theirs}", rule) for ours, theirs, rule in rows]
    for index, level in enumerate(model.neck.levels if hasattr(model, "neck") else ()):
        rows += _pyramid_level(f"neck.levels.{index}", level.scale)
    return Table(rows)


_LEVELS = {4.0: (2, (0, 3), 4), 2.0: (3, (0,), 1), 1.0: (4, (), 0), 0.5: (5, (), 1)}


def _pyramid_level(ours: str, scale: float) -> list[Row]:
    """Rows of one scale of a feature pyramid, whose modules are numbered together with GELU."""
    # The level, and numbers of its transposed convolutions and of its first convolution.
    level, deconvs, first = _LEVELS[scale]
    theirs = f"simfp_{level}"
    rows: list[Row] = []
    for number, place in enumerate(deconvs):
        rows += conv(f"{ours}.deconvs.{number}", f"{theirs}.{place}")
    rows += norm(f"{ours}.norms.0", f"{theirs}.1")
    for place, layer in enumerate(("lateral", "output"), first):
        rows += conv(f"{ours}.{layer}", f"{theirs}.{place}")
        rows += norm(f"{ours}.{layer}_norm", f"{theirs}.{place}.norm")
    return rows
