"""DINO: a head of detection."""

from rope_jax.models.heads.dino import head  # noqa: F401  (it registers the head)
