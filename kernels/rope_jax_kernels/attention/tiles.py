"""How the kernels cut each pattern into tiles of queries and blocks of keys: index arithmetic, and no arrays.

A program of a kernel owns a tile, a power of two of slots that hold one token or none, and walks over the blocks that its tile meets.
What a slot holds follows from its number, so rolled windows, residue classes and halos are read where they lie in the map: nothing is
partitioned, rolled, padded or gathered in memory. Each pattern is one class with the same few methods; the kernels know nothing else.

Backward passes also need the other view, tiles of keys and blocks of queries. It is `transposed()`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pair, Pattern, Window


class Slots(NamedTuple):
    """What the slots of a tile or block hold.

    Attributes:
        exists: whether there is a token.
        token: its row among the tokens of the map; a row past the last one where there is none.
        coord: its row in `rotation.coords`, if it exists.
        place: what `sees` and `entry` compare, meaningful to the pattern alone.
    """

    exists: Bool[Array, " slots"]
    token: Int[Array, " slots"]
    coord: Int[Array, " slots"]
    place: tuple[Int[Array, " slots"], ...]


def slots_of(exists: Array, token: Array, tokens: int, coord: Array, *place: Array) -> Slots:
    """`Slots`, where what does not exist is the row after the last of `tokens`, and nothing that is read or written."""
    return Slots(exists, jnp.where(exists, token, tokens), coord, place)


def split(index: Array, count: int) -> tuple[Array, Array]:
    """Quotient and remainder. Not // and %, whose care for negative numbers costs instructions."""
    return lax.div(index, np.int32(count)), lax.rem(index, np.int32(count))


