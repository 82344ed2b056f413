"""Rotary position embedding, and attention with the rotation inside, for JAX.

Example:
    >>> import jax.numpy as jnp
    >>> from rope_jax_kernels import Neighborhood, Rotation, attention
    >>> rows, columns = jnp.meshgrid(jnp.arange(8.0), jnp.arange(8.0), indexing="ij")
    >>> coords = jnp.stack([rows, columns], axis=-1).reshape(-1, 2)  # [H*W, A], in patches
    >>> freqs = jnp.ones((2, 2, 4))  # [N, A, R]: 2 heads, 2 axes, 4 pairs of channels
    >>> q = k = v = jnp.ones((1, 8, 8, 2, 16))  # [B, H, W, N, D]
    >>> pattern = Neighborhood(size=(3, 3))
    >>> attention(q, k, v, pattern=pattern, rotation=Rotation(coords, freqs)).shape
    (1, 8, 8, 2, 16)
"""

from rope_jax_kernels.attention import (
    Global,
    Neighborhood,
    Pattern,
    Window,
    attention,
    attention_qkv,
    window_bias,
)
from rope_jax_kernels.calls import explain
from rope_jax_kernels.rotary import rotate, rotate_by_angles, rotate_qkv
from rope_jax_kernels.rotation import Pairing, Rotation
from rope_jax_kernels.tuning.choices import Choices
from rope_jax_kernels.tuning.measure import tune
from rope_jax_kernels.tuning.record import Call, record

__version__ = "0.1.0"

__all__ = [
    "Call",
    "Choices",
    "Global",
    "Neighborhood",
    "Pairing",
    "Pattern",
    "Rotation",
    "Window",
    "attention",
    "attention_qkv",
    "explain",
    "record",
    "rotate",
    "rotate_by_angles",
    "rotate_qkv",
    "tune",
    "window_bias",
]
