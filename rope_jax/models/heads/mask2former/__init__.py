"""Mask2Former: a head of segmentation."""

from rope_jax.models.heads.mask2former import head  # noqa: F401  (it registers the head)
