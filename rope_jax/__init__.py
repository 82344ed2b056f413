"""Positional information for vision transformers in JAX: schemes and backbones by name.

import rope_jax
model = rope_jax.create_model("vit_s16", position="axial_rope")
logits = model(images)  # [B, H, W, 3], normalised; any H, W that the patch size divides

Names and modules are imported when they are first used, so that `rope_jax --help` does not wait for
jax.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for editors and type checkers
    from rope_jax.data.images.decode import decode_image
    from rope_jax.models import list_models
    from rope_jax.positions import list_positions
    from rope_jax.runs.restore import create_model, load_checkpoint
    from rope_jax.weights import convert_state_dict, list_weights, save_pretrained
    from rope_jax.weights.export import export, load_exported

__version__ = "0.1.0"

_HOMES = {
    "convert_state_dict": "rope_jax.weights",
    "create_model": "rope_jax.runs.restore",  # which opens workdirs, too
    "decode_image": "rope_jax.data.images.decode",
    "export": "rope_jax.weights.export",
    "list_models": "rope_jax.models",
    "list_positions": "rope_jax.positions",
    "list_weights": "rope_jax.weights",
    "load_checkpoint": "rope_jax.runs.restore",
    "load_exported": "rope_jax.weights.export",
    "save_pretrained": "rope_jax.weights",
}

__all__ = [
    "__version__",
    "convert_state_dict",
    "create_model",
    "decode_image",
    "export",
    "list_models",
    "list_positions",
    "list_weights",
    "load_checkpoint",
    "load_exported",
    "save_pretrained",
]


if not TYPE_CHECKING:  # type checkers would take any name for one of the module

    def __getattr__(name: str) -> Any:
        """Imports a public name or a module of the package when it is first used."""
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
