"""Sizes of the tiles of the rotary kernels, and when these kernels are worth their launch.

A row is the D channels of one head of one token. One program owns a tile of rows of a few batch
items: it computes the tile's angles once, in registers, and applies them to every item.
"""

import dataclasses

from jaxtyping import Array, Float

from rope_jax_kernels.arithmetic import power_of_two
from rope_jax_kernels.device import MULTIPROCESSORS

WARPS = 4
WARP = 32
THREADS = WARP * WARPS
VECTOR_BYTES = 16  # widest access of one thread
SECTOR_BYTES = 32  # smallest transfer between memory and cache
# Batch items whose loads are all issued before the first store: enough bytes in flight to cover the
# latency of memory, few enough registers (64 of raw data) for four programs on a multiprocessor.
ITEMS_IN_FLIGHT = 4
LEAST_PAIRS = 2  # of one thread
# Programs that keep every multiprocessor of the largest GPU busy; beyond them a program takes more
# batch items instead.
PROGRAMS = 1024
MOST_STEPS = 8
# Tiles that pass through shared memory: 8 pairs for each thread, or twice as many where rows are
# odd. A thread keeps the cosines and sines of all its pairs in registers.
PAIRS_OF_A_TILE = 8 * THREADS
LONGEST_COPY = 256  # elements along one dimension, of Hopper's copy engine
MOST_ITEMS = 32
# Of one program; four of them cover the latency of a multiprocessor's share of the bandwidth.
BYTES_IN_FLIGHT = 32 * 1024
SHARED_BYTES = 200 * 1024  # shared memory of one program


@dataclasses.dataclass(frozen=True)
class Tile:
    """The work of one program.

    Attributes:
        rows: rows of the tile, a power of two as all sizes in Triton; excess rows are masked.
        pairs: pairs of channels of the tile, the power of two from R on.
        items: batch items in flight.
        steps: groups of `items` that a program processes, one after the other.
    """

    rows: int
    pairs: int
    items: int
    steps: int

    @property
    def batch(self) -> int:
        """Batch items of one program."""
        return self.items * self.steps


