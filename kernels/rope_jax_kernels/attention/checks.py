"""Arguments that attention accepts. Every error names the argument, its value, what is allowed, and what to change."""

import numbers
from typing import Any

from rope_jax_kernels.attention.patterns import Global, Pattern, Window
from rope_jax_kernels.rotary.checks import check_floating, check_rotation


def check_pattern(pattern: Any) -> None:
    """Refuses anything but an instance of one of the three patterns."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern={pattern!r} is not a pattern; use Global(), Window(size=(h, w)) or Neighborhood(size=(kh, kw))")


def check_map(name: str, shape: tuple[int, ...], pattern: Pattern) -> None:
    """Refuses an array whose dimensions are not those the pattern works on."""
    dims = "[B, L, N, D]" if isinstance(pattern, Global) else "[B, H, W, N, D]"
    if name == "qkv":
        dims = dims.replace("N", "3, N")
    if len(shape) != dims.count(",") + 1:
        advice = "flatten its rows and columns" if isinstance(pattern, Global) else "restore its rows and columns, without prefix tokens"
        raise ValueError(f"{name} has shape {shape}; with pattern={pattern} it must be {dims}: {advice}, or choose another pattern")
    if name == "qkv" and shape[-3] != 3:
        raise ValueError(f"qkv has shape {shape}; it must be {dims}, with q, k and v along the third dimension from the end")
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}; no dimension may be empty")


def check_terms(shape: tuple[int, ...], name: str, pattern: Pattern, rotation: Any, bias: Any, scale: Any) -> None:
    """Refuses a rotation, a bias or a scale that is none, or does not fit queries of `shape`; `name` is the array they came in."""
    *_, heads, head_dim = shape
    if not isinstance(scale, numbers.Real | None):
        if not hasattr(scale, "dtype"):
            raise TypeError(f"scale={scale!r} is a {type(scale).__name__}; it must be a number, an array that holds one, or None")
        check_floating("scale", scale)
        if scale.shape != ():
            raise ValueError(f"scale has shape {scale.shape}; it must be one number: for one of each head, multiply q by it instead")
    grid = shape[1:-2]
    if isinstance(pattern, Global):
        (tokens,) = grid
        bias_shape, layout = pattern.bias_shape(heads, tokens), "[N, L, L]"
    elif isinstance(pattern, Window):
        window = pattern.fit(grid)
        tokens, name = window.size[0] * window.size[1], f"a window of {window.size} in {name}"
        bias_shape, layout = window.bias_shape(heads), f"[N, (2h-1)*(2w-1)] for a window of {window.size}"
    else:
        tokens = grid[0] * grid[1]
        bias_shape, layout = pattern.bias_shape(heads), "[N, 2kh-1, 2kw-1]"
    if rotation is not None:
        check_rotation(rotation, tokens, heads, head_dim, name)
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != bias_shape:
            raise ValueError(f"bias has shape {bias.shape}; with pattern={pattern} it must be {bias_shape}, that is {layout}")
