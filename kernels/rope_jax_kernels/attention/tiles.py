"""Tiles of queries and blocks of keys of every pattern, as index arithmetic without arrays."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import divide, power_of_two
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pair, Pattern, Window
from rope_jax_kernels.attention.slots import (
    Slots,
    Tiles,
    first_query,
    fold_offsets,
    last_query,
    look_up_offsets,
    make_slots,
    padded_size,
)

MISSING = np.int32(-(2**20))  # the place of a missing member on an axis: far from all others


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

    def tile(self, index: Int[Array, ""]) -> Slots:
        return self._slots(index * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        return self._slots(step * self.columns + jnp.arange(self.columns, dtype=jnp.int32))

    def _slots(self, token: Int[Array, " slots"]) -> Slots:
        line = jnp.minimum(token, self.length - 1)
        return Slots(token < self.length, token, token, line, ())

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "1 columns"]:
        return k.exists[None, :]

    def transpose(self) -> "GlobalTiles":
        return self

    def by_slot(self, bias: Float[Array, "N entries"]) -> Float[Array, "N queries keys"]:
        return bias.reshape(-1, self.length, self.length)

    def fold(self, gradient: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        return gradient[:, : self.length, : self.length].reshape(-1, self.length**2)


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

    def tile(self, index: Int[Array, ""]) -> Slots:
        window, part = divide(index, self.parts)
        return self.slots(window, part * self.rows + jnp.arange(self.rows, dtype=jnp.int32))

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        window = divide(index, self.parts)[0]
        inside = step * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self.slots(window, inside)

    def slots(self, window: Int[Array, ""], inside: Int[Array, " slots"]) -> Slots:
        (height, width), (h, w) = self.grid, self.window.size
        window_row, window_column = divide(window, -(-width // w))
        row, column = divide(inside, w)
        exists, places, region = inside < self.tokens, [], jnp.zeros_like(inside)
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
            places.append(place)
            region = 2 * region + carried.astype(jnp.int32)
        token = places[0] * width + places[1]
        region = jnp.where(exists, region, -1)
        return make_slots(exists, token, height * width, inside, inside, region)

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "#rows columns"]:
        if self.window.shift == (0, 0):
            return k.exists[None, :]
        # Tokens that the roll brought together from opposite sides do not attend to each other.
        # Missing ones are a region of their own.
        return q.place[0][:, None] == k.place[0][None, :]

    def transpose(self) -> "WindowTiles":
        return self

    def by_slot(self, bias: Float[Array, "N entries"]) -> Float[Array, "N queries keys"]:
        # Tiles hold queries or, of the transposed ones, keys.
        size = max(self.parts * self.rows, self.blocks * self.columns)
        places = divide(jnp.arange(size, dtype=jnp.int32), self.window.size[1])
        offsets = [x[:, None] - x[None] for x in places]
        return look_up_offsets(bias, *offsets, self.window.size)

    def fold(self, gradient: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        h, w = self.window.size
        gradient = gradient[:, : self.tokens, : self.tokens].reshape(-1, h, w, h, w)
        gradient = gradient.swapaxes(2, 3).reshape(-1, h * h, w * w)
        offsets = [(np.arange(n)[:, None] - np.arange(n)).ravel() for n in (h, w)]
        return fold_offsets(gradient, *offsets, self.window.size)


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
        transpose: whether the halo holds the queries that attend to a tile's keys, rather than the
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

    @functools.cached_property
    def extents(self) -> list[tuple[int, int]]:
        """Members of a tile's halo before its first member, and from this on, of all tiles."""
        if not self.transpose:
            before = self.kernel // 2
            # The second is larger for an even kernel and a tile of half its size.
            return [(before, max(self.tile + self.kernel - 1 - before, self.kernel))]
        extents = []
        for residue in range(self.classes):
            members = self.members(residue)
            for tile in range(self.tiles):
                first = min(tile * self.tile, max(members - self.tile, 0))
                last = min(first + self.tile, members) - 1
                low = int(first_query(first, self.kernel))
                high = int(last_query(last, self.kernel, members))
                extents.append((first - low, high - first + 1))
        return extents

    @property
    def halo(self) -> int:
        """Most members in the halo of a tile."""
        return max(before + after for before, after in self.extents)

    @property
    def before(self) -> int:
        """Most members of a halo before the first member of its tile."""
        return max(before for before, _ in self.extents)

    @property
    def span(self) -> int:
        """Members from the most before a tile to the most after its first one."""
        return self.before + max(after for _, after in self.extents)

    def members(self, residue: int | Array) -> int | Array:
        """Number of tokens of a residue class."""
        until = self.length - residue + self.dilation - 1
        if isinstance(residue, int):
            return until // self.dilation
        return divide(until, self.dilation)[0]

    def first(self, residue: Array, tile: Array) -> Array:
        """The first member of a tile."""
        return jnp.minimum(tile * self.tile, jnp.maximum(self.members(residue) - self.tile, 0))

    def tile_members(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of the slots of a tile."""
        member = self.first(residue, tile) + inside
        exists = (member >= tile * self.tile) & (member < self.members(residue))
        return member, exists & (inside < self.tile)

    def halo_members(self, residue: Array, tile: Array, inside: Array) -> tuple[Array, Array]:
        """(member, exists) of the slots of a tile's halo."""
        first = self.first(residue, tile)
        origin = first_query(first, self.kernel) if self.transpose else first - self.kernel // 2
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
    def stride(self) -> int:
        """Slots from one row of the halo to the next.

        A power of two, which needs no division, unless it needs more blocks.
        """
        halo = self.across.halo
        return min(halo, power_of_two(halo), key=lambda n: (self._blocks(n), -n))

    def _blocks(self, stride: int) -> int:
        return -(-self.down.halo * stride // self.columns)

    @property
    def blocks(self) -> int:
        return self._blocks(self.stride)

    def tile(self, index: Int[Array, ""]) -> Slots:
        inside = jnp.arange(self.rows, dtype=jnp.int32)
        return self._slots(index, inside, self.across.tile, AxisTiles.tile_members)

    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        inside = step * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self._slots(index, inside, self.stride, AxisTiles.halo_members)

    def _slots(self, index: Int[Array, ""], inside: Array, stride: int, members: Callable) -> Slots:
        (row, column), line = divide(inside, stride), inside
        down, across = self.down, self.across
        index, x = divide(index, across.tiles)
        index, y = divide(index, down.tiles)
        residue_y, residue_x = divide(index, across.classes)
        row, row_exists = members(down, residue_y, y, row)
        column, column_exists = members(across, residue_x, x, column)
        map_row = residue_y + down.dilation * row
        token = map_row * across.length + residue_x + across.dilation * column
        exists = row_exists & column_exists
        if members is AxisTiles.halo_members and down.transpose:
            # Halos begin at several distances from their tiles: places are those of the largest.
            from_y = row - down.first(residue_y, y) + down.before
            from_x = column - across.first(residue_x, x) + across.before
            line = jnp.minimum(from_y * across.span + from_x, down.span * across.span - 1)
        first = down.window(residue_y, row), across.window(residue_x, column)
        # Each axis by itself, so that slots of one row or column share a comparison.
        row, column = jnp.where(row_exists, row, MISSING), jnp.where(column_exists, column, MISSING)
        size, place = down.length * across.length, (row, column, *first)
        return make_slots(exists, token, size, token, line, *place)

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "rows columns"]:
        def inside(first: Array, key: Array, kernel: int) -> Bool[Array, "rows columns"]:
            # Negative differences are large without a sign: one comparison for both ends.
            distance = key[None, :] - first[:, None]
            return jax.lax.bitcast_convert_type(distance, jnp.uint32) < np.uint32(kernel)

        in_rows = inside(q.place[2], k.place[0], self.down.kernel)
        return in_rows & inside(q.place[3], k.place[1], self.across.kernel)

    def transpose(self) -> "NeighborhoodTiles":
        return NeighborhoodTiles(
            *(dataclasses.replace(axis, transpose=True) for axis in (self.down, self.across)),
            self.columns,
        )

    def by_slot(self, bias: Float[Array, "N entries"]) -> Float[Array, "N queries keys"]:
        down, across = self.down, self.across
        width, lines = self.stride, self.blocks * self.columns
        if down.transpose:
            width, lines = across.span, down.span * across.span
        tile = divide(jnp.arange(self.rows, dtype=jnp.int32), across.tile)
        halo = divide(jnp.arange(lines, dtype=jnp.int32), width)
        offsets = []  # key - query
        for axis, in_tile, in_halo in zip((down, across), tile, halo, strict=True):
            in_halo = in_halo - axis.before
            if down.transpose:
                offsets.append(in_tile[None] - in_halo[:, None])
            else:
                offsets.append(in_halo[None] - in_tile[:, None])
        return look_up_offsets(bias, *offsets, (down.kernel, across.kernel))

    def fold(self, gradient: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        # A pair's offset follows from its slots: halos begin at one distance from their tiles.
        down, across = self.down, self.across
        gradient = gradient[:, : down.tile * across.tile, : down.halo * self.stride]
        gradient = gradient.reshape(-1, down.tile, across.tile, down.halo, self.stride)
        gradient = gradient[..., : across.halo].swapaxes(2, 3)
        gradient = gradient.reshape(-1, down.tile * down.halo, across.tile * across.halo)
        offsets = [
            (np.arange(axis.halo) - axis.before - np.arange(axis.tile)[:, None]).ravel()
            for axis in (down, across)
        ]
        return fold_offsets(gradient, *offsets, (down.kernel, across.kernel))


# Queries of a neighbourhood's tile along one axis. A kernel of 7 then has a halo of 14 x 14 keys.
SIDE = 8


def cut(pattern: Pattern, places: tuple[int, ...], *, rows: int, columns: int) -> Tiles:
    """Cuts a pattern into tiles.

    Args:
        pattern: as in `attention`.
        places: shape of the tokens of one example, (L,) or (H, W).
        rows: most slots of a tile, a power of two; a neighbourhood's tile is at least half as long
            as its kernel along each axis.
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
