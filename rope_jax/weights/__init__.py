"""Import and export of official weights: a name table per source, and a converter for both ways."""

from rope_jax.models.description import Preprocessing
from rope_jax.weights.convert import export_state_dict
from rope_jax.weights.load import convert_state_dict, load_pretrained, save_pretrained
from rope_jax.weights.released import ReleasedWeights, list_weights

__all__ = [
    "Preprocessing",
    "ReleasedWeights",
    "convert_state_dict",
    "export_state_dict",
    "list_weights",
    "load_pretrained",
    "save_pretrained",
]
