"""DINO: a head of detection."""

from rope_jax.models.heads.dino.head import Dino
from rope_jax.models.heads.dino.options import DinoOptions

__all__ = ["Dino", "DinoOptions"]
