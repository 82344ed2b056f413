"""Tiles of queries and blocks of keys of every pattern, as index arithmetic without arrays.

Each pattern has its own subclass of `slots.Tiles`; that of neighbourhoods is in
`neighborhood_tiles`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.attention.neighborhood_tiles import AxisTiles, NeighborhoodTiles
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pair, Pattern, Window
from rope_jax_kernels.attention.slots import (
    Slots,
    Tiles,
    fold_offsets,
    look_up_offsets,
    make_slots,
    padded_size,
)


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
        line = jnp.minimum(token, self.length - 1)
        return Slots(token < self.length, token, token, line, ())

    def sees(self, q: Slots, k: Slots) -> Bool[Array, "1 columns"]:
        return k.exists[None, :]

    def transpose(self) -> "GlobalTiles":
        return self

    def by_slot(self, bias: Float[Array, "N entries"]) -> Float[Array, "N queries keys"]:
        return bias.reshape(-1, self.length, self.length)

    def fold(self, gradient: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        return gradient[:, : self.length, : self.length].reshape(-1, self.entries)


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