def vector_pairs(pairs: int, head_dim: int, itemsize: int, pairing: str) -> int:
    """Most pairs that one thread reads with one instruction, given the alignment of the rows."""
    run = pairs if pairing == "half" else 2 * pairs
    channels = VECTOR_BYTES // itemsize
    while run % channels or head_dim % channels:
        channels //= 2
    return channels if pairing == "half" else max(1, channels // 2)


def plan_tile(
    batch: int,
    rows: int,
    pairs: int,
    head_dim: int,
    itemsize: int,
    pairing: str,
    *,
    most_rows: int = THREADS,
    most_items: int = ITEMS_IN_FLIGHT,
) -> Tile:
    """Plans tiles for [batch, rows] rows of `head_dim` channels, of which `pairs` pairs turn.

    They have at most `most_rows` rows, a power of two or 0, and `most_items` items in flight.
    """
    padded = power_of_two(pairs)
    threads_per_row = max(1, padded // vector_pairs(pairs, head_dim, itemsize, pairing))
    tile_rows = max(1, min(most_rows, THREADS // threads_per_row))
    items = min(most_items, power_of_two(batch))
    row_tiles = -(-rows // tile_rows)
    while items > 1 and row_tiles * -(-batch // items) < PROGRAMS:
        items //= 2
    steps = 1
    while steps < MOST_STEPS and row_tiles * -(-batch // (2 * steps * items)) >= PROGRAMS:
        steps *= 2
    return Tile(tile_rows, padded, items, steps)


def plan_spread_tile(
    batch: int, rows: int, pairs: int, head_dim: int, itemsize: int, pairing: str
) -> Tile:
    """`plan_tile`, with fewer rows where its programs would leave multiprocessors idle.

    The time of such a launch should be that of one thread, which then has less to do, with narrower
    accesses. Decided by counting instructions, not by measurements.
    """
    tile = plan_tile(batch, rows, pairs, head_dim, itemsize, pairing)
    while (
        tile.rows > 1
        and tile.rows * tile.pairs > LEAST_PAIRS * THREADS
        and -(-rows // tile.rows) * -(-batch // tile.batch) < MULTIPROCESSORS
    ):
        tile = dataclasses.replace(tile, rows=tile.rows // 2)
    return tile


@dataclasses.dataclass(frozen=True)
class StreamedTile:
    """The work of one program whose data passes through shared memory, item after item.

    Attributes:
        tokens: of the tile, any number; those past the last are neither read nor written.
        vector: pairs that a thread takes from shared memory with one instruction.
        row_threads: threads side by side along a row.
        batch: batch items of one program.
        slots: batch items in shared memory at a time, at least 2 where there are more.
    """

    tokens: int
    vector: int
    row_threads: int
    batch: int
    slots: int


def plan_streamed_tile(
    batch: int, tokens: int, heads: int, pairs: int, itemsize: int, copies: int
) -> StreamedTile:
    """Plans tiles for [batch, tokens, heads] rows, of which `pairs` pairs turn.

    Args:
        batch: B.
        tokens: L.
        heads: N, summed over arrays with separate angles that are processed together.
        pairs: R.
        itemsize: bytes of a number.
        copies: copies to shared memory that one batch item of a tile takes.
    """
    vector = VECTOR_BYTES // itemsize
    while pairs % vector:
        vector //= 2
    row_threads = 1
    while row_threads < WARP and pairs % (2 * vector * row_threads) == 0:
        row_threads *= 2

    def leaves_threads_idle() -> bool:
        return THREADS // row_threads > power_of_two(tokens) and vector * itemsize > 4

    def overfills_registers() -> bool:
        return THREADS // row_threads * pairs > 2 * PAIRS_OF_A_TILE and vector > 1

    # Few tokens, or many pairs of which few fit side by side: narrower accesses.
    while row_threads < WARP and (leaves_threads_idle() or overfills_registers()):
        vector, row_threads = vector // 2, 2 * row_threads
    sizes = [THREADS // row_threads]
    while 2 * sizes[-1] <= LONGEST_COPY and 2 * sizes[-1] * pairs <= PAIRS_OF_A_TILE:
        sizes.append(2 * sizes[-1])

    def programs(size: int, items: int) -> int:
        return -(-tokens // size) * heads * -(-batch // items)

    # The largest tile that leaves no multiprocessor idle, with no more than an eighth of its work
    # after the last token if others have less.
    enough = [size for size in sizes if programs(size, 1) >= PROGRAMS] or sizes[:1]
    padded = {size: -(-tokens // size) * size for size in enough}
    size = max(size for size in enough if 8 * padded[size] <= 9 * min(padded.values()))
    bytes_of_item = copies * size * 2 * pairs * itemsize
    most = min(MOST_ITEMS, power_of_two(batch)) if 2 * bytes_of_item <= SHARED_BYTES else 1
    items = 1
    while 2 * items <= most and programs(size, 2 * items) >= PROGRAMS:
        items *= 2
    slots = min(items, max(2, BYTES_IN_FLIGHT // bytes_of_item))
    return StreamedTile(size, vector, row_threads, items, slots)


def halves_traffic(pairs: int, x: Float[Array, "*_ D"]) -> bool:
    """True if turning `pairs` pairs of x [..., D] in place moves at most half a copy's bytes.

    Plain jnp under jit is one fused pass that reads and writes every channel; an in-place kernel
    touches only the rotated ones, in sectors. If all channels turn, both move the same bytes, and
    XLA's pass can still be fused with its neighbours. Counted, not measured.
    """
    itemsize = x.dtype.itemsize
    touched = -(-2 * pairs * itemsize // SECTOR_BYTES) * SECTOR_BYTES
    return 2 * touched <= x.shape[-1] * itemsize
