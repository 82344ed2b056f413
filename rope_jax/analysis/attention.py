"""What attention looks at: how far, how evenly and where, in every layer of a backbone.

Attention is linear in its values, so values that are unit vectors give its weights back, head_dim keys at a time. Weights are read that way
through `Terms.transform`, where a scheme may stand between the projections and attention: the same for every pattern and scheme, with the
bias, rotation and scale of the layer, and no model knows of it. Never more of the weights is in memory than one layer's queries by
head_dim keys.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.cat import CAT
from rope_jax.positions import Position, Terms
from rope_jax.positions.grids import Grid, absolute


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's attention as it is running.

    Attributes:
        attend: values like the layer's own [B, P + H*W, N, D] or [B, h, w, N, D] -> what attention makes of them.
        shape: of its queries; a map may have been padded to h rows and w columns.
        grid: (H, W) of the map, without padding.
        prefix: P, tokens before the map.
        dtype: of its queries.
    """

    attend: Callable[[Array], Array]
    shape: tuple[int, ...]
    grid: Grid
    prefix: int
    dtype: Any

    def weights(self, first: Array | int) -> Float[Array, "B L N D"]:
        """Weights of all L = P + H*W queries for the D keys from number `first` of the map on; keys that do not exist have weight 0."""
        batch, *places, heads, head_dim = self.shape
        height, width = self.grid
        padded_width = places[1] if len(places) == 2 else width
        key = first + jnp.arange(head_dim)
        unit = jnp.arange(int(np.prod(places)))[:, None] == self.prefix + key // width * padded_width + key % width
        unit &= key < height * width
        values = jnp.broadcast_to(unit.astype(self.dtype).reshape(1, *places, 1, head_dim), self.shape)
        out = self.attend(values).reshape(self.shape)
        out = out[:, :height, :width] if len(places) == 2 else out
        return out.reshape(batch, -1, heads, head_dim).astype(jnp.promote_types(self.dtype, jnp.float32))

    def firsts(self) -> np.ndarray:
        """For `weights`: numbers that cover the whole map."""
        return np.arange(0, self.grid[0] * self.grid[1], self.shape[-1])


@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """Means over queries and images; an array [N] for each layer, in the order in which they run.

    Attributes:
        distance: between a query and what it attends to, in tokens of the layer's map.
        entropy: of its weights, in nats; at most the logarithm of the number of tokens.
        grids: (H, W) of each layer's map.
        images: how many there were.
    """

    distance: list[np.ndarray]
    entropy: list[np.ndarray]
    grids: list[Grid]
    images: int


