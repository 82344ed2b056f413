"""Kernels that split a packed projection into rotated q, k and v, and pack them again.

For attention that needs separate operands, such as cuDNN's. The kernel reads and writes every
channel once, in either direction. XLA packs the gradient unless coords or freqs are differentiated;
then the kernel does, because XLA would read its operands several times. Rows, angles and their
gradient are those of `kernel`. Nothing is in place, so the inputs that the gradient of learnable
frequencies needs are saved without a copy. Tokens of zeros that an attention needs after
the last one are written in the same pass, and not read on the way back.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import power_of_two
from rope_jax_kernels.rotary import reference, tile_sizes, triton
from rope_jax_kernels.rotary.kernel import Kernel, Rows
from rope_jax_kernels.rotary.triton import Turns
from rope_jax_kernels.rotation import Rotation

BYTES_IN_FLIGHT = 256  # of one thread between its loads and its stores: 64 registers


def plan_tile(
    batch: int, rows: int, pairs: int, head_dim: int, itemsize: int, pairing: str
) -> tile_sizes.Tile:
    """Plans the tile of `tile_sizes` with one batch item in flight.

    Whole rows of three arrays are in flight here, and not only the turning part of two.
    """
    most = tile_sizes.THREADS * BYTES_IN_FLIGHT // (power_of_two(head_dim) * itemsize)
    sizes = batch, rows, pairs, head_dim, itemsize, pairing
    return tile_sizes.plan_tile(*sizes, most_rows=most, most_items=1)


def moving_kernel(
    operands: tuple, targets: tuple, sums: tuple, *, rows: Rows, tile: tile_sizes.Tile
) -> None:
    """One program: a tile of rows of `tile.batch` batch items, of q, k and v.

    Args:
        operands: refs of the arrays, one packed or three apart; of (coords, freqs); and of the
            inputs of the forward pass, packed or apart as its arrays were, or ().
        targets: of three arrays or one.
        sums: with saved inputs, of the gradient of theta summed over this program's batch items.
        rows: meaning of the rows; they turn q and k.
        tile: size of the tile.
    """
    sources, angles, saved = operands
    (batch, _, head_dim), pairs = sources[0].shape, angles[-1].shape[-1]
    first = pl.program_id(1) * tile.batch
    turns = Turns(rows, tile, angles)
    index, in_tile = turns.index, turns.in_tile
    written = in_tile
    if rows.padding and len(sources) == 1:
        written = (index < (rows.tokens + rows.padding) * rows.heads)[:, None]
    q, k = rows.rows(index)
    packed_rows = (q, k, k + rows.heads)

    def up_to(end: int, start: int = 0, width: int | None = None) -> list[tuple[Array, ...]]:
        """Channels from start to end, if any, with a mask for reading and one for writing.

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

    row_bytes = power_of_two(head_dim) * sources[0].dtype.itemsize * tile.rows // tile_sizes.THREADS
    together = 3 if 3 * row_bytes <= BYTES_IN_FLIGHT else 1

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        item = first + i
        for some in itertools.batched(range(3), together):
            # These loads precede the first store: the compiler cannot rule out that a store changes
            # what is read after it.
            loaded = [
                (
                    load(sources, part, item, parts[part]),
                    load(saved, part, item, turning if saved and part < 2 else []),
                )
                for part in some
            ]
            for part, (chunks, before) in zip(some, loaded, strict=True):
                if part < 2:
                    n = len(turning)
                    chunks[:n], dtheta = turns.turn(chunks[:n], before, dtheta)
                for x, (c, _, mask) in zip(chunks, parts[part], strict=True):
                    plt.store(at(targets, part, item, c), x, mask=mask & (item < batch))
        return dtheta

    turns.over_items(step, sums)


def launch(
    rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = False
) -> tuple[tuple, Array | None]:
    """Splits (qkv [B, L * 3 * N, D],) into q, k, v [B, M * N, D], or packs these; q and k turn.

    M is L plus the padding. `in_place` has no effect.

    Returns:
        The arrays, and with `saved` the partial sums of the gradient of theta, [G, L * N, R]
        float32 (otherwise None).
    """
    (batch, _, head_dim), dtype, pairs = arrays[0].shape, arrays[0].dtype, angles[1].shape[2]
    unpacks = len(arrays) == 1
    written = (rows.tokens + (rows.padding if unpacks else 0)) * rows.heads
    tile = plan_tile(batch, written, pairs, head_dim, dtype.itemsize, rows.pairing)
    kernel = functools.partial(moving_kernel, rows=rows, tile=tile)
    name, outputs = "rotary_pack", [((batch, 3 * written, head_dim), dtype)]
    if unpacks:
        name, outputs = "rotary_unpack", [((batch, written, head_dim), dtype)] * 3
    return triton.run(kernel, name, written, (arrays, angles, saved), outputs)


def back_by_xla(rows: Rows, gradients: tuple, angles: tuple) -> tuple:
    """`Kernel.back`, as the transpose of the plain operation.

    This is a sum of padded parts rather than a concatenation, so that XLA computes the gradient of
    the projection's bias in the same pass, which it does not do after a concatenation.
    """
    batch, _, head_dim = gradients[0].shape
    rotation = Rotation(*angles, rows.pairing)
    parts = tuple(g.reshape(batch, -1, rows.heads, head_dim) for g in gradients)
    # A linear map has one derivative everywhere, so this point is never computed.
    # (`jax.linear_transpose` fails in `shard_map`.)
    anywhere = jnp.stack([x[:, : rows.tokens] for x in parts], axis=2)
    unpack = functools.partial(reference.unpack_and_rotate, padding=rows.padding)
    (packed,) = jax.vjp(lambda qkv: unpack(qkv, rotation), anywhere)[1](parts)
    return (packed.reshape(batch, -1, head_dim),)


KERNEL = Kernel(launch, back_by_xla)


def unpack_and_rotate(
    qkv: Float[Array, "B L 3 N D"], rotation: Rotation, padding: int = 0
) -> tuple[Float[Array, "B M N D"], Float[Array, "B M N D"], Float[Array, "B M N D"]]:
    """`rope_jax_kernels.rotary.unpack_and_rotate`."""
    batch, tokens, _, heads, head_dim = qkv.shape
    rows = Rows(tokens, heads, "L3N", rotation.pairing, padding=padding)
    parts = KERNEL.turn_all(rows, (qkv,), (rotation.coords, rotation.freqs))
    return tuple(x.reshape(batch, tokens + padding, heads, head_dim) for x in parts)


def refusal(
    arrays: dict[str, Any],
    *,
    rotation: Rotation,
    padding: int = 0,
) -> str | None:
    """The reason why the kernel cannot serve a call with these arguments, or None."""
    return triton.refusal(arrays, rotation=rotation)
