"""The tokens of a window as boxes of the map, for kernels whose copy engine loads boxes.

A window without a shift is one box. A shift cuts it into up to four, which lie together on the map
unless the roll carried some of them to its other side. Boxes take slots one after the other.
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.attention.patterns import Pair, Window
from rope_jax_kernels.attention.slots import ROWS
from rope_jax_kernels.attention.tiles import WindowTiles

ALIGNED = 8  # slots: rows of shared memory after which its swizzle begins again
COPIED = 128  # bytes, of which a copy into shared memory is a multiple


@dataclasses.dataclass(frozen=True)
class Box:
    """Tokens beside each other, row by row. Static.

    Attributes:
        slot: of its first token.
        place: of its first token in the window, (row, column).
        size: tokens, (rows, columns).
        rows_read: by a copy, at least those of the size: the others' tokens take part in nothing.
        carried: the sides of the map, (down, across), over which the roll carries the box in the
            last row or column of windows.
    """

    slot: int
    place: Pair
    size: Pair
    rows_read: int
    carried: tuple[bool, bool]


@dataclasses.dataclass(frozen=True)
class WindowBoxes:
    """The boxes and slots of the windows of a map. Static.

    Attributes:
        grid: (H, W) of the map.
        window: fitted to the map.
        row_bytes: bytes of a token's channels.
    """

    grid: Pair
    window: Window
    row_bytes: int

    @property
    def windows(self) -> Pair:
        """Windows of the map, down and across."""
        down, across = (-(-n // m) for n, m in zip(self.grid, self.window.size, strict=True))
        return down, across

    @property
    def count(self) -> int:
        """Windows of the map."""
        return math.prod(self.windows)

    @property
    def padded(self) -> Pair:
        """(H, W) of the map that windows divide."""
        down, across = (n * m for n, m in zip(self.windows, self.window.size, strict=True))
        return down, across

    def boxes(self) -> list[Box]:
        """The boxes of a window."""
        halves = [
            [(0, size - shift, False), (size - shift, shift, True)][: 1 + (shift > 0)]
            for size, shift in zip(self.window.size, self.window.shift, strict=True)
        ]
        boxes, slot = [], 0
        for (top, rows, below), (left, columns, beyond) in itertools.product(*halves):
            read = next(
                n for n in itertools.count(rows) if n * columns * self.row_bytes % COPIED == 0
            )
            boxes.append(Box(slot, (top, left), (rows, columns), read, (below, beyond)))
            slot += -(-read * columns // ALIGNED) * ALIGNED
        return boxes

    @property
    def tiles(self) -> int:
        """Tiles of a window, of 64 slots each."""
        last = self.boxes()[-1]
        return -(-(last.slot + last.rows_read * last.size[1]) // ROWS)

    @property
    def slots(self) -> int:
        """Slots of a window."""
        return self.tiles * ROWS

    def tokens(self) -> Int[np.ndarray, " slots"]:
        """The token inside its window of each slot, row by row, or the number of them if none."""
        h, w = self.window.size
        tokens = np.full(self.slots, h * w, np.int32)
        for box in self.boxes():
            rows, columns = np.indices(box.size)
            inside = (box.place[0] + rows) * w + box.place[1] + columns
            tokens[box.slot + rows * box.size[1] + columns] = inside
        return tokens

    @property
    def kinds(self) -> Pair:
        """Kinds of windows along both axes: the last ones differ from the others, and each other.

        By what the roll carried, in the last one alone, and by the tokens that a padded map lacks,
        with a shift in the last two. Window i of n is of kind max(0, i - n + kinds).
        """
        axes = zip(self.windows, self.padded, self.grid, self.window.shift, strict=True)
        down, across = (
            min(count, 1 + (shift > 0 or padded > size) + (shift > 0 and padded > size))
            for count, padded, size, shift in axes
        )
        return down, across

    def masked_bias(
        self, bias: Float[Array, "N entries"] | None, masked: float, *, queries: bool
    ) -> Float[Array, "kinds heads slots slots"]:
        """The bias of each pair of slots, or 0, and `masked` where a query does not see a key.

        Args:
            bias: Swin's table; without one, heads is 1.
            masked: number for pairs that do not attend.
            queries: whether missing queries see nothing; otherwise they see all existing keys.
        """
        inside = jnp.asarray(self.tokens())
        table = jnp.zeros((1, 1, 1), jnp.float32) if bias is None else self._tiles.by_slot(bias)
        if bias is not None:
            safe = jnp.minimum(inside, self._tiles.tokens - 1)
            table = table[:, safe[:, None], safe[None]].astype(jnp.float32)
        kinds = itertools.product(*map(range, self.kinds))
        sees = jnp.stack([self._sees(kind, inside, queries) for kind in kinds])
        return jnp.where(sees[:, None], table[None], masked)

    def fold(self, gradient: Float[Array, "N slots slots"]) -> Float[Array, "N entries"]:
        """Sums the gradient of the bias of pairs of slots to that of the table."""
        slots = np.argsort(self.tokens(), kind="stable")[: self._tiles.tokens]
        return self._tiles.fold(gradient[:, slots[:, None], slots[None]])

    @property
    def _tiles(self) -> WindowTiles:
        return WindowTiles(self.grid, self.window, ROWS, ROWS)

    def _sees(
        self, kind: Pair, inside: Int[Array, " slots"], queries: bool
    ) -> Bool[Array, "slots slots"]:
        """The mask of a window of this kind."""
        axes = zip(self.windows, self.kinds, kind, strict=True)
        row, column = (count - kinds + number for count, kinds, number in axes)
        slots = self._tiles.slots(jnp.int32(row * self.windows[1] + column), inside)
        missing, sees = ~slots.exists[:, None], self._tiles.sees(slots, slots)
        return slots.exists[None] & (sees & ~missing if queries else sees | missing)


def make_boxes(pattern: Window, places: Pair, head_dim: int) -> WindowBoxes:
    """The boxes of windows of a map, in heads of this dimension of 16-bit numbers."""
    return WindowBoxes(places, pattern.fit(places), 2 * head_dim)
