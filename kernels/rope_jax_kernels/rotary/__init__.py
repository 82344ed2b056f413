"""Rotary position embedding: pairs of channels of q and k turn by position-dependent angles."""

from rope_jax_kernels.rotary.api import (
    rotate,
    rotate_by_angles,
    rotate_qkv,
    unpack_and_rotate,
)

__all__ = [
    "rotate",
    "rotate_by_angles",
    "rotate_qkv",
    "unpack_and_rotate",
]
