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

__all__ = ["list_models"]
