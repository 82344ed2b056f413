"""Official weights in and out: one table of names for each source, and one engine that reads them in both directions."""

from rope_jax.models.pretrained.convert import convert_state_dict, export_state_dict
from rope_jax.models.pretrained.files import load_pretrained, save_pretrained
from rope_jax.models.pretrained.preprocessing import Preprocessing

__all__ = ["Preprocessing", "convert_state_dict", "export_state_dict", "load_pretrained", "save_pretrained"]
