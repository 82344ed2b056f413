"""Softmax attention with rotary embedding and relative bias inside, over all tokens, windows or neighbourhoods."""

from rope_jax_kernels.attention.api import attention, attention_qkv
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Window

__all__ = ["Global", "Neighborhood", "Window", "attention", "attention_qkv"]
