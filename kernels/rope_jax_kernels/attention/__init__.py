"""Softmax attention with rotary embedding and relative bias inside, over all tokens, windows or
neighbourhoods.
"""

from rope_jax_kernels.attention.api import attention, attention_qkv
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pattern, Window
from rope_jax_kernels.attention.reference import window_bias

__all__ = [
    "Global",
    "Neighborhood",
    "Pattern",
    "Window",
    "attention",
    "attention_qkv",
    "window_bias",
]
