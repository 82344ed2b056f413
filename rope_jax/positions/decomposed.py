"""Relative positions that depend on the query, one term per axis (MViTv2, ViTDet)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.names.options import CountOrZero
from rope_jax.positions.resample import bilinear_matrix, resample
from rope_jax.positions.scheme import (
    Grid,
    PerLayer,
    Position,
    Stage,
    Terms,
    scheme,
)
from rope_jax_kernels import Global, Neighborhood, Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AxisBias:
    """A `Terms.transform` that adds products of queries with vectors of the offset to the logits.

    The products become channels: q . r(y - y') is one of h products of the query, selected by a
    key whose row y' of h is one-hot. So attention with h + w more channels, by any implementation
    and in any pattern, includes them, and no matrix of logits is needed.

    Attributes:
        rows: [h, h, D], the vector of a query's row and a key's row in the map or window.
        columns: [w, w, D], the same for columns.
    """

    rows: Array | PerLayer
    columns: Array | PerLayer

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        shape, head_dim = q.shape, q.shape[-1]
        if q.ndim == 5:  # a map of windows
            grid, prefix = shape[1:3], 0
        else:
            grid = (self.rows.shape[0], self.columns.shape[0])
            prefix = shape[1] - grid[0] * grid[1]
        flat = [x.reshape(shape[0], -1, *shape[-2:]) for x in (q, k, v)]
        queries = flat[0][:, prefix:]
        maps = queries.reshape(shape[0], *grid, *shape[-2:])
        products, one_hots = [], []
        for axis, vectors in enumerate((self.rows, self.columns)):
            places = np.arange(grid[axis]) % len(vectors)  # within the window
            windows = -(-grid[axis] // len(vectors))  # the last may be incomplete
            tiled = jnp.tile(vectors, (windows, 1, 1))[: grid[axis]].astype(q.dtype)
            form = ("byxnd,ykd->byxnk", "byxnd,xkd->byxnk")[axis]
            products.append(jnp.einsum(form, maps, tiled).reshape(*queries.shape[:-1], -1))
            one_hot = np.expand_dims(np.eye(len(vectors))[places], 1 - axis)
            one_hots.append(np.broadcast_to(one_hot, (*grid, len(vectors))))
        # Logits are scaled, these terms are not.
        query_channels = jnp.concatenate(products, axis=-1) * head_dim**0.5
        key_channels = np.concatenate(one_hots, axis=-1).reshape(1, -1, 1, query_channels.shape[-1])
        key_channels = jnp.broadcast_to(jnp.asarray(key_channels, k.dtype), query_channels.shape)
        appended = (query_channels, key_channels, jnp.zeros_like(query_channels))
        before = [(0, 0), (prefix, 0), (0, 0), (0, 0)]
        q, k, v = (
            jnp.concatenate([x, jnp.pad(extra, before)], axis=-1).reshape(*shape[:-1], -1)
            for x, extra in zip(flat, appended, strict=True)
        )
        return attend(q, k, v)[..., :head_dim]


@scheme("decomposed")
class Decomposed(Position):
    """Decomposed relative positions: the query times a learned vector of each axis' offset.

    logits + q . (r_y + r_x), with r_y and r_x the vectors of the offsets query minus key of rows
    and columns, for each layer and all heads alike; q is not scaled (MViTv2, arXiv 2112.01526,
    equation 4; ViTDet, arXiv 2203.16527). Layers with windows have tables of the window's offsets,
    others of the map's; on another map tables are interpolated linearly at each call. Prefix tokens
    get nothing. The vectors are initially zero.

    Options:
        side: rows and columns of the map that the tables of layers with global attention describe,
            whatever the image size; 0 for the map of creation. ViTDet's is 64 (1024 px).
    """

    paper = "Li et al., arXiv 2112.01526, eq. 4"
    equation = "logits + q . (r_y + r_x), r learned for each offset along an axis"
    acts = "transform"
    resolution = "resample"
    per_layer = learnable = within_windows = True
    keeps_norms = False  # queries and keys get more channels

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, side: CountOrZero = 0):
        super().__init__(stage, rngs=rngs)
        shifted = isinstance(stage.pattern, Window) and stage.global_layers is None
        if isinstance(stage.pattern, Neighborhood) or shifted:
            raise ValueError(
                "neighbourhoods and shifted windows have no rows and columns that all queries "
                "share: use a ViT with windows or global attention, or rpb"
            )
        self.side = side
        self.rows, self.columns = nnx.List([]), nnx.List([])
        for layer in range(stage.depth):
            for tables, length in zip((self.rows, self.columns), self._sides(layer), strict=True):
                zeros = jnp.zeros((2 * length - 1, stage.head_dim), stage.dtype)
                tables.append(nnx.Param(zeros, decay=False, layers=False, layer=layer))

    def _sides(self, layer: int) -> Grid:
        """Rows and columns of the map or window that a layer's tables describe."""
        stage = self.stage
        if layer in (stage.global_layers or ()):
            stage = dataclasses.replace(stage, pattern=Global())
        on_map = isinstance(stage.pattern, Global) and self.side > 0
        return (self.side, self.side) if on_map else stage.region(stage.grid)

    def _vectors(self, tables: nnx.List, length: int) -> Float[Array, "layers n n D"]:
        """The vector of every pair of a query's and a key's row (or column), for all layers."""
        place = np.arange(length)
        offsets = place[:, None] - place + length - 1

        def spread(table: Float[Array, "m D"]) -> Float[Array, "n n D"]:
            # A product, because the gradient of a gather is a scatter.
            matrix = bilinear_matrix(len(table), 2 * length - 1)[offsets].astype(table.dtype)
            return jnp.einsum("qkm,md->qkd", matrix, table, precision="highest")

        return jnp.stack([spread(table[...]) for table in tables])

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        sides = self.stage.region(grid)
        rows, columns = map(self._vectors, (self.rows, self.columns), sides)
        return Terms(transform=AxisBias(PerLayer(rows), PerLayer(columns)))

    def resize(self, grid: Grid) -> None:
        super().resize(grid)
        for layer in range(self.stage.depth):
            for tables, length in zip((self.rows, self.columns), self._sides(layer), strict=True):
                size = (2 * length - 1, self.stage.head_dim)
                tables[layer].set_value(resample(tables[layer][...], size, "bilinear"))
