"""Attention distance, entropy and maps of every layer of a backbone.

Kernels and models do not return attention weights. They are recovered through `Terms.transform`,
the hook by which a scheme wraps the attention of a layer: `attention_weights` calls the layer's own
attention, with its pattern, bias, rotation and scale, on one-hot values.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import list_blocks
from rope_jax.positions import Position, Terms
from rope_jax.positions.grids import Grid, absolute
from rope_jax.positions.scheme import Tokens


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention during a forward pass.

    Attributes:
        attend: linear function from values to attention output, both of `shape`.
        shape: (B, P + H*W, N, D), or (B, h, w, N, D) for a map that may be padded to h x w tokens.
        grid: (H, W) of the map, without padding.
        prefix: P, the number of tokens before the map.
        dtype: dtype of queries, keys and values.
    """

    attend: Callable[[Array], Array]
    shape: tuple[int, ...]
    grid: Grid
    prefix: int
    dtype: Any

    @property
    def chunks(self) -> np.ndarray:
        """Index of the first key of each chunk of D keys; together the chunks cover the map."""
        return np.arange(0, self.grid[0] * self.grid[1], self.shape[-1])


def attention_weights(layer: AttentionLayer, first: Array | int) -> Float[Array, "B L N D"]:
    """Attention weights of all queries for D keys of the map, where D is the head dimension.

    Attention is linear in its values: output = weights @ values. If the values of D keys are the D
    unit vectors and all others are zero, channel d of the output is the weight of the d-th of these
    keys. This works for every kernel, pattern and scheme, and holds only [L, D] weights per head in
    memory at a time.

    Args:
        layer: a layer's attention in a forward pass.
        first: index of the first key on the map, in row-major order.

    Returns:
        float32 or wider, L = P + H*W; weights of keys beyond the map are 0.
    """
    batch, *places, heads, head_dim = layer.shape
    height, width = layer.grid
    is_map = len(places) == 2
    keys = first + jnp.arange(head_dim)
    row_width = places[1] if is_map else width
    rows_of_keys = layer.prefix + keys // width * row_width + keys % width
    unit = jnp.arange(int(np.prod(places)))[:, None] == rows_of_keys
    unit = (unit & (keys < height * width)).astype(layer.dtype)
    values = jnp.broadcast_to(unit.reshape(1, *places, 1, head_dim), layer.shape)
    out = layer.attend(values).reshape(layer.shape)
    out = out[:, :height, :width] if is_map else out
    precise = jnp.promote_types(layer.dtype, jnp.float32)
    return out.reshape(batch, -1, heads, head_dim).astype(precise)


@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """Means over queries and images, as an array [N] per layer in forward order.

    Attributes:
        distance: mean distance from a query to the keys it attends to, in tokens of the layer's
            map.
        entropy: entropy of a query's weights, in nats; at most the logarithm of the number of
            tokens.
        grids: (H, W) of each layer's map, in tokens.
        images: number of images.
    """

    distance: list[np.ndarray]
    entropy: list[np.ndarray]
    grids: list[Grid]
    images: int


def attention_statistics(
    model: nnx.Module, batches: Iterable[Float[Array, "_ _ _ 3"]]
) -> AttentionStatistics:
    """Computes mean distance and entropy of attention (Heo et al., arXiv 2403.13298, fig. 2, 3).

    For each query of the map, weights on prefix tokens and padding are dropped and the others
    rescaled to sum to 1. The distance is the mean Euclidean distance to the keys under these
    weights, and the entropy is -sum a ln a. Both are averaged over queries and images.

    >>> import jax.numpy as jnp, rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=2)
    >>> statistics = attention_statistics(model, [jnp.zeros((1, 8, 8, 3))])
    >>> statistics.grids, statistics.entropy[0].shape
    ([(4, 4)], (2,))

    Args:
        model: a model from `create_model` with softmax attention (not CAT).
        batches: at least one batch of normalised images [B, h, w, 3], all of the same size.

    Raises:
        ValueError: if the model's attention has no softmax.
    """
    measure = _layer_function(model, row_statistics)
    results, images = [], 0
    for batch in batches:
        results.append(jax.tree.map(lambda x: np.asarray(x, np.float64), measure(batch)))
        images += len(batch)
    sums = jax.tree.map(lambda *parts: sum(parts), *results)
    distance, entropy = ([layer[i] / images for layer in sums] for i in range(2))
    grids = [
        grid
        for position, grid in model.positions(batch.shape[1:3])
        for _ in range(position.stage.depth)
    ]
    return AttentionStatistics(distance, entropy, grids, images)


def row_statistics(layer: AttentionLayer) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Mean distance and entropy over a layer's queries, summed over images."""
    places = jnp.asarray(absolute(layer.grid).reshape(-1, 2), jnp.float32)
    area, head_dim = len(places), layer.shape[-1]
    padded = jnp.pad(places, ((0, -area % head_dim), (0, 0)))

    def add(sums: Array, first: Array) -> tuple[Array, None]:
        # Avoids 0 / 0 for a query that attends only to the prefix: its attention counts as uniform.
        exists = first + jnp.arange(head_dim) < area
        weights = attention_weights(layer, first)[:, layer.prefix :] + 1e-32 * exists
        keys = jax.lax.dynamic_slice_in_dim(padded, first, head_dim)
        distances = jnp.linalg.norm(places[:, None] - keys, axis=-1)[:, None]
        parts = (weights, weights * distances, jax.scipy.special.xlogy(weights, weights))
        return sums + jnp.stack([part.sum(-1) for part in parts]), None

    start = jnp.zeros((3, layer.shape[0], area, layer.shape[-2]))
    (total, distance, plogp), _ = jax.lax.scan(add, start, jnp.asarray(layer.chunks))
    # With a = w / total: sum a d = sum w d / total, -sum a ln a = ln total - sum w ln w / total.
    return (distance / total).mean(1).sum(0), (jnp.log(total) - plogp / total).mean(1).sum(0)


