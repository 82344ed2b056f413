"""The documented function of `rope_jax.weights`, under its former name."""

from rope_jax.weights import load_pretrained

__all__ = ["load_pretrained"]
