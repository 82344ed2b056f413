"""Neighbourhood attention in plain jax.numpy, by dense products of tiles and halos.

Gathering each query's K x K keys would copy k and v K*K times and leave matrix units idle. Instead,
each tile of t x t queries shares one block of (t + K - 1)^2 keys, which contains the neighbourhoods
of all of them; pairs outside a neighbourhood are masked (as in "fused neighborhood attention",
arXiv 2403.04690).

Dilation splits a map into residue classes that never attend to each other: they are treated as
additional small maps of the batch, without dilation.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.attention.dense import attend, spread_table, turn_tokens
from rope_jax_kernels.attention.patterns import Neighborhood
from rope_jax_kernels.rotation import Rotation

SMALLEST_TILE = 7  # below this a tile's matrix products cost more to start than to compute


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """Tiles of one axis of a map.

    Members count the tokens of one residue class; a class may lack the last member.

    Attributes:
        classes: number of residue classes.
        members: tokens in the largest class.
        tiles: number of tiles.
        tile: queries in a tile.
        halo: keys in a tile's halo.
        before: keys between the start of the halo and that of the tile, for all tiles and classes.
        allowed: whether a query of a class may attend to a key of its tile's halo.
        offsets: key - query of each tile, in members.
    """

    classes: int
    members: int
    tiles: int
    tile: int
    halo: int
    before: int
    allowed: Bool[np.ndarray, "classes tiles tile halo"]
    offsets: Int[np.ndarray, "tiles tile halo"]


def plan_axis(length: int, kernel: int, dilation: int) -> Axis:
    """Plans the tiles of `length` tokens for a neighbourhood of `kernel` tokens, `dilation` apart.

    Large tiles compute masked logits, (t + K - 1) / K times too many along each axis; small ones
    copy keys (t + K - 1) / t times. Both factors are 2 for tiles as large as the kernel.
    """
    classes = min(dilation, length)
    members = -(-length // classes)
    tile = -(-members // max(1, round(members / max(kernel, SMALLEST_TILE))))
    tiles = -(-members // tile)

    sizes = (-(-(length - np.arange(classes)) // classes))[:, None]
    window = np.minimum(kernel, sizes)
    queries = np.arange(tiles * tile)
    # Queries past a class's end are padding. They get the keys of its last member, so that no
    # softmax is empty.
    first = np.clip(np.minimum(queries, sizes - 1) - kernel // 2, 0, sizes - window)
    first, last = (x.reshape(classes, tiles, tile) for x in (first, first + window))

    # Halos one tile apart, from before the map's start to past its end; pairs outside are masked.
    origin = tile * np.arange(tiles)
    before = int((origin - first.min(axis=(0, 2))).max())
    halo = before + int((last.max(axis=(0, 2)) - origin).max())
    keys = (origin[:, None] - before + np.arange(halo))[:, None, :]
    allowed = (first[..., None] <= keys) & (keys < last[..., None])
    offsets = keys - queries.reshape(tiles, tile, 1)
    return Axis(classes, members, tiles, tile, halo, before, allowed, offsets)


def split_classes(
    x: Float[Array, "B H W N D"], rows: Axis, columns: Axis
) -> Float[Array, "B _ _ N _ _ D"]:
    """Splits a map into residue classes, [B, classes, classes, N, members, members, D].

    Classes that lack a member are padded.
    """
    batch, height, width, heads, head_dim = x.shape
    height, width = rows.members * rows.classes - height, columns.members * columns.classes - width
    x = jnp.pad(x, ((0, 0), (0, height), (0, width), (0, 0), (0, 0)))
    x = x.reshape(
        batch, rows.members, rows.classes, columns.members, columns.classes, heads, head_dim
    )
    return x.transpose(0, 2, 4, 5, 1, 3, 6)


def cut_tiles(
    x: Float[Array, "B _ _ N _ _ D"], rows: Axis, columns: Axis
) -> Float[Array, "B _ _ N _ _ tile D"]:
    """Cuts classes into tiles of queries, [..., tiles, tiles, tile * tile, D], padding the last."""
    *lead, _, _, head_dim = x.shape
    ends = [(0, axis.tiles * axis.tile - axis.members) for axis in (rows, columns)]
    x = jnp.pad(x, [(0, 0)] * len(lead) + ends + [(0, 0)])
    x = x.reshape(*lead, rows.tiles, rows.tile, columns.tiles, columns.tile, head_dim)
    return x.swapaxes(5, 6).reshape(
        *lead, rows.tiles, columns.tiles, rows.tile * columns.tile, head_dim
    )


def overlap(x: Float[Array, "..."], dimension: int, axis: Axis) -> Float[Array, "..."]:
    """Replaces a dimension of members by [tiles, halo].

    Halos are whole tiles and a part of one side by side. Their gradient is the sum of as many
    shifted arrays, usually two; with a slice for each halo it would be one for each tile, and with
    a gather a scatter.
    """
    pieces = -(-axis.halo // axis.tile)
    blocks = axis.tiles + pieces - 1
    ends = [(0, 0)] * x.ndim
    ends[dimension] = (axis.before, blocks * axis.tile - axis.members - axis.before)
    x = jnp.pad(x, ends).reshape(*x.shape[:dimension], blocks, axis.tile, *x.shape[dimension + 1 :])
    x = [lax.slice_in_dim(x, i, i + axis.tiles, axis=dimension) for i in range(pieces)]
    x[-1] = lax.slice_in_dim(x[-1], 0, axis.halo - (pieces - 1) * axis.tile, axis=dimension + 1)
    return jnp.concatenate(x, axis=dimension + 1)


def cut_halos(
    x: Float[Array, "B _ _ N _ _ D"], rows: Axis, columns: Axis
) -> Float[Array, "B _ _ N _ _ halo D"]:
    """Copies each tile's keys, [..., tiles, tiles, halo * halo, D]."""
    x = overlap(overlap(x, 4, rows), 6, columns).swapaxes(5, 6)
    return x.reshape(*x.shape[:6], rows.halo * columns.halo, x.shape[-1])


