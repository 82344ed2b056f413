"""Tiles and boxes of a neighbourhood, for kernels whose copy engine loads boxes of the map.

A dilation keeps classes of tokens apart, each a map of its own; members count the tokens of a class
along one axis. A tile is 64 queries, and its box the keys that they attend to; or, transposed, 64
keys and the queries that attend to them. Each of the four warps that compute a tile has 16 of its
tokens, and reads only the rows of the box that these need.

Which pairs attend, and their bias, is a table by slot that is added to the logits. Tiles far from
the borders share their part of it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rope_jax_kernels.attention.patterns import Neighborhood, Pair
from rope_jax_kernels.attention.slots import (
    ROWS,
    first_query,
    fold_offsets,
    last_query,
    look_up_offsets,
    select_numpy,
)

WARPS = 4
COLUMNS = (8, 4)  # of a tile that are tried
STEP = 16  # columns of a box: the matrix instructions sum over as many at a time
SHARED = 228 * 1024  # bytes of shared memory of a multiprocessor
RESERVED = 3072  # of each program, by the hardware, for barriers and gaps
ALIGNED = 1024  # bytes: where each buffer begins
LARGEST = 13  # kernel
SMALLEST_SCALE = 1e-6  # biases are divided by it


@dataclasses.dataclass(frozen=True)
class Axis:
    """Tiles of one axis of a class. Static.

    Attributes:
        members: tokens.
        size: the pattern's kernel, which the bias is a table for.
        tile: members of a tile.
        transposed: whether boxes hold queries.
        masked: whether queries past the last one see nothing. Otherwise they see what the last one
            sees, so that their softmax has terms.
    """

    members: int
    size: int
    tile: int
    transposed: bool
    masked: bool

    @property
    def kernel(self) -> int:
        """Neighbours of a query."""
        return min(self.size, self.members)

    @property
    def tiles(self) -> int:
        return -(-self.members // self.tile)

    def window(self, query: Any) -> Any:
        """The first key of a query."""
        # As in `kernel`: a class that is no larger has one neighbourhood.
        return select_numpy(query).clip(query - self.kernel // 2, 0, self.members - self.kernel)

    def first(self, member: Any) -> Any:
        """The first member of the box that this member of a tile needs."""
        return first_query(member, self.kernel) if self.transposed else self.window(member)

    def last(self, member: Any) -> Any:
        """The last one."""
        if self.transposed:
            return last_query(member, self.kernel, self.members)
        return self.window(member) + self.kernel - 1

    @functools.cached_property
    def box(self) -> int:
        """Most members that a tile needs."""
        start = np.arange(self.tiles) * self.tile
        end = np.minimum(start + self.tile, self.members) - 1
        return int(np.max(self.last(end) - self.first(start))) + 1

    @property
    def low(self) -> int:
        """Kinds of tiles at the beginning; the next tile is the first far from the borders."""
        return min(-(-self.kernel // self.tile), self.tiles - 1)

    @property
    def high(self) -> int:
        """Kinds of tiles at the end."""
        near = self.tiles - (self.members - self.kernel) // self.tile
        return min(near, self.tiles - 1 - self.low)

    def kind(self, tile: Any) -> Any:
        """The kind of a tile: those far from the borders are one."""
        from_end = select_numpy(tile).maximum(tile - (self.tiles - 1 - self.high), 0)
        return select_numpy(tile).minimum(tile, self.low) + from_end

    @property
    def examples(self) -> np.ndarray:
        """A tile of each kind."""
        return np.r_[: self.low + 1, self.tiles - self.high : self.tiles]

    def pairs(
        self, start: Int[np.ndarray, "*n 1"], count: int, tiles: Int[np.ndarray, " kinds"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Offsets (key - query) of the tiles' members and those of their boxes, and which attend.

        Args:
            start: the first member of the box for each member of a tile, [tiles, tile, 1].
            count: members from there on.
            tiles: their numbers.

        Returns:
            Two arrays [tiles, tile, count].
        """
        member = (tiles[:, None] * self.tile + np.arange(self.tile))[..., None]
        exists = (member < self.members) | ~np.bool_(self.masked)
        if not self.transposed:
            member = np.minimum(member, self.members - 1)
        other = start + np.arange(count)
        query, key = (other, member) if self.transposed else (member, other)
        distance = key - self.window(query)
        attends = (distance >= 0) & (distance < self.kernel) & (query < self.members)
        return key - query, attends & (key < self.members) & exists


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Tiles and boxes of a map. Static.

    Attributes:
        down, across: the axes.
        dilation: of the pattern; it divides the map.
        biased: whether the table has a bias in it.
    """

    down: Axis
    across: Axis
    dilation: Pair
    biased: bool

    @property
    def lines(self) -> int:
        """Rows of a tile that one warp has."""
        return self.down.tile // WARPS

    @property
    def width(self) -> int:
        """Columns of a box."""
        return -(-self.across.box // STEP) * STEP

    @property
    def height(self) -> int:
        """Rows of a box, an even number: copies of numbers of 4 bytes are whole 128 bytes."""
        return -(-self.down.box // 2) * 2

    @property
    def blocks(self) -> int:
        """Blocks of 64 slots that hold a box."""
        return -(-self.height * self.width // ROWS)

    @property
    def whole_height(self) -> int:
        """Rows of these blocks, of a box that turns."""
        return self.blocks * ROWS // self.width

    @property
    def reach(self) -> int:
        """Rows of a box that the tokens of one warp need, unless transposed."""
        return min(self.lines + self.down.kernel - 1, self.height)

    @property
    def classes(self) -> int:
        return math.prod(self.dilation)

    @property
    def tiles(self) -> int:
        """Tiles of one class."""
        return self.down.tiles * self.across.tiles

    def row_kind(self, row: Any) -> Any:
        """Where the table has a row of a warp's keys: without a bias, rows that all see are one."""
        shared = max(self.down.kernel - 1, self.lines - 1)
        if self.biased:
            return row
        after = select_numpy(row).maximum(row - shared, 0)
        return select_numpy(row).minimum(row, self.lines - 1) + after

    def first_row(self, start: Any, warp: Any) -> Any:
        """Where the rows of keys of a warp begin in the box of a tile that begins at a row."""
        line = start + warp * self.lines
        minimum = select_numpy(line).minimum
        row = self.down.first(minimum(line, self.down.members - 1)) - self.down.first(start)
        return minimum(row, self.height - self.reach)  # so that they end inside of the box

    def rows_of_queries(self, start: Array, warp: Array) -> tuple[Array, Array]:
        """First and last row of the box (of queries) that attend to a warp's keys."""
        down, line = self.down, start + warp * self.lines
        above, below = (jnp.minimum(x, down.members - 1) for x in (line, line + self.lines - 1))
        origin = down.first(start)
        return down.first(above) - origin, down.last(below) - origin

    def offsets(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """`Axis.pairs` of both axes for tiles of each kind."""
        down, across = self.down, self.across
        row, column = (x.examples[:, None] * x.tile for x in (down, across))
        rows = down.first(row) + np.zeros(down.tile, np.int32)
        if not down.transposed:
            rows = rows + self.first_row(row, np.arange(down.tile) // self.lines)
        columns = across.first(column) + np.zeros(across.tile, np.int32)
        count = self.height if down.transposed else self.reach
        return (
            down.pairs(rows[..., None], count, down.examples),
            across.pairs(columns[..., None], self.width, across.examples),
        )

    def table(self, bias: Float[Array, "N entries"] | None, scale: float) -> Float[Array, "..."]:
        """The bias and mask, which are added to products of queries and keys before scaling.

        [kinds, N or 1, rows, 64, width]: minus infinity for pairs that do not attend, else the bias
        over the scale, which is then the initial value of the matrix instructions' sum. Float32.

        Args:
            bias: finite, in the units of scaled products.
            scale: of the products.
        """
        (down, sees_down), (across, sees_across) = self.offsets()
        if bias is None:
            rows = np.arange(down.shape[-1])
            if not self.down.transposed:  # one of each kind
                _, rows = np.unique(self.row_kind(rows), return_index=True)
            sees_down = sees_down[..., rows]
            values = jnp.zeros((1, sees_down.size, across.size), jnp.float32)
        else:
            shape = down.size, across.size
            offsets = (jnp.broadcast_to(down.reshape(-1, 1), shape), across.reshape(1, -1))
            offsets = offsets[0], jnp.broadcast_to(offsets[1], shape)
            sizes = self.down.size, self.across.size
            values = look_up_offsets(bias / scale, *offsets, sizes)
        sees = jnp.asarray(sees_down).reshape(-1, 1) & jnp.asarray(sees_across).reshape(1, -1)
        values = jnp.where(sees, values, -jnp.inf)
        values = values.reshape(-1, *sees_down.shape, *sees_across.shape)
        heads, kinds, _, rows, more, _, width = values.shape
        values = values.transpose(1, 4, 0, 3, 2, 5, 6)
        return values.reshape(kinds * more, heads, rows, ROWS, width)

    def fold(self, sums: Float[Array, "tiles N rows 64 *width"]) -> Float[Array, "N entries"]:
        """Sums the gradient of the bias by tile and slot, of one class, to that of the bias."""
        offsets = [
            offset[axis.kind(np.arange(axis.tiles))]
            for axis, (offset, _) in zip((self.down, self.across), self.offsets(), strict=True)
        ]
        heads = sums.shape[1]
        tiles, tile = (self.down.tiles, self.across.tiles), (self.down.tile, self.across.tile)
        sums = sums.reshape(*tiles, heads, self.reach, *tile, self.width)
        sums = sums.transpose(2, 0, 4, 3, 1, 5, 6).reshape(heads, *(x.size for x in offsets))
        return fold_offsets(sums, *map(np.ravel, offsets), (self.down.size, self.across.size))

    def tokens(self) -> tuple[Int[Array, "tiles 64"], Int[Array, "tiles slots"]]:
        """The token of each slot of the tiles and of their boxes; any where there is none."""
        found = []
        for of_box in (False, True):
            members = []
            for axis, count in ((self.down, self.whole_height), (self.across, self.width)):
                start = jnp.arange(axis.tiles) * axis.tile
                start, count = (axis.first(start), count) if of_box else (start, axis.tile)
                member = start[:, None] + jnp.arange(count)[None]
                members.append(jnp.minimum(member, axis.members - 1))
            (dy, dx), width = self.dilation, self.across.members * self.dilation[1]
            shape = -1, 1, self.down.tiles, 1, members[0].shape[1], 1
            row = (members[0] * dy)[None] + jnp.arange(dy)[:, None, None]
            column = (members[1] * dx)[None] + jnp.arange(dx)[:, None, None]
            column = column.reshape(1, dx, 1, self.across.tiles, 1, -1)
            token = row.reshape(shape) * width + column
            found.append(token.reshape(self.classes * self.tiles, -1))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Part:
    """One kernel: what a program holds of each example. Static.

    Operands are q, k, v, the output's gradient and the output, 0 to 4.

    Attributes:
        name: of the kernel.
        tiles: operands of which it holds a tile.
        boxes: those of which it holds a box; the first of them turns.
        maps: numbers of each token (lse and delta) that it reads, of a tile or, transposed, a box.
        results, result_maps: tiles that it writes.
        transposed: whether tiles hold keys.
    """

    name: str
    tiles: tuple[int, ...]
    boxes: tuple[int, ...]
    maps: int
    results: int
    result_maps: int
    transposed: bool = False

    def stages(self, boxes: Boxes, head_dim: int) -> int:
        """Examples in a program's shared memory at a time, 0 if one does not fit.

        As many as a multiprocessor's programs hold most of, together.
        """
        rows = [ROWS] * len(self.tiles) + [boxes.blocks * ROWS]
        rows += [boxes.height * boxes.width] * (len(self.boxes) - 1)
        of_map = boxes.height * boxes.width if self.transposed else ROWS
        example = [2 * head_dim * x for x in rows] + [4 * of_map] * self.maps
        others = [2 * head_dim * ROWS] * self.results + [4 * ROWS] * self.result_maps
        if self is QUERIES and boxes.biased:  # sums of the gradient of the bias
            others.append(4 * boxes.reach * ROWS * boxes.width)

        def programs(stages: int) -> int:
            buffers = [*(stages * x for x in example), *others]
            size = sum(-(-x // ALIGNED) * ALIGNED for x in buffers)
            return SHARED // (size + RESERVED)

        stages = max((1, 2), key=lambda x: x * programs(x))
        return stages if programs(stages) else 0


FORWARD = Part("attention_neighborhood", (0,), (1, 2), 0, 1, 1)
QUERIES = Part("attention_neighborhood_queries", (0, 3, 4), (1, 2), 1, 1, 1)
KEYS = Part("attention_neighborhood_keys", (1, 2), (0, 3), 2, 2, 0, transposed=True)


def cut(
    part: Part, pattern: Neighborhood, places: Pair, head_dim: int, *, biased: bool
) -> Boxes | None:
    """Cuts a map into the tiles that need the fewest products, or None if none fits."""
    options = []
    for columns in COLUMNS:
        sides = ROWS // columns, columns
        axes = [
            Axis(length // dilation, size, side, part.transposed, part is not FORWARD)
            for length, dilation, size, side in zip(
                places, pattern.dilation, pattern.size, sides, strict=True
            )
        ]
        boxes = Boxes(*axes, pattern.dilation, biased)
        if part.stages(boxes, head_dim):
            options.append(boxes)
    cost = lambda x: (x.lines + x.down.kernel - 1) * x.width * x.tiles
    return min(options, key=cost, default=None)


def refusal(pattern: Neighborhood, places: Pair, head_dim: int, scale: float | None) -> str | None:
    """The reason why the kernels cannot serve these neighbourhoods, or None."""
    if max(pattern.size) > LARGEST:
        return f"the neighbourhood is {pattern.size}; up to ({LARGEST}, {LARGEST}) are served"
    if any(n % dilation for n, dilation in zip(places, pattern.dilation, strict=True)):
        return f"the dilation {pattern.dilation} does not divide the map {places}"
    if scale is not None and not SMALLEST_SCALE <= scale < math.inf:
        return f"scale is {scale}; finite numbers from {SMALLEST_SCALE} on are served"
    if not all(cut(x, pattern, places, head_dim, biased=True) for x in (FORWARD, QUERIES, KEYS)):
        return (
            f"the neighbourhood {pattern.size} on a map {places} in heads of {head_dim} needs more "
            "shared memory than a program has"
        )
    return None
