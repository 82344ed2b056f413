"""Mask2Former: a head of segmentation."""

from rope_jax.models.heads.mask2former.head import Mask2Former
from rope_jax.models.heads.mask2former.options import Mask2FormerOptions

__all__ = ["Mask2Former", "Mask2FormerOptions"]
