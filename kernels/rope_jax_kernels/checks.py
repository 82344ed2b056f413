"""Checks of the arguments of the public functions.

Every error names the argument, its value, what is allowed, and what to change.
"""

import numbers
from typing import Any

import jax.numpy as jnp

from rope_jax_kernels.attention.patterns import Global, Pattern, Window
from rope_jax_kernels.rotation import Rotation

LAYOUTS = ("BLND", "BNLD")
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
# Shape of an array: integers, or symbols where `jax.export` leaves a size open.
Shape = tuple[Any, ...]


def check_floating(name: str, x: Any) -> None:
    """Requires an array of 16, 32 or 64-bit floating-point numbers."""
    allowed = "it must be a floating-point array (float16, bfloat16, float32 or float64)"
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} is a {type(x).__name__}; {allowed}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; {allowed}")


def check_layout(name: str, x: Any, layout: str) -> tuple[int, int, int]:
    """Requires a 4-D floating-point array; returns its tokens, heads and head dimension."""
    check_floating(name, x)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {list(LAYOUTS)}")
    if x.ndim != 4:
        raise ValueError(
            f"{name} has shape {x.shape}; with layout={layout!r} it must have the 4 dimensions "
            f"{list(layout)}"
        )
    tokens, heads = x.shape[layout.index("L")], x.shape[layout.index("N")]
    return tokens, heads, x.shape[3]


def check_packed(qkv: Any) -> tuple[int, int, int]:
    """Requires an array [B, L, 3, N, D]; returns its tokens, heads and head dimension."""
    check_floating("qkv", qkv)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"qkv has shape {qkv.shape}; it must be [B, L, 3, N, D], with q, k and v along the "
            "third dimension"
        )
    return qkv.shape[1], qkv.shape[3], qkv.shape[4]


def check_pairs(pairs: int, head_dim: int, pairing: str, source: str) -> None:
    """Requires a known pairing, and no more pairs of channels than a head has."""
    if pairing not in ("half", "interleaved"):
        raise ValueError(
            f"pairing={pairing!r} is unknown; use 'half' (channels r, R + r) or 'interleaved' "
            "(channels 2r, 2r + 1)"
        )
    if 2 * pairs > head_dim:
        raise ValueError(
            f"{source} describes {pairs} pairs = {2 * pairs} channels, but a head has only "
            f"{head_dim}; at most {head_dim // 2} pairs fit"
        )


def check_rotation(rotation: Any, tokens: int, heads: int, head_dim: int, name: str) -> None:
    """Requires a rotation that fits the array called `name`."""
    if not isinstance(rotation, Rotation):
        raise TypeError(
            f"rotation is a {type(rotation).__name__}; it must be a Rotation(coords, freqs)"
        )
    coords, freqs = rotation.coords, rotation.freqs
    check_floating("rotation.coords", coords)
    check_floating("rotation.freqs", freqs)
    if coords.ndim != 2 or freqs.ndim != 3 or coords.shape[1] != freqs.shape[1]:
        raise ValueError(
            f"rotation has coords {coords.shape} and freqs {freqs.shape}; they must be [L, A] and "
            "[N or 1, A, R] with the same A"
        )
    if coords.shape[0] != tokens:
        raise ValueError(
            f"rotation.coords places {coords.shape[0]} tokens, but {name} has {tokens}; they must "
            "agree (prefix tokens have coordinates 0)"
        )
    if freqs.shape[0] not in (1, heads):
        raise ValueError(
            f"rotation.freqs is for {freqs.shape[0]} heads, but {name} has {heads}; it must be for "
            f"{heads}, or for 1 when heads share it"
        )
    check_pairs(freqs.shape[2], head_dim, rotation.pairing, "rotation.freqs")


def check_pattern(pattern: Any) -> None:
    """Requires an instance of one of the three patterns."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern={pattern!r} is not a pattern; use Global(), Window(size=(h, w)) or "
            "Neighborhood(size=(kh, kw))"
        )


def check_operand(name: str, x: Any, pattern: Pattern) -> None:
    """Requires a floating-point array with the dimensions that the pattern expects.

    Only the batch dimension may be empty.
    """
    check_floating(name, x)
    is_global, shape = isinstance(pattern, Global), x.shape
    dims = "[B, L, N, D]" if is_global else "[B, H, W, N, D]"
    if name == "qkv":
        dims = dims.replace("N", "3, N")
    if len(shape) != dims.count(",") + 1:
        advice = "restore its rows and columns, without prefix tokens"
        if is_global:
            advice = "flatten its rows and columns"
        raise ValueError(
            f"{name} has shape {shape}; with pattern={pattern} it must be {dims}: {advice}, or "
            "choose another pattern"
        )
    if name == "qkv" and shape[-3] != 3:
        raise ValueError(
            f"qkv has shape {shape}; it must be {dims}, with q, k and v along the third dimension "
            "from the end"
        )
    if 0 in shape[1:]:
        raise ValueError(f"{name} has shape {shape}; no dimension but the batch may be empty")


def check_terms(
    shape: Shape, name: str, pattern: Pattern, rotation: Any, bias: Any, scale: Any
) -> Any:
    """Requires a rotation, bias and scale (or None) that fit queries of `shape`.

    Args:
        shape: [B, L, N, D] or [B, H, W, N, D].
        name: the argument that holds the queries, "q" or "qkv".
        pattern: of the call.
        rotation: a `Rotation` or None.
        bias: array or None.
        scale: number, array of one number, or None.

    Returns:
        The bias, repeated for each head if they share it.
    """
    _, *places, heads, head_dim = shape
    if not isinstance(scale, numbers.Real | None):
        if not hasattr(scale, "dtype"):
            raise TypeError(
                f"scale={scale!r} is a {type(scale).__name__}; it must be a number, an array that "
                "holds one, or None"
            )
        check_floating("scale", scale)
        if scale.shape != ():
            raise ValueError(
                f"scale has shape {scale.shape}; it must be one number: for one of each head, "
                "multiply q by it instead"
            )
    places, part = tuple(places), name
    if isinstance(pattern, Window):
        part = f"a window of {pattern.fit(places).size} in {name}"
    if rotation is not None:
        check_rotation(rotation, pattern.rotated_tokens(places), heads, head_dim, part)
    if bias is not None:
        check_floating("bias", bias)
        expected = pattern.bias_shape(heads, places)
        if bias.shape not in (expected, (1, *expected[1:])):
            raise ValueError(
                f"bias has shape {bias.shape}; with pattern={pattern} it must be {expected}, that "
                f"is {pattern.bias_layout} for {part}, or have 1 in place of N if heads share it"
            )
        bias = jnp.broadcast_to(bias, expected)
    return bias