def attention_maps(
    model: nnx.Module, images: Float[Array, "B h w 3"], *, query: tuple[float, float] | None = None
) -> list[Float[np.ndarray, "B N H W"]]:
    """Returns the attention weights of one query for the tokens of the map, for each layer.

    >>> import jax.numpy as jnp, rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=2)
    >>> [layer.shape for layer in attention_maps(model, jnp.zeros((1, 8, 12, 3)))]
    [(1, 2, 4, 6)]

    Args:
        model: as for `attention_statistics`.
        images: normalised images.
        query: (y, x) of the query as fractions of height and width in [0, 1]; None for the class
            token, or for the centre of the map in models without one.

    Raises:
        ValueError: if the model's attention has no softmax.
    """

    def read(layer: AttentionLayer) -> Array:
        height, width = layer.grid
        y, x = token_at(query or (0.5, 0.5), layer.grid)
        row = 0 if query is None and layer.prefix else layer.prefix + y * width + x
        weights = jax.lax.map(
            lambda first: attention_weights(layer, first)[:, row], jnp.asarray(layer.chunks)
        )  # [chunks, B, N, D]
        batch, heads = weights.shape[1:3]
        weights = jnp.moveaxis(weights, 0, 2).reshape(batch, heads, -1)[..., : height * width]
        return weights.reshape(batch, heads, height, width)

    return [np.asarray(layer) for layer in _layer_function(model, read)(images)]


def token_at(place: tuple[float, float], grid: Grid) -> tuple[int, int]:
    """The token at a place of the image, as (row, column).

    >>> token_at((0.5, 1.0), (4, 6))
    (2, 5)

    Args:
        place: (y, x) as fractions of height and width in [0, 1].
        grid: (H, W) of the map.
    """
    return tuple(min(int(f * n), n - 1) for f, n in zip(place, grid, strict=True))


def _layer_function(
    model: nnx.Module, read: Callable[[AttentionLayer], Any]
) -> Callable[[Array], list[Any]]:
    """Compiles a function of images [B, h, w, 3] that returns `read(layer)` of each layer."""
    if not getattr(model, "softmax", True):
        raise ValueError(
            f"the attention of {type(model).__name__} has no softmax, so it has no weights that "
            "sum to 1: use another family of models"
        )
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: Any, images: Array) -> list[Any]:
        probed, values = nnx.merge(graph, state), []

        def note(layer: AttentionLayer) -> None:
            values.append(read(layer))

        for stage in probed.parts().values():
            # Values cannot be collected from inside a scan or a recomputed block.
            stage.blocks = list_blocks(stage.blocks, stage.position.stage.depth)
            stage.remat = None
            stage.position = _Probed(stage.position, note)
        probed(images)
        return values

    return functools.partial(run, state)


class _Probed(Position):
    """A scheme whose terms have a probe around their transform."""

    def __init__(self, inner: Position, note: Callable[[AttentionLayer], None]):
        self.stage, self.inner, self.note = inner.stage, inner, note

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        return self.inner.embed(tokens, grid, key)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        terms = self.inner.terms(grid, key)
        transform = jax.tree_util.Partial(functools.partial(self.probe, grid), terms.transform)
        return dataclasses.replace(terms, transform=transform)

    def mix_after(self, depth: int) -> tuple[int, ...]:
        return self.inner.mix_after(depth)

    def mix(self, tokens: Tokens, grid: Grid, layer: int) -> Tokens:
        return self.inner.mix(tokens, grid, layer)

    def probe(
        self,
        grid: Grid,
        inner: Callable | None,
        q: Array,
        k: Array,
        v: Array,
        attend: Callable[..., Array],
    ) -> Array:
        """A `Terms.transform` that passes the layer's attention to `note`, then runs the scheme's.

        Args:
            grid: (H, W) of the map.
            inner: the scheme's transform, or None.
            q, k, v, attend: of `Terms.transform`.
        """
        transform = inner or (lambda q, k, v, attend: attend(q, k, v))
        zeros = jnp.zeros_like(v)

        def attend_to(values: Array) -> Array:
            # A scheme may also convolve the values, and may call attention once per image. So the
            # scheme receives zeros, attention receives `values`, and the output for zeros is
            # subtracted.
            def attend_with_values(q: Array, k: Array, v: Array, *bias: Array) -> Array:
                more = v.shape[-1] - values.shape[-1]  # channels that the scheme appended
                padded = jnp.pad(values[: len(v)], [*[(0, 0)] * (v.ndim - 1), (0, more)])
                return attend(q, k, padded, *bias)

            out = transform(q, k, zeros, attend_with_values)
            return out if inner is None else out - transform(q, k, zeros, attend)

        self.note(AttentionLayer(attend_to, q.shape, grid, self.stage.prefix, q.dtype))
        return transform(q, k, v, attend)
