"""Backbones, by name."""

from rope_jax.models import vit  # noqa: F401  (each family enters its models in the registry)
from rope_jax.models.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
