"""Kernels that split a packed projection into rotated q, k and v, and pack them again.

For attention that needs separate operands, such as cuDNN's. The kernel reads and writes every
channel once, in either direction; the gradient of one direction is the other. Rows, angles and
their gradient are those of `kernel`. Nothing is in place, so the inputs that the gradient of
learnable frequencies needs are saved without a copy. Tokens of zeros that an attention needs after
the last one are written in the same pass, and not read on the way back.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.arithmetic import cos_sin, power_of_two
from rope_jax_kernels.device import vary_alike, without_symbolic_zeros
from rope_jax_kernels.rotary import reference, tile_sizes, triton
from rope_jax_kernels.rotary.kernel import Rows, gradients_of_angles
from rope_jax_kernels.rotary.triton import tile_angles
from rope_jax_kernels.rotation import Rotation

BYTES_IN_FLIGHT = 256  # of one thread between its loads and its stores: 64 registers


def tile_of(
    batch: int, rows: int, pairs: int, head_dim: int, itemsize: int, pairing: str
) -> tile_sizes.Tile:
    """The tile of `tile_sizes` with one batch item in flight.

    Whole rows of three arrays are in flight here, and not only the turning part of two.
    """
    tile = tile_sizes.tile_of(batch, rows, pairs, head_dim, itemsize, pairing)
    most = tile_sizes.THREADS * BYTES_IN_FLIGHT // (power_of_two(head_dim) * itemsize)
    while tile.rows > max(1, most):
        tile = dataclasses.replace(tile, rows=tile.rows // 2)
    steps = 1
    while (
        steps < tile_sizes.MOST_STEPS
        and pl.cdiv(rows, tile.rows) * pl.cdiv(batch, 2 * steps) >= tile_sizes.PROGRAMS
    ):
        steps *= 2
    return dataclasses.replace(tile, items=1, steps=steps)


def moving_kernel(
    *refs: Any, rows: Rows, tile: tile_sizes.Tile, pairs: int, sources: int, angles: int, saved: int
) -> None:
    """One program: a tile of rows of `tile.batch` batch items, of q, k and v.

    Args:
        *refs: `sources` arrays, one packed or three apart; `angles` refs of (coords, freqs);
            `saved` inputs of the forward pass, packed or apart as its sources were; then the
            outputs: three arrays or one and, with saved inputs, the gradient of theta summed over
            this program's batch items.
        rows: meaning of the rows; they turn q and k.
        tile: size of the tile.
        pairs: R.
        sources: 1 or 3.
        angles: how many refs describe the angles.
        saved: 4 - sources, or 0.
    """
    taken, refs = refs[:sources], refs[sources:]
    angle_refs, refs = refs[:angles], refs[angles:]
    inputs, refs = refs[:saved], refs[saved:]
    given, sums = refs[: 4 - sources], refs[4 - sources :]
    batch, _, head_dim = taken[0].shape
    first = pl.program_id(1) * tile.batch

    index = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    pair = jnp.arange(tile.pairs, dtype=jnp.int32)
    in_tile = written = (index < rows.tokens * rows.heads)[:, None]
    if rows.padding and sources == 1:
        written = (index < (rows.tokens + rows.padding) * rows.heads)[:, None]
    inside = in_tile & (pair < pairs)[None, :]
    token, head = rows.token_and_head(index)
    theta = tile_angles(rows, angle_refs, token, head, pair, inside)
    cos, sin = cos_sin(theta)
    sin = rows.direction * sin
    q, k = rows.rows(index)
    packed_rows = (q, k, k + rows.heads)

    def up_to(end: int, start: int = 0, width: int | None = None) -> list[tuple[Array, ...]]:
        """Channels from start to end, if any, with the masks of what is read and what is written.

        They differ in the padding, whose zeros are those of masked loads.
        """
        c = start + jnp.arange(width or power_of_two(max(1, end - start)), dtype=jnp.int32)
        if start >= end:
            return []
        mask = in_tile & (c < end)[None, :]
        return [(c, mask, mask if written is in_tile else written & (c < end)[None, :])]

    if rows.pairing == "half":
        turning = up_to(pairs, 0, tile.pairs) + up_to(2 * pairs, pairs, tile.pairs)
    else:
        turning = up_to(2 * pairs, 0, 2 * tile.pairs)
    parts = (turning + up_to(head_dim, 2 * pairs),) * 2 + (up_to(head_dim),)

    def at(arrays: tuple, part: int, item: Array, c: Array) -> Any:
        """Reference to channels c of q, k or v (part 0, 1, 2)."""
        ref, row = (arrays[0], packed_rows[part]) if len(arrays) == 1 else (arrays[part], index)
        return ref.at[item, row[:, None], c[None, :]]

    def load(arrays: tuple, part: int, item: Array, channels: list) -> list[Array]:
        # Zeros outside, so that sums over batch items need no mask of their own.
        return [
            plt.load(at(arrays, part, item, c), mask=mask & (item < batch), other=0)
            for c, mask, _ in channels
        ]

    def members(chunks: list[Array]) -> tuple[Array, Array]:
        """First and second members of the pairs, float32."""
        if rows.pairing == "interleaved":
            chunks = jnp.unstack(chunks[0].reshape(tile.rows, tile.pairs, 2), axis=2)
        return tuple(x.astype(jnp.float32) for x in chunks)

    def turned(
        chunks: list[Array], dtheta: Array | None, before: list[Array]
    ) -> tuple[list[Array], Array | None]:
        """The chunks of q or k, the first ones turned and rounded, and the gradient of theta."""
        n = len(turning)
        x, y = members(chunks[:n])
        x, y = x * cos - y * sin, y * cos + x * sin
        if before:
            u, v = members(before)
            dtheta = dtheta + (u * y - v * x)
        new = [x.astype(chunks[0].dtype), y.astype(chunks[0].dtype)]
        if rows.pairing == "interleaved":
            new = [jnp.stack(new, axis=2).reshape(tile.rows, 2 * tile.pairs)]
        return new + chunks[n:], dtheta

    row_bytes = power_of_two(head_dim) * taken[0].dtype.itemsize * tile.rows // tile_sizes.THREADS
    together = 3 if 3 * row_bytes <= BYTES_IN_FLIGHT else 1

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        item = first + i
        for some in itertools.batched(range(3), together):
            # These loads precede the first store: the compiler cannot rule out that a store changes
            # what is read after it.
            loaded = [
                (
                    load(taken, part, item, parts[part]),
                    load(inputs, part, item, turning if saved and part < 2 else []),
                )
                for part in some
            ]
            for part, (chunks, before) in zip(some, loaded, strict=True):
                if part < 2:
                    chunks, dtheta = turned(chunks, dtheta, before)
                for x, (c, _, mask) in zip(chunks, parts[part], strict=True):
                    plt.store(at(given, part, item, c), x, mask=mask & (item < batch))
        return dtheta

    dtheta = jnp.zeros((tile.rows, tile.pairs), jnp.float32) if saved else None
    dtheta = step(0, dtheta) if tile.steps == 1 else jax.lax.fori_loop(0, tile.steps, step, dtheta)
    for ref in sums:
        # The pass turned gradients back: its angle has the opposite sign of the differentiated one.
        plt.store(
            ref.at[pl.program_id(1), index[:, None], pair[None, :]],
            -rows.direction * dtheta,
            mask=inside,
        )


def launch(
    rows: Rows, arrays: tuple, angles: tuple, saved: tuple = ()
) -> tuple[tuple, Array | None]:
    """Splits (qkv [B, L * 3 * N, D],) into q, k, v [B, M * N, D], or packs these; q and k turn.

    M is L and the padding.

    Returns:
        The arrays, and with `saved` the partial sums of the gradient of theta, [G, L * N, R]
        float32 (otherwise None).
    """
    batch, _, head_dim = arrays[0].shape
    count, pairs, dtype = rows.tokens * rows.heads, angles[1].shape[2], arrays[0].dtype
    written = count + rows.padding * rows.heads if len(arrays) == 1 else count
    tile = tile_of(batch, written, pairs, head_dim, dtype.itemsize, rows.pairing)
    grid = (pl.cdiv(written, tile.rows), pl.cdiv(batch, tile.batch))
    shape = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(arrays[0]).manual_axis_type
    )
    shapes = (
        [shape((batch, written, head_dim), dtype)] * 3
        if len(arrays) == 1
        else [shape((batch, 3 * count, head_dim), dtype)]
    )
    if saved:
        shapes = [*shapes, shape((grid[1], count, pairs), jnp.float32)]
    outputs = pl.pallas_call(
        functools.partial(
            moving_kernel,
            rows=rows,
            tile=tile,
            pairs=pairs,
            sources=len(arrays),
            angles=len(angles),
            saved=len(saved),
        ),
        grid=grid,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=tile_sizes.WARPS),
        interpret=rows.interpret,
        name="rotary_unpack" if len(arrays) == 1 else "rotary_pack",
    )(*arrays, *angles, *saved)
    return (tuple(outputs[:-1]), outputs[-1]) if saved else (tuple(outputs), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def move(rows: Rows, backward: str, arrays: tuple, angles: tuple) -> tuple:
    """`launch`, differentiable; the backward pass is by "triton" or "xla"."""
    return launch(rows, arrays, angles)[0]


def move_forward(rows: Rows, backward: str, arrays: tuple, angles: tuple) -> tuple[tuple, tuple]:
    """Saves the angles, and the inputs only if the angles are differentiated."""
    values, angle_values = tuple(x.value for x in arrays), tuple(x.value for x in angles)
    saved = values if any(x.perturbed for x in angles) else ()
    # `move` and not `launch`, here and in the backward pass, so that derivatives of any order with
    # respect to the data exist.
    return move(rows, backward, values, angle_values), (angle_values, saved)


def move_backward(
    rows: Rows, backward: str, residuals: tuple, gradients: tuple
) -> tuple[tuple, tuple | None]:
    """Moves the gradients back; with saved inputs also sums the gradient of the angles."""
    angles, saved = residuals
    gradients = without_symbolic_zeros(gradients)
    gradients, angles = vary_alike(gradients, angles)  # new zeros do not vary yet
    batch, _, head_dim = gradients[0].shape
    if not saved and backward == "xla":
        rotation = Rotation(*angles, rows.pairing)
        if len(gradients) == 1:
            packed = gradients[0].reshape(batch, rows.tokens, 3, rows.heads, head_dim)
            moved = reference.unpack_and_rotate(packed, rotation, padding=rows.padding)
        else:
            parts = [g.reshape(batch, -1, rows.heads, head_dim) for g in gradients]
            parts = [g[:, : rows.tokens] if rows.padding else g for g in parts]
            moved = (reference.rotate_back_and_pack(*parts, rotation),)
        return tuple(x.reshape(batch, -1, head_dim) for x in moved), None
    back = dataclasses.replace(rows, direction=-rows.direction)
    if not saved:
        return move(back, backward, gradients, angles), None
    gradients, partial = launch(back, gradients, angles, saved)
    return gradients, gradients_of_angles(rows, angles, partial)


move.defvjp(move_forward, move_backward, symbolic_zeros=True)


def unpack_and_rotate(
    qkv: Float[Array, "B L 3 N D"], rotation: Rotation, backward: str = "xla", padding: int = 0
) -> tuple[Float[Array, "B M N D"], Float[Array, "B M N D"], Float[Array, "B M N D"]]:
    """`rope_jax_kernels.rotary.unpack_and_rotate`."""
    batch, tokens, _, heads, head_dim = qkv.shape
    as_rows = (qkv.reshape(batch, -1, head_dim),)
    arrays, angles = vary_alike(as_rows, (rotation.coords, rotation.freqs))
    rows = Rows(tokens, heads, "L3N", rotation.pairing, 1, device.interpreted(), padding=padding)
    parts = move(rows, backward, arrays, angles)
    return tuple(x.reshape(batch, tokens + padding, heads, head_dim) for x in parts)


def rotate_back_and_pack(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    rotation: Rotation,
) -> Float[Array, "B L 3 N D"]:
    """`rope_jax_kernels.rotary.rotate_back_and_pack`."""
    batch, tokens, heads, head_dim = q.shape
    as_rows = tuple(x.reshape(batch, -1, head_dim) for x in (q, k, v))
    arrays, angles = vary_alike(as_rows, (rotation.coords, rotation.freqs))
    rows = Rows(tokens, heads, "L3N", rotation.pairing, -1, device.interpreted())
    packed = move(rows, "triton", arrays, angles)[0]
    return packed.reshape(batch, tokens, 3, heads, head_dim)


def refusal(
    *, rotation: Rotation, backward: str | None = None, padding: int = 0, **arrays: Any
) -> str | None:
    """Why the kernel cannot serve a call with these arguments, or None."""
    del backward, padding
    return triton.refusal(rotation=rotation, **arrays)
