"""Mask R-CNN: a head of detection with instance masks."""

from rope_jax.models.heads.mask_rcnn.head import MaskRcnn
from rope_jax.models.heads.mask_rcnn.options import MaskRcnnOptions

__all__ = ["MaskRcnn", "MaskRcnnOptions"]