def join_map(
    x: Float[Array, "B _ _ N _ _ tile D"], rows: Axis, columns: Axis, height: int, width: int
) -> Float[Array, "B H W N D"]:
    """Inverse of `split_classes` and `cut_tiles`, for the outputs of tiles of queries."""
    batch, _, _, heads, _, _, _, head_dim = x.shape
    x = x.reshape(*x.shape[:6], rows.tile, columns.tile, head_dim).swapaxes(5, 6)
    x = x.reshape(
        *x.shape[:4], rows.tiles * rows.tile, columns.tiles * columns.tile, head_dim
    ).transpose(0, 4, 1, 5, 2, 3, 6)
    x = x.reshape(
        batch,
        rows.tiles * rows.tile * rows.classes,
        columns.tiles * columns.tile * columns.classes,
        heads,
        head_dim,
    )
    return x[:, :height, :width]


def allowed_pairs(rows: Axis, columns: Axis) -> Bool[Array, "_ _ 1 _ _ tile halo"] | None:
    """The pairs of a query of a tile and a key of its halo that attend, or None if all do.

    [classes, classes, 1, tiles, tiles, tile, halo].
    """
    if rows.allowed.all() and columns.allowed.all():
        return None
    down, across = jnp.asarray(rows.allowed), jnp.asarray(columns.allowed)
    pairs = down[:, None, :, None, :, None, :, None] & across[None, :, None, :, None, :, None, :]
    pairs = pairs.reshape(*pairs.shape[:4], rows.tile * columns.tile, rows.halo * columns.halo)
    return pairs[:, :, None]


def tile_bias(
    table: Float[Array, "N _ _"], rows: Axis, columns: Axis
) -> Float[Array, "N _ _ tile halo"]:
    """The bias of each pair of a tile and its halo, [N, tiles, tiles, tile, halo].

    The table is over offsets key - query.
    """
    # Offsets outside the table belong to masked pairs, so any entry will do.
    indices = [
        np.clip(axis.offsets + n // 2, 0, n - 1)
        for axis, n in zip((rows, columns), table.shape[1:], strict=True)
    ]
    bias = spread_table(table, *indices).transpose(0, 1, 4, 2, 5, 3, 6)
    return bias.reshape(*bias.shape[:3], rows.tile * columns.tile, rows.halo * columns.halo)


def attend_to_neighbors(
    q: Float[Array, "B H W N D"],
    k: Float[Array, "B H W N D"],
    v: Float[Array, "B H W N D"],
    *,
    pattern: Neighborhood,
    rotation: Rotation | None,
    bias: Float[Array, "N _ _"] | None,
    scale: float | Float[Array, ""],
) -> Float[Array, "B H W N D"]:
    """Attention of every token to its neighbourhood."""
    _, height, width, _, _ = q.shape
    rows, columns = (
        plan_axis(*axis)
        for axis in zip((height, width), pattern.size, pattern.dilation, strict=True)
    )
    q, k = (
        turn_tokens(x.reshape(x.shape[0], height * width, *x.shape[3:]), rotation).reshape(x.shape)
        for x in (q, k)
    )
    q, k, v = (split_classes(x, rows, columns) for x in (q, k, v))
    out = attend(
        cut_tiles(q, rows, columns),
        cut_halos(k, rows, columns),
        cut_halos(v, rows, columns),
        scale=scale,
        bias=None if bias is None else tile_bias(bias, rows, columns),
        allowed=allowed_pairs(rows, columns),
    )
    return join_map(out, rows, columns, height, width)