def row_statistics(layer: Layer) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Sums over images of the mean distance and the mean entropy of the queries of the map, see `attention_statistics`."""
    places = jnp.asarray(absolute(layer.grid).reshape(-1, 2), jnp.float32)
    area, head_dim = len(places), layer.shape[-1]
    padded = jnp.pad(places, ((0, -area % head_dim), (0, 0)))

    def add(sums: Array, first: Array) -> tuple[Array, None]:
        # Without the small number a query that looks at the prefix alone would have no distance and no entropy.
        exists = first + jnp.arange(head_dim) < area
        weights = layer.weights(first)[:, layer.prefix :] + 1e-32 * exists  # [B, H*W, N, D]
        keys = jax.lax.dynamic_slice_in_dim(padded, first, head_dim)
        distances = jnp.linalg.norm(places[:, None] - keys, axis=-1)[:, None]
        parts = (weights, weights * distances, jax.scipy.special.xlogy(weights, weights))
        return sums + jnp.stack([part.sum(-1) for part in parts]), None

    start = jnp.zeros((3, layer.shape[0], area, layer.shape[-2]))
    (total, distance, plogp), _ = jax.lax.scan(add, start, jnp.asarray(layer.firsts()))
    # Rows sum to `total` where the prefix or padding takes its share; they are scaled to 1 as if it were not there.
    return (distance / total).mean(1).sum(0), (jnp.log(total) - plogp / total).mean(1).sum(0)


def attention_statistics(
    model: nnx.Module, batches: Iterable[Array], *, progress: Callable[[int], None] | None = None
) -> AttentionStatistics:
    """How far and how evenly each head of each layer attends (Heo et al., arXiv 2403.13298, figures 2 and 3).

    Of each query of the map, weights on prefix tokens and on padding are dropped and the others scaled to sum 1. Its distance is the mean
    Euclidean distance to the keys, its entropy -sum a ln a; then the mean over queries and images.

    Args:
        model: from `create_model`, of any family but CAT.
        batches: normalised images [B, h, w, 3], one batch after the other: nothing is kept of them.
        progress: called with the number of images so far.

    Raises:
        ValueError: there are no images, or the model's attention has no weights that sum to 1 (CAT).
    """
    watch = _Watch(model, row_statistics)
    sums, images = None, 0
    for batch in batches:
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), watch(batch))
        sums = found if sums is None else jax.tree.map(operator.add, sums, found)
        images += len(batch)
        if progress is not None:
            progress(images)
    if sums is None:
        raise ValueError("there are no images to look at: give at least one batch")
    distance, entropy = ([layer[i] / images for layer in sums] for i in range(2))
    return AttentionStatistics(distance, entropy, watch.grids, images)


def attention_maps(
    model: nnx.Module, images: Float[Array, "B h w 3"], *, query: tuple[float, float] | None = None
) -> list[Float[np.ndarray, "B N H W"]]:
    """Where a token looks in each layer: weights on the tokens of the map.

    Args:
        model: as for `attention_statistics`.
        images: normalised.
        query: (y, x) of the place that looks, as fractions of height and width in [0, 1]; None for the class token, or for the middle
            where there is none.
    """
    if query is not None and not all(0 <= place <= 1 for place in query):
        raise ValueError(f"query={query} must be two numbers (y, x) from 0 to 1: fractions of the image's height and width")

    def look(layer: Layer) -> Array:
        height, width = layer.grid
        y, x = (min(int(place * n), n - 1) for place, n in zip(query or (0.5, 0.5), layer.grid, strict=True))
        row = 0 if query is None and layer.prefix else layer.prefix + y * width + x
        weights = jax.lax.map(lambda first: layer.weights(first)[:, row], jnp.asarray(layer.firsts()))  # [chunks, B, N, D]
        return jnp.moveaxis(weights, 0, 2).reshape(*weights.shape[1:3], -1)[..., : height * width].reshape(*weights.shape[1:3], *layer.grid)

    return [np.asarray(layer) for layer in _Watch(model, look)(jnp.asarray(images))]


class _Watch:
    """A model that says of each batch of images what `read` finds in each of its layers of attention; compiled."""

    def __init__(self, model: nnx.Module, read: Callable[[Layer], Any]):
        if isinstance(model, CAT):
            raise ValueError("CAT attends along rows without a softmax, so that its weights are no shares: use a model of another family")
        self.grids: list[Grid] = []
        graph, state = nnx.split(model)

        def run(state: Any, images: Array) -> list[Any]:
            seen, self.grids = [], []

            def note(layer: Layer) -> None:
                seen.append(read(layer))
                self.grids.append(layer.grid)

            watched = nnx.merge(graph, state)
            for part in (watched, *getattr(watched, "stages", ())):
                if hasattr(part, "blocks"):
                    part.position, part.blocks = _Watched(part.position, note), _listed(part.blocks, part.position.stage.depth)
            watched(images)
            return seen

        self._run = functools.partial(jax.jit(run), state)

    def __call__(self, images: Array) -> list[Any]:
        return self._run(jnp.asarray(images))


def _listed(blocks: nnx.List | nnx.Module, depth: int) -> nnx.List:
    """Blocks as a list, where they are stacked for a scan: what is read in a scan could not leave it."""
    if isinstance(blocks, nnx.List):
        return blocks
    graph, state = nnx.split(blocks)
    return nnx.List([nnx.merge(graph, jax.tree.map(operator.itemgetter(layer), state)) for layer in range(depth)])


class _Watched(Position):
    """A scheme that does what another one does, and notes each layer's attention on its way."""

    def __init__(self, inner: Position, note: Callable[[Layer], None]):
        self.stage, self.inner, self.note, self.augments = inner.stage, inner, note, inner.augments

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        return self.inner.embed(tokens, grid, key)

    def mix_after(self, depth: int) -> tuple[int, ...]:
        return self.inner.mix_after(depth)

    def mix(self, tokens: Array, grid: Grid, layer: int) -> Array:
        return self.inner.mix(tokens, grid, layer)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        terms = self.inner.terms(grid, key)
        return dataclasses.replace(terms, transform=_Noting(terms.transform, self.note, self.stage.prefix, grid))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=["note", "prefix", "grid"])
@dataclasses.dataclass(frozen=True)
class _Noting:
    """A `Terms.transform` around another one, whose arrays may differ from layer to layer, or around none."""

    inner: Callable | None
    note: Callable[[Layer], None]
    prefix: int
    grid: Grid

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable[..., Array]) -> Array:
        inner = self.inner or (lambda q, k, v, attend: attend(q, k, v))
        none = jnp.zeros_like(v)

        def of_values(values: Array) -> Array:
            # A scheme's transform may do more with values than attend (a convolution of its own), and take the images one by one: it
            # gets no values, attention gets ours, and what comes out without any is taken away.
            out = inner(q, k, none, lambda q, k, v, *bias: attend(q, k, values[: len(v)], *bias))
            return out if self.inner is None else out - inner(q, k, none, attend)

        self.note(Layer(of_values, q.shape, self.grid, self.prefix, q.dtype))
        return inner(q, k, v, attend)
