"""How the rotary kernels cut their work into programs, and where they are worth their launch. Plain numbers, no jax.

A row is the D channels of one head of one token. One program owns a tile of rows of a few batch items: it computes the tile's angles
once, in registers, and applies them to every item.
"""

import dataclasses

WARPS = 4
THREADS = 32 * WARPS
VECTOR_BYTES = 16  # the widest access of one thread
SECTOR_BYTES = 32  # the least that a GPU moves between memory and cache
# Batch items whose loads are all issued before the first store: enough bytes in flight to cover the latency of memory, few enough
# registers (64 of raw data) to keep four programs on a multiprocessor.
ITEMS_IN_FLIGHT = 4
# Programs that keep every multiprocessor of the largest GPU busy; beyond them a program takes more batch items instead.
PROGRAMS = 1024
MOST_STEPS = 8


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


def halves_traffic(pairs: int, head_dim: int, itemsize: int) -> bool:
    """Whether turning pairs in place moves at most half the bytes of writing new arrays, counted in sectors.

    This is what `implementation=None` goes by on a GPU, for q and k that lie apart: plain jnp under jit is one fused pass that reads
    and writes every channel, a kernel in place touches the rotated ones only. Where all channels turn, both move the same bytes, and
    XLA's pass can still merge with its neighbours, which a kernel's cannot. Reasoned, not measured.
    """
    touched = -(-2 * pairs * itemsize // SECTOR_BYTES) * SECTOR_BYTES
    return 2 * touched <= head_dim * itemsize