def power_of_two(n: int, at_least: int = 16) -> int:
    """The smallest power of two that is no smaller than n; 16 is the least that tensor cores take."""
    return max(at_least, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class GlobalTiles:
    """Tiles of consecutive tokens, blocks of consecutive tokens. entry: of a matrix [L, L], row by row."""

    length: int
    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        """Tiles of a map."""
        return -(-self.length // self.rows)

    @property
    def blocks(self) -> int:
        """Blocks that a tile meets."""
        return -(-self.length // self.columns)

    @property
    def entries(self) -> int:
        """Numbers of a head's bias."""
        return self.length**2

    @property
    def repeats(self) -> int:
        """How many tiles of a map share the same part of the bias."""
        return 1

    def tile(self, index: Array) -> Slots:
        """The slots of a tile."""
        return self._run(index * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Array, step: Array) -> Slots:
        """The slots of the step-th block of a tile."""
        return self._run(step * self.columns + jnp.arange(self.columns, dtype=jnp.int32))

    def _run(self, token: Array) -> Slots:
        return Slots(token < self.length, token, token, (token,))

    def sees(self, q: Slots, k: Slots) -> Array | None:
        """Whether queries attend to keys, both of which exist, [queries, keys]; None where all do."""
        return None

    def entry(self, q: Slots, k: Slots) -> Array:
        """The place of each pair in a head's bias, [queries, keys]; anything in bounds where they do not see each other."""
        return q.token[:, None] * self.length + k.token[None, :]

    def transposed(self) -> "GlobalTiles":
        """Tiles of keys with blocks of queries."""
        return self

    def fold(self, by_slot: Array) -> Array:
        """Adds up the gradient of a bias, [N, tiles * rows, blocks * columns] by slot, to that of its entries, [N, entries]."""
        return by_slot[:, : self.length, : self.length].reshape(-1, self.entries)


@dataclasses.dataclass(frozen=True)
class WindowTiles:
    """Tiles of a window's tokens (all of them, or a part of a large one), blocks of the same window's. entry: Swin's table of offsets.

    Attributes:
        grid: (H, W) of the map.
        window: fitted to the map.
        rows, columns: slots of a tile and of a block.
    """

    grid: Pair
    window: Window
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Tokens of a window."""
        return self.window.size[0] * self.window.size[1]

    @property
    def parts(self) -> int:
        """Tiles of a window."""
        return -(-self.tokens // self.rows)

    @property
    def repeats(self) -> int:
        """See `GlobalTiles`; all windows share one bias."""
        return int(np.prod([-(-n // size) for n, size in zip(self.grid, self.window.size, strict=True)]))

    @property
    def tiles(self) -> int:
        """See `GlobalTiles`."""
        return self.repeats * self.parts

    @property
    def blocks(self) -> int:
        """See `GlobalTiles`."""
        return -(-self.tokens // self.columns)

    @property
    def entries(self) -> int:
        """See `GlobalTiles`."""
        h, w = self.window.size
        return (2 * h - 1) * (2 * w - 1)

    def tile(self, index: Array) -> Slots:
        """See `GlobalTiles`."""
        window, part = split(index, self.parts)
        return self._run(window, part * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Array, step: Array) -> Slots:
        """See `GlobalTiles`."""
        return self._run(split(index, self.parts)[0], step * self.columns + jnp.arange(self.columns, dtype=jnp.int32))

    def _run(self, window: Array, inside: Array) -> Slots:
        (height, width), (h, w) = self.grid, self.window.size
        window_row, window_column = split(window, -(-width // w))
        row, column = split(inside, w)
        exists, where, region = inside < self.tokens, [], jnp.zeros_like(inside)
        for first, local, length, size, shift in (
            (window_row * h, row, height, h, self.window.shift[0]),
            (window_column * w, column, width, w, self.window.shift[1]),
        ):
            padded = -(-length // size) * size
            rolled = first + local
            place = rolled + shift
            carried = place >= padded  # round the end of the map, by the roll
            place = jnp.where(carried, place - padded, place)
            exists &= place < length
            where.append(place)
            region = 2 * region + carried.astype(jnp.int32)
        return slots_of(exists, where[0] * width + where[1], height * width, inside, row, column, region)

    def sees(self, q: Slots, k: Slots) -> Array | None:
        """See `GlobalTiles`; what the roll brought together from opposite sides does not."""
        return None if self.window.shift == (0, 0) else q.place[2][:, None] == k.place[2][None, :]

    def entry(self, q: Slots, k: Slots) -> Array:
        """See `GlobalTiles`."""
        h, w = self.window.size
        down, across = (a[:, None] - b[None, :] for a, b in zip(q.place[:2], k.place[:2], strict=True))
        index = (down + h - 1) * (2 * w - 1) + across + w - 1
        return jnp.clip(index, 0, self.entries - 1)  # slots past the window's end lie outside of the table

    def transposed(self) -> "WindowTiles":
        """See `GlobalTiles`."""
        return self

    def fold(self, by_slot: Array) -> Array:
        """See `GlobalTiles`; one axis at a time, as products with a matrix of zeros and ones."""
        h, w = self.window.size
        by_slot = by_slot[:, : self.tokens, : self.tokens].reshape(-1, h, w, h, w)
        ones = [(np.arange(n)[:, None] - np.arange(n) + n - 1)[None] == np.arange(2 * n - 1)[:, None, None] for n in (h, w)]
        down, across = (jnp.asarray(one, by_slot.dtype) for one in ones)
        return jnp.einsum("nabcd,yac,xbd->nyx", by_slot, down, across, precision="highest").reshape(-1, self.entries)


@dataclasses.dataclass(frozen=True)
class AxisTiles:
    """One axis of a map cut for a neighbourhood. Tokens that a dilation keeps apart form classes; members count those of one class.

    A tile near the end of a class is moved back so that it does not reach past it: each tile meets a halo of the same extent, and a
    token belongs to the first tile that holds it.

    Attributes:
        length: tokens.
        kernel, dilation: of the neighbourhood.
        tile: queries of a tile (keys of one, if transposed).
        transpose: whether the halo holds the queries that see a tile's keys, and not the keys that a tile's queries see.
    """

    length: int
    kernel: int
    dilation: int
    tile: int
    transpose: bool = False

    @property
    def classes(self) -> int:
        """Residue classes."""
        return min(self.dilation, self.length)

    @property
    def tiles(self) -> int:
        """Tiles of the largest class."""
        return -(-self.members(0) // self.tile)

    @property
    def halo(self) -> int:
        """Members in the halo of a tile."""
        if not self.transpose:
            # What the first token sees, from kernel // 2 before it on, is more where the kernel is even and the tile half of it.
            return max(self.tile + self.kernel - 1, self.kernel + self.kernel // 2)
        ends = []
        for residue in range(self.classes):
            members = self.members(residue)
            for tile in range(self.tiles):
                first = min(tile * self.tile, max(members - self.tile, 0))
                last = min(first + self.tile, members) - 1
                low = 0 if first < self.kernel else first - (self.kernel - 1 - self.kernel // 2)
                high = members - 1 if last >= members - self.kernel else last + self.kernel // 2
                ends.append(high - low + 1)
        return max(ends)

    def members(self, residue: int | Array) -> int | Array:
        """Tokens of a residue class."""
        until = self.length - residue + self.dilation - 1
        return until // self.dilation if isinstance(residue, int) else split(until, self.dilation)[0]

    def first(self, residue: Array, tile: Array) -> Array:
        """The first member that a tile holds."""
        return jnp.minimum(tile * self.tile, jnp.maximum(self.members(residue) - self.tile, 0))

    def of_tile(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of places in a tile."""
        member = self.first(residue, tile) + inside
        return member, (member >= tile * self.tile) & (member < self.members(residue)) & (inside < self.tile)

    def of_halo(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of places in a tile's halo."""
        first = self.first(residue, tile)
        if self.transpose:
            origin = jnp.where(first < self.kernel, 0, first - (self.kernel - 1 - self.kernel // 2))
        else:
            origin = first - self.kernel // 2
        member = origin + inside
        return member, (member >= 0) & (member < self.members(residue)) & (inside < self.halo)

    def window(self, residue: Array, member: Array) -> Array:
        """The first member that a member sees."""
        return jnp.clip(member - self.kernel // 2, 0, jnp.maximum(self.members(residue) - self.kernel, 0))


@dataclasses.dataclass(frozen=True)
class NeighborhoodTiles:
    """Tiles of neighbouring queries of one residue class, blocks of their halo of keys. entry: NATTEN's table of offsets.

    Attributes:
        down, across: the axes.
        columns: slots of a block.
    """

    down: AxisTiles
    across: AxisTiles
    columns: int

    @property
    def rows(self) -> int:
        """Slots of a tile."""
        return power_of_two(self.down.tile * self.across.tile)

    @property
    def repeats(self) -> int:
        """See `GlobalTiles`; all tiles share one bias."""
        return self.down.classes * self.across.classes * self.down.tiles * self.across.tiles

    @property
    def tiles(self) -> int:
        """See `GlobalTiles`."""
        return self.repeats

    @property
    def blocks(self) -> int:
        """See `GlobalTiles`."""
        return -(-self.down.halo * self.across.halo // self.columns)

    @property
    def entries(self) -> int:
        """See `GlobalTiles`."""
        return (2 * self.down.kernel - 1) * (2 * self.across.kernel - 1)

    def tile(self, index: Array) -> Slots:
        """See `GlobalTiles`."""
        inside = jnp.arange(self.rows, dtype=jnp.int32)
        return self._run(index, *split(inside, self.across.tile), AxisTiles.of_tile)

    def block(self, index: Array, step: Array) -> Slots:
        """See `GlobalTiles`."""
        inside = step * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self._run(index, *split(inside, self.across.halo), AxisTiles.of_halo)

    def _run(self, index: Array, row: Array, column: Array, of: object) -> Slots:
        down, across = self.down, self.across
        index, x = split(index, across.tiles)
        index, y = split(index, down.tiles)
        residue_y, residue_x = split(index, across.classes)
        (row, row_exists), (column, column_exists) = of(down, residue_y, y, row), of(across, residue_x, x, column)
        token = (residue_y + down.dilation * row) * across.length + residue_x + across.dilation * column
        windows = down.window(residue_y, row), across.window(residue_x, column)
        return slots_of(row_exists & column_exists, token, down.length * across.length, token, row, column, *windows)

    def sees(self, q: Slots, k: Slots) -> Array | None:
        """See `GlobalTiles`."""
        inside = lambda first, key, kernel: (first[:, None] <= key[None, :]) & (key[None, :] < first[:, None] + kernel)
        return inside(q.place[2], k.place[0], self.down.kernel) & inside(q.place[3], k.place[1], self.across.kernel)

    def entry(self, q: Slots, k: Slots) -> Array:
        """See `GlobalTiles`."""
        kh, kw = self.down.kernel, self.across.kernel
        down, across = (b[None, :] - a[:, None] for a, b in zip(q.place[:2], k.place[:2], strict=True))
        return jnp.clip((down + kh - 1) * (2 * kw - 1) + across + kw - 1, 0, self.entries - 1)

    def transposed(self) -> "NeighborhoodTiles":
        """See `GlobalTiles`."""
        return NeighborhoodTiles(*(dataclasses.replace(axis, transpose=True) for axis in (self.down, self.across)), self.columns)

    def fold(self, by_slot: Array) -> Array:
        """See `GlobalTiles`; a pair's offset follows from its slots, because halos lie at one distance from their tiles."""
        axes, ones = (self.down, self.across), []
        by_slot = by_slot[:, : self.down.tile * self.across.tile, : self.down.halo * self.across.halo]
        by_slot = by_slot.reshape(-1, self.down.tile, self.across.tile, self.down.halo, self.across.halo)
        for axis in axes:
            offset = np.arange(axis.halo) - axis.kernel // 2 - np.arange(axis.tile)[:, None] + axis.kernel - 1
            ones.append(jnp.asarray(offset[None] == np.arange(2 * axis.kernel - 1)[:, None, None], by_slot.dtype))
        return jnp.einsum("nabcd,yac,xbd->nyx", by_slot, *ones, precision="highest").reshape(-1, self.entries)


Tiles = GlobalTiles | WindowTiles | NeighborhoodTiles

SIDE = 8  # queries of a neighbourhood's tile along one axis; with 64 slots a kernel of 7 has a halo of 14 x 14 keys


def cut(pattern: Pattern, places: tuple[int, ...], *, rows: int, columns: int) -> Tiles:
    """The tiles of a pattern on tokens of shape `places`, (L,) or (H, W).

    Args:
        pattern: as in `attention`.
        places: shape of the tokens of one example.
        rows: slots that a tile has at most, a power of two.
        columns: slots that a block has at most, a power of two.
    """
    if isinstance(pattern, Global):
        (length,) = places
        size = power_of_two(length)
        return GlobalTiles(length, min(rows, size), min(columns, size))
    if isinstance(pattern, Window):
        window = pattern.fit(places)
        size = power_of_two(window.size[0] * window.size[1])
        return WindowTiles(places, window, min(rows, size), min(columns, size))
    assert isinstance(pattern, Neighborhood)
    # Enough that a halo, which begins kernel // 2 before its tile, holds what a tile at the end of the map sees.
    sides = [max(side, kernel - kernel // 2) for side, kernel in zip((SIDE, rows // SIDE), pattern.size, strict=True)]
    axes = [AxisTiles(*axis) for axis in zip(places, pattern.size, pattern.dilation, sides, strict=True)]
    return NeighborhoodTiles(*axes, columns)
