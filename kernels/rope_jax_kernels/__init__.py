"""Rotary position embedding, and attention with the rotation inside, for JAX.

Usage:
    import jax.numpy as jnp
    from rope_jax_kernels import Neighborhood, Rotation, attention

    coords = jnp.stack(jnp.meshgrid(jnp.arange(56.0), jnp.arange(56.0), indexing="ij"), -1).reshape(-1, 2)  # [H*W, A]
    freqs = jnp.ones((2, 2, 16))  # [N, A, R]: 2 heads, 2 axes, 16 pairs of channels, radians per patch
    out = attention(q, k, v, pattern=Neighborhood(size=(7, 7)), rotation=Rotation(coords, freqs))  # all [B, 56, 56, 2, 32]
"""

from rope_jax_kernels.attention import Global, Neighborhood, Window, attention, attention_qkv
from rope_jax_kernels.explain import explain
from rope_jax_kernels.rotary import rotate, rotate_by_angles, rotate_qkv
from rope_jax_kernels.rotation import Rotation

__all__ = [
    "Global",
    "Neighborhood",
    "Rotation",
    "Window",
    "attention",
    "attention_qkv",
    "explain",
    "rotate",
    "rotate_by_angles",
    "rotate_qkv",
]
