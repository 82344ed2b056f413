"""How the rotary kernels cut their work into programs, and where they are worth their launch. Plain numbers, no jax.

A row is the D channels of one head of one token. One program owns a tile of rows of a few batch items: it computes the tile's angles
once, in registers, and applies them to every item.
"""

import dataclasses

WARPS = 4
WARP = 32
THREADS = WARP * WARPS
VECTOR_BYTES = 16  # the widest access of one thread
SECTOR_BYTES = 32  # the least that a GPU moves between memory and cache
# Batch items whose loads are all issued before the first store: enough bytes in flight to cover the latency of memory, few enough
# registers (64 of raw data) to keep four programs on a multiprocessor.
ITEMS_IN_FLIGHT = 4
# Programs that keep every multiprocessor of the largest GPU busy; beyond them a program takes more batch items instead.
PROGRAMS = 1024
MOST_STEPS = 8
# Of tiles that pass through shared memory. Pairs: 8 for each thread, or twice as many where rows are odd; a thread keeps the cosines
# and sines of all its pairs in registers.
PAIRS_OF_A_TILE = 8 * THREADS
LONGEST_COPY = 256  # elements along one dimension, of Hopper's copy engine
MOST_ITEMS = 32
BYTES_IN_FLIGHT = 32 * 1024  # of one program; four of them cover the latency of a multiprocessor's share of memory bandwidth
SHARED_BYTES = 200 * 1024  # that one program may have


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program does.

    Attributes:
        rows: rows of the tile, a power of two (so are all sizes in Triton; what is too many is masked).
        pairs: pairs of channels of the tile, the power of two from R on.
        items: batch items in flight.
        steps: how many times `items` a program takes, one after the other.
    """

    rows: int
    pairs: int
    items: int
    steps: int

    @property
    def batch(self) -> int:
        """Batch items of one program."""
        return self.items * self.steps


def power_of_two_from(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def vector_pairs(pairs: int, head_dim: int, itemsize: int, pairing: str) -> int:
    """How many pairs one thread reads with one instruction, the widest that the alignment of every row allows."""
    run = pairs if pairing == "half" else 2 * pairs
    channels = VECTOR_BYTES // itemsize
    while run % channels or head_dim % channels:
        channels //= 2
    return channels if pairing == "half" else max(1, channels // 2)


def tile(batch: int, rows: int, pairs: int, head_dim: int, itemsize: int, pairing: str) -> Tile:
    """Cuts [batch, rows] rows of `head_dim` channels, of which `pairs` pairs turn, into tiles."""
    padded = power_of_two_from(pairs)
    threads_per_row = max(1, padded // vector_pairs(pairs, head_dim, itemsize, pairing))
    tile_rows = max(1, THREADS // threads_per_row)
    items = min(ITEMS_IN_FLIGHT, power_of_two_from(batch))
    row_tiles = -(-rows // tile_rows)
    while items > 1 and row_tiles * -(-batch // items) < PROGRAMS:
        items //= 2
    steps = 1
    while steps < MOST_STEPS and row_tiles * -(-batch // (2 * steps * items)) >= PROGRAMS:
        steps *= 2
    return Tile(tile_rows, padded, items, steps)


@dataclasses.dataclass(frozen=True)
class StreamedTile:
    """What one program does whose data passes through shared memory: a tile of one head of a batch item after the other.

    Attributes:
        tokens: of the tile; any number (what is too many is neither read nor written).
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


def streamed_tile(sets: int, batch: int, tokens: int, heads: int, pairs: int, itemsize: int, copies: int) -> StreamedTile:
    """Cuts `sets` times [batch, tokens, heads] rows, of which `pairs` pairs turn, into tiles; an item of a tile takes `copies` copies."""
    vector = VECTOR_BYTES // itemsize
    while pairs % vector:
        vector //= 2
    row_threads = 1
    while row_threads < WARP and pairs % (2 * vector * row_threads) == 0:
        row_threads *= 2
    # Few tokens, or many pairs of which few fit side by side: narrower accesses, so that all threads have something to do, and none
    # has more than its registers hold.
    idle = lambda: THREADS // row_threads > power_of_two_from(tokens) and vector * itemsize > 4
    full = lambda: THREADS // row_threads * pairs > 2 * PAIRS_OF_A_TILE and vector > 1
    while row_threads < WARP and (idle() or full()):
        vector, row_threads = vector // 2, 2 * row_threads
    sizes = [THREADS // row_threads]
    while 2 * sizes[-1] <= LONGEST_COPY and 2 * sizes[-1] * pairs <= PAIRS_OF_A_TILE:
        sizes.append(2 * sizes[-1])
    programs = lambda size, taken: -(-tokens // size) * heads * sets * -(-batch // taken)
    # The largest tile that leaves no multiprocessor idle, and no more than an eighth of its work behind the last token if others do.
    enough = [size for size in sizes if programs(size, 1) >= PROGRAMS] or sizes[:1]
    padded = {size: -(-tokens // size) * size for size in enough}
    size = max(size for size in enough if 8 * padded[size] <= 9 * min(padded.values()))
    bytes_of_item = copies * size * 2 * pairs * itemsize
    taken = 1
    while taken < MOST_ITEMS and taken < batch and programs(size, 2 * taken) >= PROGRAMS and 2 * bytes_of_item <= SHARED_BYTES:
        taken *= 2
    slots = min(taken, max(2, BYTES_IN_FLIGHT // bytes_of_item))
    return StreamedTile(size, vector, row_threads, taken, slots)


def halves_traffic(pairs: int, head_dim: int, itemsize: int) -> bool:
    """Whether turning pairs in place moves at most half the bytes of writing new arrays, counted in sectors.

    This is what `implementation=None` goes by on a GPU, for q and k that lie apart: plain jnp under jit is one fused pass that reads
    and writes every channel, a kernel in place touches the rotated ones only. Where all channels turn, both move the same bytes, and
    XLA's pass can still merge with its neighbours, which a kernel's cannot. Reasoned, not measured.
    """
    touched = -(-2 * pairs * itemsize // SECTOR_BYTES) * SECTOR_BYTES
    return 2 * touched <= head_dim * itemsize
