"""Heo et al., Rotary Position Embedding for Vision Transformer (2403.13298). Figures, then tables.

Figures 4 to 6 print no numbers: their published points are those of the authors' code, at 224 and
384 pixels.
"""

from collections.abc import Mapping
from typing import Any

from rope_jax.papers.claims import above, as_good
from rope_jax.papers.figures import Attention, Curves, Gains, Maps, fourier_maps
from rope_jax.papers.runs import Run
from rope_jax.papers.tables import Table

VITS = ("ape", "rope2d", "rope_mixed")
SUMS = ("rope2d+ape", "rope_mixed+ape")
SWINS = ("rpb", "rope2d(base=50)", "rope_mixed")
BELOW, ABOVE = (144, 192), (256, 320, 384, 448, 512)


def vit(size: str, position: str) -> Run:
    """A ViT by DeiT-III's recipe: S in one stage, B and L at 192 px and then at 224."""
    first = Run(f"deit3_{size}16", position, f"deit3:variant={size}")
    if size == "s":
        return first
    recipe = f"deit3:variant={size},stage=finetune"
    return Run(f"deit3_{size}16", position, recipe, after=first)


def swin(size: str, position: str) -> Run:
    """A Swin by its own recipe."""
    return Run(f"swin_{size}", position, f"swin:variant=swin_{size}")


def _backbone(key: Mapping[str, Any]) -> Run:
    family, size = key["model"].removesuffix("16").split("_")
    return (vit if family == "deit3" else swin)(size, key["position"])


def _dense(recipe: str, prefix: str = ""):
    """The run of a cell of a dense table: a recipe that starts from its own backbone."""

    def run(key: Mapping[str, Any]) -> Run:
        size = key["model"].removesuffix("16").split("_")[1]
        variant = f"{prefix}{size}" if key["model"].startswith("deit3") else key["model"]
        return Run(
            key["model"], key["position"], f"{recipe}:variant={variant}", after=_backbone(key)
        )

    return run


def _table_5(key: Mapping[str, Any]) -> Run:
    if key["model"].startswith("resformer"):
        return Run(key["model"], key["position"], "resformer:variant=s")
    return vit("s", key["position"])


_BASE = [vit("b", position) for position in VITS]
_MIDDLE = [
    claim
    for side in (128, 224, 384)
    for scheme in ("rope_mixed", "rope2d")
    for claim in above(scheme, "ape", at=(side,))
]
_RAISES = [*above("rope_mixed", "ape"), *above("rope2d", "ape")]
_DENSE_SWIN = [*above("rope_mixed", "rpb"), *above("rope2d(base=50)", "rpb")]

ARTIFACTS = (
    Maps(
        "figure_1",
        "A point reconstructed by Axial and Mixed",
        lines=[vit("b", "rope2d"), vit("b", "rope_mixed")],
        maps=fourier_maps,
        tokens=((0.5, 0.5), (0.25, 0.25)),
        label="relative to the point",
        note="the paper prints neither the size of the map nor the two positions: here the middle "
        "and a quarter of the side, or those of --token",
    ),
    Attention(
        "figure_2",
        "Attention distance of ViT-B by layer",
        lines=_BASE,
        at=(128, 224, 384),
        statistic="distance",
        claims=_MIDDLE,
        note="claims are about the middle layers, 4 to 8 of 12",
    ),
    Attention(
        "figure_3",
        "Entropy of attention of ViT-B by layer",
        lines=_BASE,
        at=(128, 224, 384),
        statistic="entropy",
        note="in nats; the paper names no unit; claims are about the middle layers, 4 to 8 of 12",
        claims=_MIDDLE,
    ),
    Curves(
        "figure_4",
        "Accuracy of ViT-S, B and L by resolution",
        lines=[vit(size, position) for size in "sbl" for position in (*VITS, *SUMS)],
        at=(144, 192, 224, 256, 320, 384, 448, 512),
        note="the paper draws ape, rope2d and rope_mixed; the sums with ape are in its code's "
        "results",
        claims=[
            *above("rope2d", "ape", at=ABOVE),
            *above("rope_mixed", "ape", at=ABOVE),
            *above("rope_mixed", "rope2d", at=(*BELOW, 224, *ABOVE)),
        ],
    ),
    Curves(
        "figure_5",
        "Accuracy of Swin-T, S and B by resolution",
        lines=[swin(size, position) for size in "tsb" for position in SWINS],
        at=(160, 192, 224, 256, 320, 384),
        note="windows are scaled with the image (1/32 of it), but for the stand-ins, whose windows "
        "stay",
        claims=[
            *above("rope_mixed", "rpb", at=(160, 192)),
            *above("rope_mixed", "rpb", at=ABOVE[:3]),
            *above("rope_mixed", "rope2d(base=50)", at=(160, 192, *ABOVE[:3])),
        ],
    ),
    Gains(
        "figure_6",
        "Improvement over APE and RPB by resolution",
        lines=[
            *(vit("b", position) for position in ("ape", "rope_mixed", "rope_mixed+ape")),
            *(swin("b", position) for position in ("rpb", "rope_mixed", "rope_mixed+rpb")),
        ],
        at=(128, 160, 192, 224, 256, 320, 384, 512),
        claims=[
            *above("rope_mixed+ape", "rope_mixed", at=(128, 160, 192)),
            *above("rope_mixed", "rope_mixed+ape", at=(256, 320, 384, 512)),
            as_good("rope_mixed", "rope_mixed+rpb", at=(128, 160, 192, 224, 256, 320, 384)),
        ],
    ),
    Table(
        "table_1",
        "Detection with DINO-ViTDet",
        run=_dense("dino", "vit_"),
        claims=[*_RAISES, *above("rope_mixed+ape", "ape")],
    ),
    Table("table_2", "Detection with DINO-Swin", run=_dense("dino"), claims=_DENSE_SWIN),
    Table(
        "table_3",
        "Segmentation with UperNet",
        run=_dense("upernet"),
        claims=[*_RAISES, *above("rope_mixed+ape", *VITS, "rope2d+ape")],
    ),
    Table(
        "table_4",
        "Segmentation with Mask2Former",
        run=_dense("mask2former"),
        claims=_DENSE_SWIN,
    ),
    Table(
        "table_5",
        "Accuracy by resolution compared with ResFormer",
        run=_table_5,
        columns="resolution",
        note="ResFormer-S-224 is trained by the recipe of its own paper, at 224 px alone; the "
        "released weights, at the scale released, were trained at 128, 160 and 224 px",
        claims=[
            *above("rope_mixed+ape", "rope_mixed", at=(96, 128)),
            *above("rope_mixed", "rope_mixed+ape", at=(448, 512)),
        ],
    ),
)
