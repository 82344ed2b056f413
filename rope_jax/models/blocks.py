"""Transformer blocks, and running a stage of them: one by one, or in a scan over layers."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import CosineAttention, SelfAttention
from rope_jax.models.layers import FEED_FORWARD, PRODUCT, dropout, layer_norm, layer_scale
from rope_jax.positions import Position, Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Pattern


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch with an optional LayerScale.

    With `post_norm`, x + norm(attention(x)), then x + norm(mlp(x)), by norms that start at 0
    (res-post-norm of Swin V2, arXiv 2111.09883).
    """

    def __init__(self, options: Any, *, rngs: nnx.Rngs, dtypes: dict):
        width, hidden = options.width, int(options.width * options.mlp_ratio)
        self.norm1 = layer_norm(width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.norm2 = layer_norm(width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.post_norm = options.post_norm
        for norm in (self.norm1, self.norm2) if options.post_norm else ():
            norm.scale.set_value(jnp.zeros_like(norm.scale[...]))
        attention = CosineAttention if options.cosine else SelfAttention
        self.attn = attention(
            width,
            options.heads,
            qkv_bias=options.qkv_bias,
            k_bias=options.k_bias,
            rngs=rngs,
            dtypes=dtypes,
        )
        feed_forward = FEED_FORWARD[options.feed_forward]
        self.mlp = feed_forward(width, hidden, rngs=rngs, dtypes=dtypes)
        self.scale1 = layer_scale(width, options.layer_scale, dtypes["param_dtype"])
        self.scale2 = layer_scale(width, options.layer_scale, dtypes["param_dtype"])

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: Grid,
        pattern: Pattern,
        terms: Terms,
        drop: float | Array,
        key: Array | None,
    ) -> Float[Array, "B L C"]:
        """Returns the tokens after this block.

        Args:
            x: tokens in reading order, prefix tokens first, L = P + H*W.
            grid: (H, W).
            pattern: attention pattern.
            terms: position terms of this layer, see `Terms.layer`.
            drop: probability of dropping either branch.
            key: for drop path; None (evaluation) drops nothing.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        attend = functools.partial(self.attn, grid=grid, pattern=pattern, terms=terms)
        x = x + drop_path(self._branch(attend, x, self.norm1, self.scale1), drop, keys[0])
        return x + drop_path(self._branch(self.mlp, x, self.norm2, self.scale2), drop, keys[1])

    def _branch(
        self, run: Callable, x: Array, norm: nnx.Module, scale: nnx.Module | None
    ) -> Float[Array, "B L C"]:
        if not self.post_norm:
            return run(x, norm=norm, layer_scale=scale)
        branch = norm(run(x))
        return branch if scale is None else scale(branch)


def drop_path(
    branch: Float[Array, "B ..."], rate: float | Array, key: Array | None
) -> Float[Array, "B ..."]:
    """Drops a residual branch for whole examples and scales the others up (arXiv 1603.09382).

    Args:
        branch: output of the branch.
        rate: probability of dropping it.
        key: None drops nothing.
    """
    return dropout(branch, rate, key, shared=tuple(range(1, branch.ndim)))


def drop_path_rates(rate: float, depth: int, schedule: str = "linear") -> tuple[float, ...]:
    """Drop-path rate of each block: "linear" from 0 to `rate`, or "constant"."""
    if schedule == "constant":
        return (rate,) * depth
    return tuple(np.linspace(0, rate, depth).tolist())


def declare(module: nnx.Module, **metadata: Any) -> nnx.Module:
    """Sets metadata of all variables of a module, which it returns; see `models.backbone`.

    >>> stem = declare(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), depth=0)
    >>> stem.kernel.get_metadata("depth")
    0
    """
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable.set_metadata(**metadata)
    return module


def declare_tables(position: Position, first: int, *, shared: int) -> Position:
    """Declares the depth of a scheme's parameters, and returns the scheme.

    Args:
        position: positional scheme of a stage.
        first: depth of the stage's first block; tables of layers have that of their layers.
        shared: depth of parameters that all layers share.
    """
    for _, table in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        declared = table.get_metadata()
        per_layer = declared["layers"] or "layer" in declared
        table.set_metadata(depth=first + declared.get("layer", 0) if per_layer else shared)
    return position


def make_blocks(
    make: Callable[[], nnx.Module], depth: int, *, scan: bool, first: int = 1
) -> nnx.List | nnx.Module:
    """Creates `depth` blocks, with the same initial weights either way.

    >>> rngs = nnx.Rngs(0)
    >>> blocks = make_blocks(lambda: nnx.Linear(2, 2, rngs=rngs), depth=3, scan=False)
    >>> [block.kernel.get_metadata("depth") for block in blocks]
    [1, 2, 3]

    Args:
        make: creates one block.
        depth: number of blocks.
        scan: return one block whose parameters have the layer as their first axis, for a scan.
        first: depth of the first block, counted through all stages from 1.
    """
    blocks = [make() for _ in range(depth)]
    if scan:
        return declare(stack_blocks(blocks), depth=first)
    return nnx.List(declare(block, depth=number) for number, block in enumerate(blocks, first))


def stack_blocks(blocks: Sequence[nnx.Module]) -> nnx.Module:
    """One block with the stacked parameters of all blocks, marked with `layers=True`."""
    graph, _ = nnx.split(blocks[0])
    states = [nnx.state(block) for block in blocks]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return declare(nnx.merge(graph, stacked), layers=True)


def list_blocks(blocks: nnx.List | nnx.Module, depth: int) -> nnx.List:
    """The blocks of `make_blocks` as a list, stacked or not."""
    if isinstance(blocks, nnx.List):
        return blocks
    graph, state = nnx.split(blocks)
    layers = [jax.tree.map(operator.itemgetter(layer), state) for layer in range(depth)]
    return nnx.List([nnx.merge(graph, layer) for layer in layers])


RunBlocks = Callable[[Float[Array, "B L C"], range], Float[Array, "B L C"]]
"""Runs the blocks of these numbers, which follow each other, on tokens."""
REMAT = ("blocks", "dots")
"""What the backward pass recomputes: see `BlockOptions`."""


def rematerialize(run_block: Callable, remat: str | None, static: int) -> Callable:
    """Lets the backward pass recompute a block; `static` is the index of its static argument."""
    if remat is None:
        return run_block
    # jax's own policies do not see the products, which are inside functions with a custom gradient.
    policy = jax.checkpoint_policies.save_only_these_names(PRODUCT) if remat == "dots" else None
    return jax.checkpoint(run_block, policy=policy, static_argnums=static)


def prepare_blocks(
    part: nnx.Module,
    grid: Grid,
    patterns: Sequence[Pattern],
    *,
    position_key: Array | None,
    key: Array | None,
    extras: Sequence[tuple] | None = None,
) -> RunBlocks:
    """Computes the common inputs of a part's blocks, and returns a function that runs some of them.

    Args:
        part: of a backbone, with `blocks` from `make_blocks`, which are called as `Block` is, their
            `position`, `rates`, the drop-path rate of each, and `remat`.
        grid: (H, W).
        patterns: attention pattern of each layer.
        position_key: for schemes that augment coordinates in training, or None.
        key: for drop path, or None.
        extras: additional arguments of each block; only for blocks in a list.
    """
    blocks, position, rates = part.blocks, part.position, part.rates
    # Windows that differ in their shift, and neighbourhoods in their dilation, have the same terms.
    kinds = {type(pattern): pattern for pattern in patterns}
    terms = {
        kind: position.with_pattern(pattern).terms(grid, position_key)
        for kind, pattern in kinds.items()
    }
    keys = None if key is None else jax.random.split(key, len(rates))
    if not isinstance(blocks, nnx.List):
        return _prepare_scan(part, grid, patterns, terms, keys)

    def run_layer(x: Array, layer: int) -> Array:
        layer_terms = terms[type(patterns[layer])].layer(layer)
        layer_key = None if keys is None else keys[layer]
        extra = () if extras is None else extras[layer]
        return blocks[layer](x, grid, patterns[layer], layer_terms, rates[layer], layer_key, *extra)

    run_layer = rematerialize(run_layer, part.remat, static=1)

    def run(x: Array, layers: range) -> Array:
        for layer in layers:
            x = position.mix(run_layer(x, layer), grid, layer)
        return x

    return run


def run_blocks(
    run: RunBlocks, x: Float[Array, "B L C"], numbers: Sequence[int]
) -> Iterator[Float[Array, "B L C"]]:
    """Yields the tokens after the blocks of these ascending numbers."""
    first = 0
    for last in numbers:
        x = run(x, range(first, last + 1))
        first = last + 1
        yield x


def _prepare_scan(
    part: nnx.Module,
    grid: Grid,
    patterns: Sequence[Pattern],
    terms: Mapping[type, Terms],
    keys: Array | None,
) -> RunBlocks:
    """`prepare_blocks` of stacked blocks; the scan is split wherever the scheme mixes tokens."""
    graph, state = nnx.split(part.blocks)
    position, depth = part.position, len(part.rates)
    per_layer = [kind_terms.per_layer() for kind_terms in terms.values()]
    inputs = (state, per_layer, jnp.asarray(part.rates, jnp.float32), keys)

    def run_layer(x: Array, inputs: Any, pattern: Pattern) -> Array:
        state, values, rate, key = inputs
        slices = dict(zip(terms, values, strict=True))[type(pattern)]
        layer_terms = terms[type(pattern)].with_layer(slices)
        return nnx.merge(graph, state)(x, grid, pattern, layer_terms, rate, key)

    run_layer = rematerialize(run_layer, part.remat, static=2)

    def run(x: Array, layers: range) -> Array:
        first = layers[0]
        for end in sorted({*position.mix_after(depth), layers[-1]} & {*layers}):
            span = slice(first, end + 1)
            x = _scan_layers(
                run_layer, x, jax.tree.map(operator.itemgetter(span), inputs), patterns[span]
            )
            x = position.mix(x, grid, end)
            first = end + 1
        return x

    return run


def _scan_layers(
    run_layer: Callable, x: Array, inputs: Any, patterns: Sequence[Pattern]
) -> Float[Array, "B L C"]:
    """Scans over layers, in rounds of the shortest sequence of patterns that repeats.

    For example, rounds of two layers if every second window is shifted.
    """
    count = len(patterns)
    period = next(
        n for n in range(1, count + 1) if all(patterns[i] == patterns[i % n] for i in range(count))
    )
    rounds = count // period if count > period else 0
    scanned = rounds * period

    def run(x: Array, inputs: Any, layers: range) -> Array:
        for layer in layers:
            layer_inputs = jax.tree.map(operator.itemgetter(layer), inputs)
            x = run_layer(x, layer_inputs, patterns[layer])
        return x

    def run_round(x: Array, inputs: Any) -> tuple[Array, None]:
        return run(x, inputs, range(period)), None

    def group(leaf: Array) -> Array:
        return leaf[:scanned].reshape(rounds, period, *leaf.shape[1:])

    if rounds:
        x, _ = jax.lax.scan(run_round, x, jax.tree.map(group, inputs))
    return run(x, inputs, range(scanned, count))
