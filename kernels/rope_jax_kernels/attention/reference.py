"""Attention in plain jax.numpy for all patterns: the "xla" implementation, and the definition that
kernels are tested against.

It is exact, differentiable in q, k, v, bias and rotation, and leaves the precision of matrix
products to the caller's `jax.default_matmul_precision`.
"""

import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, Int

from rope_jax_kernels import device
from rope_jax_kernels.attention import neighborhood
from rope_jax_kernels.attention.dense import (
    attend,
    attend_in_blocks,
    spread_table,
    turn_tokens,
)
from rope_jax_kernels.attention.patterns import Neighborhood, Pair, Pattern, Window, to_pair
from rope_jax_kernels.rotary.reference import turn_pairs
from rope_jax_kernels.rotation import Rotation

MOST_TOKENS = 1024
"""Up to which global attention keeps its weights for the backward pass."""
BLOCK = 256
"""Queries that are computed at a time with more tokens."""


def attend_globally(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    *,
    rotation: Rotation | None,
    bias: Float[Array, "N L L"] | None,
    scale: float | Float[Array, ""],
) -> Float[Array, "B L N D"]:
    """Attention of every token to every token."""
    if rotation is not None and device.is_gpu():
        q, k = turn_tokens(q, rotation), turn_tokens(k, rotation)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if rotation is not None and not device.is_gpu():  # in the order of memory, which a CPU needs
        theta = rotation.angles()
        q, k = (turn_pairs(x, theta, rotation.pairing) for x in (q, k))
    if export.is_symbolic_dim(q.shape[2]) or q.shape[2] <= MOST_TOKENS:
        return attend(q, k, v, scale=scale, bias=bias).swapaxes(1, 2)
    blocks = attend_in_blocks(q, k, v, scale=scale, bias=bias, size=BLOCK)
    return blocks.swapaxes(1, 2)


