"""Multi-scale deformable attention (Zhu et al., arXiv 2010.04159) in plain jnp.

Every head of every query reads a few points of each map. Points are interpolated between four
tokens, so a query's output is a weighted sum of 4 x levels x points tokens: one gather.

On a GPU, the gradient of a gather adds in no fixed order, so that runs of the same seed differ by
rounding; `XLA_FLAGS=--xla_gpu_deterministic_ops=true` makes them equal, at a cost in time.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.layers import SUM_OF_PRODUCTS, Linear
from rope_jax.models.registry import check_divisible
from rope_jax.positions.grids import Grid


def find_corners(
    locations: Float[Array, "B Q N levels P 2"],
    weights: Float[Array, "B Q N levels P"],
    sizes: Sequence[Grid],
) -> tuple[Int[Array, "B Q N K"], Float[Array, "B Q N K"]]:
    """Finds the tokens to read, K = 4 x levels x P of them, and their weights.

    Args:
        locations: x and y; 0 to 1 from the left or upper border of a map to the other one. Values
            outside of the map are 0.
        weights: of the points.
        sizes: (rows, columns) of each map.

    Returns:
        Indices into the tokens of all maps, one map after the other in reading order, and weights.
    """
    grids = np.array(sizes)
    starts = np.cumsum([0, *grids.prod(axis=1)[:-1]])
    # Per level, between the axes of heads and points.
    rows, columns, starts = (x[:, None].astype(np.int32) for x in (*grids.T, starts))
    x = locations[..., 0] * columns - 0.5
    y = locations[..., 1] * rows - 0.5
    left, top = jnp.floor(x), jnp.floor(y)
    indices, corner_weights = [], []
    for down in (0, 1):
        for right in (0, 1):
            column = left.astype(jnp.int32) + right
            row = top.astype(jnp.int32) + down
            inside = (column >= 0) & (column < columns) & (row >= 0) & (row < rows)
            fraction = jnp.abs(1 - right - (x - left)) * jnp.abs(1 - down - (y - top))
            corner_weights.append(jnp.where(inside, fraction * weights, 0))
            row, column = jnp.clip(row, 0, rows - 1), jnp.clip(column, 0, columns - 1)
            indices.append(starts + row * columns + column)
    flat = (*locations.shape[:3], -1)
    return jnp.stack(indices, -1).reshape(flat), jnp.stack(corner_weights, -1).reshape(flat)


@jax.checkpoint
def gather_sum(
    values: Float[Array, "B S N D"],
    indices: Int[Array, "B Q N K"],
    weights: Float[Array, "B Q N K"],
) -> Float[Array, "B Q N D"]:
    """Sums of K weighted values for every query and head, in float32 or wider.

    The gathered values, K times as large as the result, are neither kept for the backward pass nor,
    on a GPU, written at all: XLA fuses gather and sum.
    """
    read = jax.vmap(  # over the batch and over heads
        jax.vmap(lambda rows, at: rows.at[at].get(mode="promise_in_bounds"), 1, 1), 0, 0
    )
    wide = jnp.promote_types(values.dtype, jnp.float32)
    gathered = read(values, indices).astype(wide)
    with jax.named_scope(SUM_OF_PRODUCTS):
        products = gathered * weights[..., None].astype(wide)
    return products.sum(axis=-2).astype(values.dtype)


def _directions(heads: int, levels: int, points: int) -> np.ndarray:
    """First offsets: heads point in different directions, point p to a distance of p + 1."""
    angles = np.arange(heads) * 2 * math.pi / heads
    units = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    units /= np.abs(units).max(axis=-1, keepdims=True)
    distances = np.arange(1, points + 1)[:, None]
    offsets = np.broadcast_to(units[:, None, None] * distances, (heads, levels, points, 2))
    return offsets.reshape(-1)


class DeformableAttention(nnx.Module):
    """Attention of queries to points of several maps around their references.

    Attributes:
        offset: from a query to the points' offsets; weight: to their weights.
        value, out: projections of the maps' tokens and of the result.
    """

    def __init__(
        self,
        width: int,
        *,
        levels: int,
        heads: int,
        points: int,
        ratio: float = 1.0,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.shape = (heads, levels, points)
        inner, count = int(width * ratio), heads * levels * points
        check_divisible("deformable attention", inner, {"heads": heads})
        glorot = jax.nn.initializers.glorot_uniform()
        zeros = jax.nn.initializers.zeros
        settings = {"rngs": rngs, **dtypes}
        self.offset = Linear(width, 2 * count, kernel_init=zeros, **settings)
        first = jnp.asarray(_directions(heads, levels, points), dtypes["param_dtype"])
        self.offset.bias.set_value(first)
        self.weight = Linear(width, count, kernel_init=zeros, **settings)
        self.value = Linear(width, inner, kernel_init=glorot, **settings)
        self.out = Linear(inner, width, kernel_init=glorot, **settings)

    def __call__(
        self,
        query: Float[Array, "B Q C"],
        references: Float[Array, "... Q levels xy"],
        tokens: Float[Array, "B S C"],
        sizes: Sequence[Grid],
        padding: Bool[Array, "B S"] | None = None,
    ) -> Float[Array, "B Q C"]:
        """Returns the output of every query.

        Args:
            query: with its position, if it has one.
            references: [B or 1, Q, levels, 2], points (x, y) from 0 to 1; or [..., 4], boxes
                (x, y, width, height) around centres (x, y), which scale the offsets.
            tokens: of all maps, one map after the other in reading order.
            sizes: (rows, columns) of each map.
            padding: True for tokens that count as 0.
        """
        batch, queries, _ = query.shape
        heads, _, points = self.shape
        values = self.value(tokens)
        if padding is not None:
            values = jnp.where(padding[..., None], 0, values)
        values = values.reshape(batch, -1, heads, values.shape[-1] // heads)
        # Locations are as precise as coordinates elsewhere: float32 or wider.
        wide = jnp.promote_types(query.dtype, jnp.float32)
        offsets = self.offset(query).astype(wide).reshape(batch, queries, *self.shape, 2)
        weights = self.weight(query).astype(wide).reshape(batch, queries, heads, -1)
        weights = jax.nn.softmax(weights).reshape(batch, queries, *self.shape)
        centres = references.astype(wide)[..., None, :, None, :]  # heads, levels, points
        if references.shape[-1] == 2:
            scale = 1 / np.array(sizes, wide)[:, None, ::-1]
        else:
            scale = centres[..., 2:] / (2 * points)
        locations = centres[..., :2] + offsets * scale
        out = gather_sum(values, *find_corners(locations, weights, sizes))
        return self.out(out.reshape(batch, queries, -1))
