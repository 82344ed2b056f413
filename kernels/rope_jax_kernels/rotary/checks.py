"""Shapes and dtypes that the rotary operations accept. Every error names the argument, its value and what is allowed."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rope_jax_kernels.rotation import Rotation

LAYOUTS = ("BLND", "BNLD")
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def check_floating(name: str, x: Any) -> None:
    """Refuses what is no array, integers and booleans, and floating-point numbers of 8 bits, which nothing here computes with."""
    allowed = "it must be a floating-point array (float16, bfloat16, float32 or float64)"
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} is a {type(x).__name__}; {allowed}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; {allowed}")


def check_pairs(pairs: int, head_dim: int, pairing: str, source: str) -> None:
    """Refuses an unknown pairing, and more pairs of channels than a head has."""
    if pairing not in ("half", "interleaved"):
        raise ValueError(f"pairing={pairing!r} is unknown; use 'half' (channels r, R + r) or 'interleaved' (channels 2r, 2r + 1)")
    if 2 * pairs > head_dim:
        raise ValueError(
            f"{source} describes {pairs} pairs = {2 * pairs} channels, but a head has only {head_dim}; at most {head_dim // 2} pairs fit"
        )


def check_rotation(rotation: Any, tokens: int, heads: int, head_dim: int, name: str) -> None:
    """Refuses what is no rotation, and one that does not fit `tokens`, `heads` and `head_dim` of the array called `name`."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation is a {type(rotation).__name__}; it must be a Rotation(coords, freqs)")
    coords, freqs = rotation.coords, rotation.freqs
    check_floating("rotation.coords", coords)
    check_floating("rotation.freqs", freqs)
    if coords.ndim != 2 or freqs.ndim != 3 or coords.shape[1] != freqs.shape[1]:
        raise ValueError(
            f"rotation has coords {coords.shape} and freqs {freqs.shape}; they must be [L, A] and [N or 1, A, R] with the same A"
        )
    if coords.shape[0] != tokens:
        raise ValueError(
            f"rotation.coords places {coords.shape[0]} tokens, but {name} has {tokens}; they must agree (prefix tokens have coordinates 0)"
        )
    if freqs.shape[0] not in (1, heads):
        raise ValueError(
            f"rotation.freqs is for {freqs.shape[0]} heads, but {name} has {heads}; it must be for {heads}, or for 1 when heads share it"
        )
    check_pairs(freqs.shape[2], head_dim, rotation.pairing, "rotation.freqs")


def split_shape(name: str, x: Array, layout: str) -> tuple[int, int, int]:
    """Tokens, heads and head dim of a 4-D array in `layout`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {list(LAYOUTS)}")
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}; with layout={layout!r} it must have the 4 dimensions {list(layout)}")
    _, first, second, head_dim = x.shape
    return (first, second, head_dim) if layout == "BLND" else (second, first, head_dim)


def check_packed(qkv: Array) -> None:
    """Refuses anything but [B, L, 3, N, D]."""
    check_floating("qkv", qkv)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {qkv.shape}; it must be [B, L, 3, N, D], with q, k and v along the third dimension")