def axis_regions(length: int, size: int, shift: int) -> Int[np.ndarray, " padded"]:
    """Labels the parts of a padded and rolled axis that may attend to each other; padding is -1.

    After the roll the last window holds tokens of both ends of the map, with different labels.
    """
    padded = -(-length // size) * size
    rolled = np.arange(padded)
    return np.where((rolled + shift) % padded < length, rolled >= padded - shift, -1)


def window_regions(grid: Pair, window: Window) -> Int[np.ndarray, "windows tokens"]:
    """Region of each token of each window of a padded and rolled map.

    Padding is a region too, so that it attends to itself and no softmax is empty.
    """
    rows, columns = (
        axis_regions(*axis) for axis in zip(grid, window.size, window.shift, strict=True)
    )
    regions = np.where((rows[:, None] < 0) | (columns < 0), -1, 2 * rows[:, None] + columns)
    h, w = window.size
    regions = regions.reshape(len(rows) // h, h, len(columns) // w, w)
    return regions.swapaxes(1, 2).reshape(-1, h * w)


def split_windows(
    x: Float[Array, "B H W N D"], window: Window
) -> Float[Array, "B windows tokens N D"]:
    """Pads a map at the bottom and right, rolls it, and cuts it into windows."""
    batch, *grid, heads, head_dim = x.shape
    (h, w), (dy, dx) = window.size, window.shift
    x = jnp.pad(x, ((0, 0), (0, -grid[0] % h), (0, -grid[1] % w), (0, 0), (0, 0)))
    if window.shift != (0, 0):
        x = jnp.roll(x, (-dy, -dx), axis=(1, 2))
    rows, columns = x.shape[1] // h, x.shape[2] // w
    x = x.reshape(batch, rows, h, columns, w, heads, head_dim)
    return x.swapaxes(2, 3).reshape(batch, rows * columns, h * w, heads, head_dim)


def join_windows(
    x: Float[Array, "B windows tokens N D"], grid: Pair, window: Window
) -> Float[Array, "B H W N D"]:
    """Inverse of `split_windows`."""
    batch, _, _, heads, head_dim = x.shape
    (h, w), shift = window.size, window.shift
    rows, columns = (-(-n // size) for n, size in zip(grid, window.size, strict=True))
    x = x.reshape(batch, rows, columns, h, w, heads, head_dim).swapaxes(2, 3)
    x = x.reshape(batch, rows * h, columns * w, heads, head_dim)
    if shift != (0, 0):
        x = jnp.roll(x, shift, axis=(1, 2))
    return x[:, : grid[0], : grid[1]]


def window_bias(
    table: Float[Array, "N offsets"], size: int | Pair
) -> Float[Array, "N tokens tokens"]:
    """Spreads a table of offsets query - key to the bias matrix of one window (Swin).

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import window_bias
        >>> window_bias(jnp.arange(3.0)[None], size=(1, 2))[0].tolist()
        [[1.0, 0.0], [2.0, 1.0]]

    Args:
        table: [N, (2h-1) * (2w-1)], columns fastest.
        size: (h, w) of the window in tokens, or one number for both.

    Returns:
        [N, h*w, h*w], tokens in row-major order.

    Raises:
        ValueError: the table does not fit the size.
    """
    h, w = size = to_pair("size", size, 1)
    offsets = (2 * h - 1) * (2 * w - 1)
    if table.ndim != 2 or table.shape[1] != offsets:
        raise ValueError(
            f"table has shape {table.shape}; for size={size} it must be [N, {offsets}]; Swin's "
            "code has the transpose"
        )
    rows, columns = (np.arange(n)[:, None] - np.arange(n) + n - 1 for n in size)
    bias = spread_table(table.reshape(-1, 2 * h - 1, 2 * w - 1), rows, columns)
    return bias.swapaxes(2, 3).reshape(-1, h * w, h * w)


def attend_in_windows(
    q: Float[Array, "B H W N D"],
    k: Float[Array, "B H W N D"],
    v: Float[Array, "B H W N D"],
    *,
    window: Window,
    rotation: Rotation | None,
    bias: Float[Array, "N offsets"] | None,
    scale: float | Float[Array, ""],
) -> Float[Array, "B H W N D"]:
    """Attention within windows; `window` is fitted to the map."""
    grid = (q.shape[1], q.shape[2])
    q, k, v = (split_windows(x, window) for x in (q, k, v))
    q, k, v = (x.swapaxes(2, 3) for x in (turn_tokens(q, rotation), turn_tokens(k, rotation), v))
    if bias is not None:
        bias = window_bias(bias, window.size)
    regions = window_regions(grid, window)
    allowed = None
    if regions.any():
        labels = jnp.asarray(regions)[:, None]
        allowed = labels[..., :, None] == labels[..., None, :]
    out = attend(q, k, v, scale=scale, bias=bias, allowed=allowed)
    return join_windows(out.swapaxes(2, 3), grid, window)


def attention(
    q: Float[Array, "B *places N D"],
    k: Float[Array, "B *places N D"],
    v: Float[Array, "B *places N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N ..."] | None,
    scale: float | Float[Array, ""] | None,
) -> Float[Array, "B *places N D"]:
    """`rope_jax_kernels.attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(pattern, Window):
        window = pattern.fit((q.shape[1], q.shape[2]))
        return attend_in_windows(q, k, v, window=window, rotation=rotation, bias=bias, scale=scale)
    if isinstance(pattern, Neighborhood):
        return neighborhood.attend_to_neighbors(
            q, k, v, pattern=pattern, rotation=rotation, bias=bias, scale=scale
        )
    return attend_globally(q, k, v, rotation=rotation, bias=bias, scale=scale)


def attention_qkv(
    qkv: Float[Array, "B *places 3 N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N ..."] | None,
    scale: float | Float[Array, ""] | None,
) -> Float[Array, "B *places N D"]:
    """`rope_jax_kernels.attention_qkv`."""
    q, k, v = (qkv[..., i, :, :] for i in range(3))
    return attention(q, k, v, pattern=pattern, rotation=rotation, bias=bias, scale=scale)
