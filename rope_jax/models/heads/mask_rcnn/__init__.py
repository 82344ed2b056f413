"""Mask R-CNN: a head of detection with instance masks."""

from rope_jax.models.heads.mask_rcnn import head  # noqa: F401  (it registers the head)
