"""Positional information for vision transformers: every scheme, on every backbone, in JAX.

import rope_jax
model = rope_jax.create_model("vit_s16", position="axial_rope")
logits = model(images)  # [B, H, W, 3], normalised; any H, W that the patch size divides
"""

from rope_jax.data.images.decode import decode_image
from rope_jax.models import (
    convert_state_dict,
    create_model,
    export,
    list_models,
    save_pretrained,
)
from rope_jax.positions import list_positions
from rope_jax.restore import load_checkpoint

__all__ = [
    "convert_state_dict",
    "create_model",
    "decode_image",
    "export",
    "list_models",
    "list_positions",
    "load_checkpoint",
    "save_pretrained",
]
