"""Models by name: backbones, and heads of dense prediction on them."""

from rope_jax.models import (  # noqa: F401  (each family registers its models)
    beit,
    cat,
    cct,
    ceit,
    dino,
    nat,
    swin,
    t2t,
    vit,
    vit_adapter,
)
from rope_jax.models.registry import list_models
from rope_jax.weights import convert_state_dict, save_pretrained
from rope_jax.weights.create import create_model
from rope_jax.weights.export import export, load_exported

__all__ = [
    "convert_state_dict",
    "create_model",
    "export",
    "list_models",
    "load_exported",
    "save_pretrained",
]
