"""Tiles of queries and blocks of keys for each pattern, as index arithmetic without arrays.

A program of a kernel owns a tile, a power of two of slots that hold one token or none, and loops
over the blocks of keys that the tile's queries attend to. The token of a slot follows from its
index, so rolled windows, residue classes and halos are read directly from the map: nothing is
partitioned, rolled, padded or gathered in memory. Each pattern has its own subclass of `Tiles`.

Backward passes also need tiles of keys with blocks of queries: `transposed()`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import divide, power_of_two
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pair, Pattern, Window

MISSING = np.int32(-(2**20))  # the row of a missing token of a neighbourhood: far from all others


class Slots(NamedTuple):
    """The tokens in the slots of a tile or block.

    Attributes:
        exists: whether there is a token.
        token: its index in the map; past the last one if there is none.
        coord: its row in `rotation.coords`, if it exists.
        place: what `sees` and `entry` compare; its meaning depends on the pattern.
    """

    exists: Bool[Array, " slots"]
    token: Int[Array, " slots"]
    coord: Int[Array, " slots"]
    place: tuple[Int[Array, " slots"], ...]


def slots_of(
    exists: Bool[Array, " slots"],
    token: Int[Array, " slots"],
    tokens: int,
    coord: Int[Array, " slots"],
    *place: Int[Array, " slots"],
) -> Slots:
    """`Slots` whose missing tokens are the one after the last, which is never read or written."""
    return Slots(exists, jnp.where(exists, token, tokens), coord, place)


def padded_size(n: int) -> int:
    """The smallest power of two that is at least n, and 16, the least that tensor cores take."""
    return power_of_two(n, at_least=16)


class Tiles:
    """The tiles of a pattern on a map; base of the classes of all patterns.

    Attributes:
        rows: slots of a tile.
        columns: slots of a block.
        tiles: tiles of a map.
        blocks: blocks of keys for each tile.
        entries: numbers of a head's bias.
        repeats: tiles of a map that share the same part of the bias.
    """

    rows: int
    columns: int
    tiles: int
    blocks: int
    entries: int
    repeats: int

    def tile(self, index: Int[Array, ""]) -> Slots:
        """The slots of a tile."""
        raise NotImplementedError

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        """The slots of the step-th block of a tile."""
        raise NotImplementedError

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "#rows columns"]:
        """Whether queries attend to keys, which exist; anything for queries that do not."""
        raise NotImplementedError

    def entry(self, q: Slots, k: Slots) -> Int[Array, "rows columns"]:
        """Index of each pair in a head's bias; any index for pairs that do not attend."""
        raise NotImplementedError

    def transposed(self) -> "Tiles":
        """Tiles of keys with blocks of queries."""
        raise NotImplementedError

    def fold(self, by_slot: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        """Sums the gradient of a bias by slot to that of its entries.

        Args:
            by_slot: [N, tiles / repeats * rows, blocks * columns].
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GlobalTiles(Tiles):
    """Tiles and blocks of consecutive tokens; the bias is a matrix [L, L], row by row."""

    length: int
    rows: int
    columns: int
    repeats: int = 1

    @property
    def tiles(self) -> int:
        return -(-self.length // self.rows)

    @property
    def blocks(self) -> int:
        return -(-self.length // self.columns)

    @property
    def entries(self) -> int:
        return self.length**2

    def tile(self, index: Int[Array, ""]) -> Slots:
        return self._slots(index * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        return self._slots(step * self.columns + jnp.arange(self.columns, dtype=jnp.int32))

    def _slots(self, token: Int[Array, " slots"]) -> Slots:
        return Slots(token < self.length, token, token, (token,))

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "1 columns"]:
        return k.exists[None, :]

    def entry(self, q: Slots, k: Slots) -> Int[Array, "rows columns"]:
        return q.token[:, None] * self.length + k.token[None, :]

    def transposed(self) -> "GlobalTiles":
        return self

    def fold(self, by_slot: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        return by_slot[:, : self.length, : self.length].reshape(-1, self.entries)


@dataclasses.dataclass(frozen=True)
class WindowTiles(Tiles):
    """Tiles of a window's tokens (all, or a part of a large one), blocks of the same window's.

    The bias is Swin's table of offsets.

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
        (height, width), (h, w) = self.grid, self.window.size
        return -(-height // h) * -(-width // w)  # all windows share one bias

    @property
    def tiles(self) -> int:
        return self.repeats * self.parts

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.columns)

    @property
    def entries(self) -> int:
        h, w = self.window.size
        return (2 * h - 1) * (2 * w - 1)

    def tile(self, index: Int[Array, ""]) -> Slots:
        window, part = divide(index, self.parts)
        return self._slots(window, part * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        window = divide(index, self.parts)[0]
        inside = step * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self._slots(window, inside)

    def _slots(self, window: Int[Array, ""], inside: Int[Array, " slots"]) -> Slots:
        (height, width), (h, w) = self.grid, self.window.size
        window_row, window_column = divide(window, -(-width // w))
        row, column = divide(inside, w)
        exists, where, region = inside < self.tokens, [], jnp.zeros_like(inside)
        for first, local, length, size, shift in (
            (window_row * h, row, height, h, self.window.shift[0]),
            (window_column * w, column, width, w, self.window.shift[1]),
        ):
            padded = -(-length // size) * size
            rolled = first + local
            place = rolled + shift
            carried = place >= padded  # the roll brought it from the other side of the map
            place = jnp.where(carried, place - padded, place)
            exists &= place < length
            where.append(place)
            region = 2 * region + carried.astype(jnp.int32)
        token = where[0] * width + where[1]
        region = jnp.where(exists, region, -1)
        return slots_of(exists, token, height * width, inside, row, column, region)

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "#rows columns"]:
        if self.window.shift == (0, 0):
            return k.exists[None, :]
        # Tokens that the roll brought together from opposite sides do not attend to each other.
        # Missing ones are a region of their own.
        return q.place[2][:, None] == k.place[2][None, :]

    def entry(self, q: Slots, k: Slots) -> Int[Array, "rows columns"]:
        h, w = self.window.size
        down, across = (
            a[:, None] - b[None, :] for a, b in zip(q.place[:2], k.place[:2], strict=True)
        )
        index = (down + h - 1) * (2 * w - 1) + across + w - 1
        # Slots past the window's end lie outside of the table.
        return jnp.clip(index, 0, self.entries - 1)

    def transposed(self) -> "WindowTiles":
        return self

    def fold(self, by_slot: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        # One axis at a time, as products with a matrix of zeros and ones.
        h, w = self.window.size
        by_slot = by_slot[:, : self.tokens, : self.tokens].reshape(-1, h, w, h, w)
        ones = [
            (np.arange(n)[:, None] - np.arange(n) + n - 1)[None]
            == np.arange(2 * n - 1)[:, None, None]
            for n in (h, w)
        ]
        down, across = (jnp.asarray(one, by_slot.dtype) for one in ones)
        folded = jnp.einsum("nabcd,yac,xbd->nyx", by_slot, down, across, precision="highest")
        return folded.reshape(-1, self.entries)


@dataclasses.dataclass(frozen=True)
class AxisTiles:
    """Tiles of one axis of a map for a neighbourhood.

    Tokens that a dilation keeps apart form classes; members count those of one class. A tile near
    the end of a class is moved back so that it does not reach past it: all halos have the same
    extent, and a token belongs to the first tile that holds it.

    Attributes:
        length: tokens.
        kernel, dilation: of the neighbourhood.
        tile: queries of a tile (keys of one, if transposed).
        transpose: whether the halo holds the queries that attend to a tile's keys, and not the
            keys that a tile's queries attend to.
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
            # The second is larger for an even kernel and a tile of half its size.
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
        """Number of tokens of a residue class."""
        until = self.length - residue + self.dilation - 1
        if isinstance(residue, int):
            return until // self.dilation
        return divide(until, self.dilation)[0]

    def first(self, residue: Array, tile: Array) -> Array:
        """The first member of a tile."""
        return jnp.minimum(tile * self.tile, jnp.maximum(self.members(residue) - self.tile, 0))

    def of_tile(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of the slots of a tile."""
        member = self.first(residue, tile) + inside
        exists = (member >= tile * self.tile) & (member < self.members(residue))
        return member, exists & (inside < self.tile)

    def of_halo(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of the slots of a tile's halo."""
        first = self.first(residue, tile)
        if self.transpose:
            origin = jnp.where(first < self.kernel, 0, first - (self.kernel - 1 - self.kernel // 2))
        else:
            origin = first - self.kernel // 2
        member = origin + inside
        return member, (member >= 0) & (member < self.members(residue)) & (inside < self.halo)

    def window(self, residue: Array, member: Array) -> Array:
        """The first member that a member attends to."""
        return jnp.clip(
            member - self.kernel // 2, 0, jnp.maximum(self.members(residue) - self.kernel, 0)
        )


@dataclasses.dataclass(frozen=True)
class NeighborhoodTiles(Tiles):
    """Tiles of neighbouring queries of one residue class, blocks of their halo of keys.

    The bias is NATTEN's table of offsets.

    Attributes:
        down, across: the axes.
        columns: slots of a block.
    """

    down: AxisTiles
    across: AxisTiles
    columns: int

    @property
    def rows(self) -> int:
        return padded_size(self.down.tile * self.across.tile)

    @property
    def repeats(self) -> int:
        # All tiles share one bias.
        return self.down.classes * self.across.classes * self.down.tiles * self.across.tiles

    @property
    def tiles(self) -> int:
        return self.repeats

    @property
    def blocks(self) -> int:
        return -(-self.down.halo * self.across.halo // self.columns)

    @property
    def entries(self) -> int:
        return (2 * self.down.kernel - 1) * (2 * self.across.kernel - 1)

    def tile(self, index: Int[Array, ""]) -> Slots:
        inside = jnp.arange(self.rows, dtype=jnp.int32)
        return self._slots(index, *divide(inside, self.across.tile), AxisTiles.of_tile)

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        inside = step * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self._slots(index, *divide(inside, self.across.halo), AxisTiles.of_halo)

    def _slots(self, index: Int[Array, ""], row: Array, column: Array, of: Callable) -> Slots:
        down, across = self.down, self.across
        index, x = divide(index, across.tiles)
        index, y = divide(index, down.tiles)
        residue_y, residue_x = divide(index, across.classes)
        row, row_exists = of(down, residue_y, y, row)
        column, column_exists = of(across, residue_x, x, column)
        map_row = residue_y + down.dilation * row
        token = map_row * across.length + residue_x + across.dilation * column
        exists = row_exists & column_exists
        first = down.window(residue_y, row), across.window(residue_x, column)
        place = jnp.where(exists, row, MISSING), column, *first
        return slots_of(exists, token, down.length * across.length, token, *place)

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "rows columns"]:
        def inside(first: Array, key: Array, kernel: int) -> Bool[Array, "rows columns"]:
            # Negative differences are large without a sign: one comparison for both ends.
            distance = key[None, :] - first[:, None]
            return jax.lax.bitcast_convert_type(distance, jnp.uint32) < np.uint32(kernel)

        in_rows = inside(q.place[2], k.place[0], self.down.kernel)
        return in_rows & inside(q.place[3], k.place[1], self.across.kernel)

    def entry(self, q: Slots, k: Slots) -> Int[Array, "rows columns"]:
        kh, kw = self.down.kernel, self.across.kernel
        down, across = (
            b[None, :] - a[:, None] for a, b in zip(q.place[:2], k.place[:2], strict=True)
        )
        return jnp.clip((down + kh - 1) * (2 * kw - 1) + across + kw - 1, 0, self.entries - 1)

    def transposed(self) -> "NeighborhoodTiles":
        return NeighborhoodTiles(
            *(dataclasses.replace(axis, transpose=True) for axis in (self.down, self.across)),
            self.columns,
        )

    def fold(self, by_slot: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        # A pair's offset follows from its slots: halos begin at one distance from their tiles.
        down, across = self.down, self.across
        by_slot = by_slot[:, : down.tile * across.tile, : down.halo * across.halo]
        by_slot = by_slot.reshape(-1, down.tile, across.tile, down.halo, across.halo)
        ones = []
        for axis in (down, across):
            offset = np.arange(axis.halo) - np.arange(axis.tile)[:, None]
            entry = offset - axis.kernel // 2 + axis.kernel - 1
            one = entry[None] == np.arange(2 * axis.kernel - 1)[:, None, None]
            ones.append(jnp.asarray(one, by_slot.dtype))
        folded = jnp.einsum("nabcd,yac,xbd->nyx", by_slot, *ones, precision="highest")
        return folded.reshape(-1, self.entries)


# Queries of a neighbourhood's tile along one axis. A kernel of 7 then has a halo of 14 x 14 keys.
SIDE = 8


def cut(pattern: Pattern, places: tuple[int, ...], *, rows: int, columns: int) -> Tiles:
    """The tiles of a pattern.

    Args:
        pattern: as in `attention`.
        places: shape of the tokens of one example, (L,) or (H, W).
        rows: most slots of a tile, a power of two.
        columns: most slots of a block, a power of two.
    """
    if isinstance(pattern, Global):
        (length,) = places
        size = padded_size(length)
        return GlobalTiles(length, min(rows, size), min(columns, size))
    if isinstance(pattern, Window):
        window = pattern.fit(places)
        size = padded_size(window.size[0] * window.size[1])
        return WindowTiles(places, window, min(rows, size), min(columns, size))
    assert isinstance(pattern, Neighborhood)
    # Enough that a halo, which begins kernel // 2 before its tile, holds all keys of a tile at the
    # end of the map.
    sides = [
        max(side, kernel - kernel // 2)
        for side, kernel in zip((SIDE, rows // SIDE), pattern.size, strict=True)
    ]
    axes = [
        AxisTiles(*axis) for axis in zip(places, pattern.size, pattern.dilation, sides, strict=True)
    ]
    return NeighborhoodTiles(*axes, columns)
