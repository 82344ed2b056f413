"""Heads of dense prediction, by name: from feature maps to predictions."""

from rope_jax.models.heads import (  # noqa: F401  (they register heads)
    dino,
    linear,
    mask2former,
    mask_rcnn,
    segmenter,
    upernet,
)
from rope_jax.models.heads.head import (
    HEADS,
    Head,
    PixelLogits,
    SegmentationHead,
    list_heads,
    register_head,
)

__all__ = [
    "HEADS",
    "Head",
    "PixelLogits",
    "SegmentationHead",
    "list_heads",
    "register_head",
]
