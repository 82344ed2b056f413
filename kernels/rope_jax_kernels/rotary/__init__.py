"""Rotary position embedding: turn pairs of channels of q and k by angles that depend on the token's position."""

from rope_jax_kernels.rotary.api import rotate, rotate_by_angles, rotate_qkv

__all__ = ["rotate", "rotate_by_angles", "rotate_qkv"]
