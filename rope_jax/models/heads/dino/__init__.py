"""DINO: a head of detection."""

from rope_jax.models.heads.dino.head import Dino, DinoOptions

__all__ = ["Dino", "DinoOptions"]
