"""Transformer blocks, and how a stack of them runs: one after the other, or as one compiled block in a scan over the layers."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import SelfAttention
from rope_jax.models.layers import FEED_FORWARD, LayerScale, layer_norm
from rope_jax.positions import Position, Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels.attention.patterns import Pattern


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); either branch with a LayerScale where `options.layer_scale` is given."""

    def __init__(self, options: Any, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.width
        norm = functools.partial(layer_norm, width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        scale = lambda: None if options.layer_scale is None else LayerScale(width, options.layer_scale, dtypes["param_dtype"])
        self.norm1, self.norm2 = norm(), norm()
        self.attn = SelfAttention(width, options.heads, qkv_bias=options.qkv_bias, k_bias=options.k_bias, rngs=rngs, dtypes=dtypes)
        self.mlp = FEED_FORWARD[options.feed_forward](width, int(width * options.mlp_ratio), rngs=rngs, dtypes=dtypes)
        self.scale1, self.scale2 = scale(), scale()

    def __call__(
        self, x: Float[Array, "B L C"], grid: Grid, pattern: Pattern, terms: Terms, drop: float | Array, key: Array | None
    ) -> Float[Array, "B L C"]:
        """Returns the tokens [B, P + H*W, C] after this block.

        Args:
            x: tokens in reading order, prefix tokens first.
            grid: (H, W).
            pattern: what attends to what.
            terms: of this layer, see `Terms.layer`.
            drop: probability of dropping either branch.
            key: for that; None (evaluation) drops nothing.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        branch = self.attn(self.norm1(x), grid, pattern, terms)
        x = x + drop_path(branch if self.scale1 is None else self.scale1(branch), drop, keys[0])
        branch = self.mlp(self.norm2(x))
        return x + drop_path(branch if self.scale2 is None else self.scale2(branch), drop, keys[1])


def drop_path(branch: Float[Array, "B ..."], rate: float | Array, key: Array | None) -> Float[Array, "B ..."]:
    """Drops a residual branch for whole examples with probability `rate` and scales the others up (arXiv 1603.09382); no key, no drop."""
    if key is None or (not isinstance(rate, jax.Array) and rate == 0.0):
        return branch
    keep = 1 - jnp.asarray(rate, jnp.float32)
    kept = jax.random.bernoulli(key, keep, (branch.shape[0],) + (1,) * (branch.ndim - 1))
    # A product with a number for each example: to choose between arrays, the backward pass would keep a mask as large as they are.
    return branch * jnp.where(kept, 1 / keep, 0).astype(branch.dtype)


def drop_path_rates(rate: float, depth: int, schedule: str = "linear") -> tuple[float, ...]:
    """The rate of each of `depth` blocks: "linear" from 0 in the first to `rate` in the last, or "constant"."""
    return (rate,) * depth if schedule == "constant" else tuple(np.linspace(0, rate, depth).tolist())


def check_drop_path(rate: float) -> None:
    """Refuses an option `drop_path` that is no probability below 1."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"drop_path={rate} is not allowed; it must be at least 0 and below 1")


def training_keys(train: bool, key: Array | None, rate: float, count: int, *, augments: bool = False) -> Sequence[Array | None]:
    """`count` keys for a forward pass in training, or as many Nones.

    Raises:
        ValueError: there is no key, and drop path of `rate` needs one, or a position that augments its coordinates does.
    """
    if train and key is None and rate > 0:
        raise ValueError("train=True needs a key for drop path: pass key=jax.random.key(...), or create the model with drop_path=0")
    if train and key is None and augments:
        raise ValueError("train=True needs a key for the position, which draws its coordinates in training: pass key=jax.random.key(...)")
    return [None] * count if not train or key is None else list(jax.random.split(key, count))


def make_blocks(make: Callable[[], nnx.Module], depth: int, *, scan: bool) -> nnx.List | nnx.Module:
    """Makes `depth` equal blocks: a list or, to be scanned, one block whose parameters have the layer as their first axis.

    The numbers are the same ones either way.
    """
    blocks = [make() for _ in range(depth)]
    return stack_blocks(blocks) if scan else nnx.List(blocks)


def stack_blocks(blocks: Sequence[nnx.Module]) -> nnx.Module:
    """One block with the parameters of all; each says by `layers=True` that its first axis is the layer."""
    graph, _ = nnx.split(blocks[0])
    states = [nnx.state(block) for block in blocks]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for _, variable in nnx.to_flat_state(stacked):
        variable.set_metadata(layers=True)
    return nnx.merge(graph, stacked)


def run_blocks(
    blocks: nnx.List | nnx.Module,
    x: Float[Array, "B L C"],
    grid: Grid,
    patterns: Sequence[Pattern],
    position: Position,
    rates: Sequence[float],
    *,
    position_key: Array | None,
    key: Array | None,
) -> Float[Array, "B L C"]:
    """Sends tokens through all blocks of a stage, with what the stage's scheme has to say in each.

    Args:
        blocks: from `make_blocks`; they are called as `Block` is.
        x: [B, P + H*W, C], see `Block`.
        grid: (H, W).
        patterns: of each layer.
        position: the stage's scheme.
        rates: of drop path in each layer.
        position_key: for schemes that augment coordinates in training, or None.
        key: for drop path, or None.
    """
    terms = position.terms(grid, position_key)
    keys = None if key is None else jax.random.split(key, len(rates))
    if not isinstance(blocks, nnx.List):
        return _scanned(blocks, x, grid, patterns, position, terms, rates, keys)
    for layer, (block, pattern, rate) in enumerate(zip(blocks, patterns, rates, strict=True)):
        x = block(x, grid, pattern, terms.layer(layer), rate, None if keys is None else keys[layer])
        x = position.mix(x, grid, layer)
    return x


def _scanned(
    block: nnx.Module,
    x: Array,
    grid: Grid,
    patterns: Sequence[Pattern],
    position: Position,
    terms: Terms,
    rates: Sequence[float],
    keys: Array | None,
) -> Array:
    """`run_blocks` on one stacked block. The scan is interrupted after layers where the scheme mixes tokens."""
    graph, state = nnx.split(block)
    depth = len(rates)
    inputs = (state, terms.per_layer(), jnp.asarray(rates, jnp.float32), keys)

    def one(x: Array, inputs: Any, pattern: Pattern) -> Array:
        state, own, rate, key = inputs
        return nnx.merge(graph, state)(x, grid, pattern, terms.with_layer(own), rate, key)

    first = 0
    for last in sorted({*position.mix_after(depth), depth - 1}):
        layers = slice(first, last + 1)
        x = _scan_run(one, x, jax.tree.map(operator.itemgetter(layers), inputs), patterns[layers])
        x = position.mix(x, grid, last)
        first = last + 1
    return x


def _scan_run(one: Callable, x: Array, inputs: Any, patterns: Sequence[Pattern]) -> Array:
    """Scans over layers. A round is the shortest run of patterns that repeats: two layers where every second window is shifted."""
    count = len(patterns)
    period = next(n for n in range(1, count + 1) if all(patterns[i] == patterns[i % n] for i in range(count)))
    rounds = count // period if count > period else 0

    def run(x: Array, inputs: Any, layers: range) -> Array:
        for layer in layers:
            x = one(x, jax.tree.map(operator.itemgetter(layer), inputs), patterns[layer])
        return x

    scanned = rounds * period
    if rounds:
        grouped = jax.tree.map(lambda leaf: leaf[:scanned].reshape(rounds, period, *leaf.shape[1:]), inputs)
        x, _ = jax.lax.scan(lambda x, inputs: (run(x, inputs, range(period)), None), x, grouped)
    return run(x, inputs, range(scanned, count))
