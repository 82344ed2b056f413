"""Backbones, by name."""

from rope_jax.models import beit, cat, cct, ceit, dino, nat, resformer, swin, t2t, vit  # noqa: F401  (each family enters its models in the registry)
from rope_jax.models.pretrained import convert_state_dict
from rope_jax.models.registry import create_model, list_models

__all__ = ["convert_state_dict", "create_model", "list_models"]
