"""Common parts of the Mosaic GPU kernels for rotation and attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import cos_sin


def store(ref: Any, value: Array, *, interpret: bool) -> None:
    """`ref[...] = value` in any layout, even one that takes more instructions than the best.

    From jax 0.12 on, `ref[...] = value` refuses layouts that are not the best. `plgpu.store` is new
    in that release, and does not work in interpret mode.
    """
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def repeat(count: Any, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """carry = body(i, carry) for `count` numbers i of 32 bits.

    With a fixed count and `jax_enable_x64`, those of `fori_loop` have 64 bits, which neither the
    other arithmetic of kernels nor Mosaic GPU accepts.
    """
    return jax.lax.fori_loop(0, count, lambda i, carry: body(i.astype(np.int32), carry), carry)


def turns(theta: Float[Array, "rows R"]) -> tuple[Float[Array, "rows R"], Float[Array, "rows R"]]:
    """Cosine and sine of float32 angles, by the rounding that Mosaic GPU has."""
    to_even = jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return cos_sin(theta, nearest=lambda x: jax.lax.round(x, to_even))


def start_in_one_warp(number: int, start: Callable[[], None], like: Any) -> None:
    """Starts copies by one warp of a warpgroup: the others do not issue their instructions.

    By all of them where `jax.shard_map` tracks what varies: Mosaic GPU cannot separate warps there.

    Args:
        number: of the warp.
        start: starts the copies.
        like: a ref of the kernel, which varies if any does.
    """
    if jax.typeof(like).manual_axis_type.varying:
        start()
    else:
        plgpu.warp_map(lambda warp: pl.when(warp == number)(start))


def angle_gradient(
    x: Float[Array, "64 D"], gradient: Float[Array, "64 D"], pairs: int
) -> Float[Array, "64 R"]:
    """The gradient of the angles of turned rows, from these and their gradient."""
    a, b = (x[:, first : first + pairs].astype(jnp.float32) for first in (0, pairs))
    return gradient[:, pairs : 2 * pairs] * a - gradient[:, :pairs] * b


def angles(
    coords: Any, freqs: Any, place: tuple, shape: tuple[int, int], layouts: tuple[Any, Any, Any]
) -> Float[Array, "rows R"]:
    """Theta of a tile of tokens: an outer product over the tile for each axis, without a gather.

    Args:
        coords: ref of [rows, A], in shared memory.
        freqs: ref of frequencies [..., A, R].
        place: index of the frequencies of the tile, before the axis.
        shape: (rows, R).
        layouts: in registers, of [rows, R], of [rows] and of [R].
    """
    tile_layout, row_layout, column_layout = layouts

    def spread(x: Array, dim: int) -> Float[Array, "rows R"]:
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (dim,)), tile_layout)

    theta = None
    for axis in range(freqs.shape[-2]):
        along = plgpu.load(coords.at[:, axis], layout=row_layout, optimized=False)
        freq = plgpu.load(freqs.at[*place, axis], layout=column_layout, optimized=False)
        term = spread(along, 0) * spread(freq, 1)
        theta = term if theta is None else theta + term
    return theta


def merge_mapped(size: int, operands: tuple, batched: tuple) -> tuple:
    """Merges the mapped dimension of operands, of this size, into the first one, for vmap rules."""
    wide = [
        x if b else jnp.broadcast_to(x, (size, *x.shape))
        for x, b in zip(operands, batched, strict=True)
    ]
    return tuple(x.reshape(-1, *x.shape[2:]) for x in wide)
