"""The kernel of `mosaic`, for Hopper.

The copy engine (TMA) moves tiles of [tokens, 2R] channels of one head into shared memory and back,
asynchronously. A program computes cosine and sine of its tile once, keeps them in registers, and
streams the batch through a ring of slots. The engine does the addressing, so no 32-bit offset can
overflow; elements outside the array are read as zeros and not written.

Angles are an outer product over the tile, coords by row and freqs by column, without a gather.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.arithmetic import cos_sin, divide
from rope_jax_kernels.mosaic import repeat, select_shared, store
from rope_jax_kernels.rotary import tile_sizes
from rope_jax_kernels.rotary.kernel import Rows


def layouts(tile: tile_sizes.StreamedTile) -> tuple[Any, Any, Any]:
    """Layouts in registers of [tokens, R], of [tokens] and of [R].

    Each thread holds `tile.vector` neighbouring pairs; threads run along a row first.
    """
    wide, high = tile.row_threads * tile.vector, tile_sizes.WARP // tile.row_threads
    tile_layout = mgpu.TiledLayout(
        plgpu.Tiling(((tile_sizes.WARPS * high, wide), (high, wide), (tile.vector,))),
        (-5,),
        (-3, -2),
        -1,
        _check_canonical=False,
    ).canonicalize()
    row_layout, column_layout = tile_layout.reduce([1]), tile_layout.reduce([0])
    return tuple(
        plgpu.Layout.TILED(x.tiling, x.warp_dims, x.lane_dims, x.vector_dim)
        for x in (tile_layout, row_layout, column_layout)
    )


def outer_angles(
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


def rotary_kernel(
    *refs: Any,
    rows: Rows,
    tile: tile_sizes.StreamedTile,
    counts: tuple[int, int, int],
    in_place: bool,
) -> None:
    """One program: a tile of tokens of one head, of `tile.batch` batch items of one set.

    Args:
        *refs: arrays [S, B, L, N, D] to turn (or [S, B, N, L, D]); coords [S * L * A] or
            [L * A] and freqs [S or 1, N or 1, A, R], or theta [S or 1, N or 1, L, R]; saved inputs
            of the forward pass, if any.
            Then the outputs: the turned arrays unless `in_place`, and with saved inputs the
            gradient of theta summed over this program's batch items, [S, G, L, N, R] (or
            [S, G, N, L, R]). Then shared memory: slots of data and of saved data, of the angles,
            of the sums, and barriers of both kinds of slots.
        rows: meaning of the rows.
        tile: size of the tile.
        counts: how many arrays turn, refs describe the angles, and inputs are saved.
        in_place: whether the turned arrays take the place of the arrays.
    """
    take = iter(refs).__next__
    sources, angles, saved = ([take() for _ in range(n)] for n in counts)
    pairs = angles[-1].shape[-1]
    targets = sources if in_place else [take() for _ in sources]
    sums = [take()] if saved else []
    slots, angle_slot, *sum_slot, ready, angles_ready = (
        take(),
        take(),
        *([take()] if saved else []),
        take(),
        take(),
    )
    tile_layout = layouts(tile)[0]

    # Programs that run together touch neighbouring memory: the inner dimension runs fastest.
    program = jax.lax.axis_index("program")
    tiles = pl.cdiv(rows.tokens, tile.tokens)
    inner = tiles if rows.order == "NL" else rows.heads
    outside, inside = divide(program, inner)
    items, outside = divide(outside, tiles * rows.heads // inner)
    piece, head = (inside, outside) if rows.order == "NL" else (outside, inside)
    chunks = pl.cdiv(sources[0].shape[1], tile.batch)
    set_index, chunk = divide(items, chunks)
    token = piece * tile.tokens

    def window(ref: Any, item: Array, head: Array, first: int, width: int) -> Any:
        """The tile's tokens in an array of batch items, or of sums; channels from the first."""
        tokens = pl.ds(token, tile.tokens)
        place = (head, tokens) if rows.order == "NL" else (tokens, head)
        return ref.at[set_index, item, *place, pl.ds(first, width)]

    heads = [head, rows.heads + head] if rows.order == "L3N" else [head]
    spans, width = slots[0][0].shape[2], slots[0][0].shape[4]
    places = list(itertools.product(range(len(sources)), range(len(heads)), range(spans)))
    batch = np.int32(min(tile.batch, sources[0].shape[1]))

    def start(i: Array | int) -> None:
        """Starts the copies of the i-th batch item and of its saved inputs."""
        _, slot = divide(i, tile.slots)
        for refs, buffers in zip((sources, saved), slots, strict=True):
            for a, h, span in places if refs else []:
                item = window(refs[a], chunk * tile.batch + i, heads[h], span * width, width)
                plgpu.copy_gmem_to_smem(item, buffers[a].at[slot, h, span], ready.at[slot])

    for i in range(min(tile.slots, batch)):
        start(jnp.int32(i))
    place = (set_index, head, token)
    theta = tile_angles(rows, tile, angles, angle_slot, angles_ready, place)
    # By the rounding that Mosaic GPU has.
    to_even = jax.lax.RoundingMethod.TO_NEAREST_EVEN
    cos, sin = cos_sin(theta, nearest=lambda x: jax.lax.round(x, to_even))
    sin = rows.direction * sin

    def members(ref: Any, slot: Array, h: int) -> list[Any]:
        """Slots of the first and the second members of the pairs of a tile."""
        return [
            ref.at[slot, h, first // width, :, pl.ds(first % width, pairs)] for first in (0, pairs)
        ]

    def load(refs: list[Any]) -> list[Float[Array, "tokens R"]]:
        return [
            plgpu.load(ref, layout=tile_layout, optimized=False).astype(jnp.float32) for ref in refs
        ]

    def step(i: Array, dtheta: Array | None) -> Array | None:
        _, slot = divide(i, tile.slots)
        plgpu.barrier_wait(ready.at[slot])
        for a, h in itertools.product(range(len(sources)), range(len(heads))):
            halves = members(slots[0][a], slot, h)
            x, y = load(halves)
            x, y = x * cos - y * sin, y * cos + x * sin
            if saved:
                u, v = load(members(slots[1][a], slot, h))
                dtheta = dtheta + (u * y - v * x)
            for half, turned in zip(halves, (x, y), strict=True):
                store(half, turned.astype(half.dtype), interpret=rows.interpret)
        plgpu.commit_smem()
        for a, h, span in places:
            item = window(targets[a], chunk * tile.batch + i, heads[h], span * width, width)
            plgpu.copy_smem_to_gmem(
                slots[0][a].at[slot, h, span], item, commit_group=(a, h, span) == places[-1]
            )
        if batch > tile.slots:
            # The slot before this one is free once the engine has read it; that copy was started
            # one step ago.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = i - 1 + tile.slots
            pl.when((i > 0) & (following < batch))(lambda: start(following))
        return dtheta

    dtheta = (
        plgpu.layout_cast(jnp.zeros((tile.tokens, pairs), jnp.float32), tile_layout)
        if saved
        else None
    )
    dtheta = step(jnp.int32(0), dtheta) if batch == 1 else repeat(batch, step, dtheta)
    if saved:
        # The pass turned gradients back: its angle has the opposite sign of the differentiated one.
        store(sum_slot[0], -rows.direction * dtheta, interpret=rows.interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sum_slot[0], window(sums[0], chunk, head, 0, pairs))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def tile_angles(
    rows: Rows,
    tile: tile_sizes.StreamedTile,
    refs: Sequence,
    slot: Any,
    ready: Any,
    place: tuple[Array, Array, Array],
) -> Array:
    """Theta of a tile in float32, from refs of (coords, freqs) or of (theta,).

    Args:
        rows, tile: of the kernel.
        refs: of the angles.
        slot, ready: shared memory for what is copied there, and its barrier.
        place: set, head and first token of the tile.
    """
    (set_index, head, token), last = place, refs[-1]
    place = select_shared(set_index, last.shape[0]), select_shared(head, last.shape[1])
    if len(refs) == 1:
        plgpu.copy_gmem_to_smem(last.at[*place, pl.ds(token, tile.tokens)], slot, ready)
        plgpu.barrier_wait(ready)
        return plgpu.load(slot, layout=layouts(tile)[0], optimized=False).astype(jnp.float32)
    coords, freqs = refs
    axes = freqs.shape[2]
    token += rows.tokens * select_shared(set_index, coords.size // (rows.tokens * axes))
    if rows.interpret:
        plgpu.copy_gmem_to_smem(coords.at[pl.ds(token, tile.tokens)], slot, ready)
    else:
        # As one long row, because the engine rejects rows that are not a multiple of 16 bytes. Data
        # read after the last token (zeros or the next set) only affect discarded results.
        for first, count in pieces(tile.tokens * axes):
            plgpu.copy_gmem_to_smem(
                coords.at[pl.ds(token * axes + first, count)], slot.at[pl.ds(first, count)], ready
            )
        slot = slot.at[pl.ds(0, tile.tokens * axes)].reshape(tile.tokens, axes)
    plgpu.barrier_wait(ready)
    return outer_angles(slot, freqs, place, (tile.tokens, freqs.shape[3]), layouts(tile))


def pieces(count: int) -> list[tuple[int, int]]:
    """Starts and lengths of the copies of `count` float32 numbers, in whole 128 bytes.

    Mosaic GPU requires that size.
    """
    count = pl.cdiv(count, 32) * 32
    return [
        (first, min(tile_sizes.LONGEST_COPY, count - first))
        for first in range(0, count, tile_sizes.LONGEST_COPY)
    ]


def launch(
    rows: Rows, in_place: bool, count: int, arrays: tuple, angles: tuple, sets: int
) -> tuple[Array, ...]:
    """Turns arrays; for `in_sets`.

    Args:
        rows: meaning of the rows.
        in_place: whether the turned arrays take the place of the arrays.
        count: of the arrays that turn; the others are the saved inputs of the forward pass.
        arrays: [B, rows, D].
        angles: coords [S or 1, L, A] and freqs [S or 1, N or 1, A, R], or theta
            [S or 1, N or 1, L, R].
        sets: S.

    Returns:
        The turned arrays and, with saved inputs, the partial sums [S, G, L * N, R].
    """
    arrays, saved = arrays[:count], arrays[count:]
    shape, pairs = arrays[0].shape, angles[-1].shape[-1]
    items, heads, head_dim = shape[0] // sets, shape[1] // rows.tokens, shape[2]
    is_head_first = rows.order == "NL"
    order = (heads, rows.tokens) if is_head_first else (rows.tokens, heads)

    def split(x: Array) -> Float[Array, "S B _ _ D"]:
        return x.reshape(sets, items, *order, head_dim)

    turning = 2 if rows.order == "L3N" else 1  # heads of one array that turn by the same angles
    copies = turning * len(arrays + saved)
    itemsize = max(x.dtype.itemsize for x in arrays)
    tile = tile_sizes.plan_streamed_tile(
        items, rows.tokens, sets * rows.heads, pairs, itemsize, copies
    )
    chunks, tiles = pl.cdiv(items, tile.batch), pl.cdiv(rows.tokens, tile.tokens)

    # Mosaic GPU writes a tile that is contiguous in memory as one run of bytes, past the last token
    # into what follows. So such tiles go half by half, and the sums have room for whole tiles.
    spans = 2 if head_dim == 2 * pairs and (is_head_first or heads == 1) else 1
    slot = (tile.slots, turning, spans, tile.tokens, 2 * pairs // spans)
    slots = tuple(tuple(plgpu.SMEM(slot, x.dtype) for x in some) for some in (arrays, saved))
    if len(angles) == 1:
        angle_slot, angle_copies = plgpu.SMEM((tile.tokens, pairs), angles[0].dtype), 1
    else:
        coords, freqs = (x.astype(jnp.float32) for x in angles)
        axes = coords.shape[-1]
        angles = (coords.reshape((-1, axes) if rows.interpret else -1), freqs)
        coord_pieces = pieces(tile.tokens * axes)
        angle_slot = plgpu.SMEM(
            (tile.tokens, axes) if rows.interpret else (sum(coord_pieces[-1]),), jnp.float32
        )
        angle_copies = 1 if rows.interpret else len(coord_pieces)
    scratch = [
        slots,
        angle_slot,
        *([plgpu.SMEM((tile.tokens, pairs), jnp.float32)] if saved else []),
    ]
    scratch += [
        plgpu.Barrier(num_arrivals=copies * spans, num_barriers=tile.slots),
        plgpu.Barrier(num_arrivals=angle_copies),
    ]

    inputs = [split(x) for x in arrays]
    out = [] if in_place else [(x.shape, x.dtype) for x in inputs]
    if saved:
        room = tiles * tile.tokens
        padded = (rows.heads, room) if is_head_first else (room, rows.heads)
        out.append(((sets, chunks, *padded, pairs), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(
            rotary_kernel,
            rows=rows,
            tile=tile,
            counts=(len(arrays), len(angles), len(saved)),
            in_place=in_place,
        ),
        out_type=list(device.shapes_like(arrays[0], *out)),
        scratch_types=scratch,
        grid=(tiles * rows.heads * chunks * sets,),
        grid_names=("program",),
        # Mosaic GPU's other semantics cannot load what is not contiguous in shared memory. Its
        # automatic barriers are not needed: a thread writes the elements that it read, and those
        # that the engine reads are committed first.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if rows.interpret else None,
        kernel_name="rotary",
    )
    # A kernel that writes to a reference gets the buffer of the array itself, unless something else
    # needs the array.
    inputs = [jax.new_ref(x) for x in inputs] if in_place else inputs
    out = kernel(*inputs, *angles, *(split(x) for x in saved))
    turned = [jax.freeze(x) for x in inputs] if in_place else out[: len(arrays)]
    turned = tuple(x.reshape(shape) for x in turned)
    if not saved:
        return turned
    partial = out[-1][:, :, :, : rows.tokens] if is_head_first else out[-1][:, :, : rows.tokens]
    return *turned, partial.reshape(sets, chunks, rows.tokens * rows.heads, pairs)
