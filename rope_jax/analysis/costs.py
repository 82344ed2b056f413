"""Parameters and operations that a positional scheme adds to a model."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array

from rope_jax.models.attention import attended_pairs
from rope_jax.models.cost import cost
from rope_jax.models.create import create_model
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.text import image_pair
from rope_jax_kernels import Pattern


@dataclasses.dataclass(frozen=True)
class SchemeCost:
    """Cost of a scheme in a model, per image.

    Attributes:
        position: the scheme, as written for `create_model`.
        parameters: number of trainable parameters of the scheme.
        total: number of trainable parameters of the whole model.
        multiply_adds: multiply-adds of the model without the scheme, see `rope_jax.models.cost`.
        operations: additions and multiplications of the scheme on tokens and logits: 6 per rotated
            pair of channels of queries and keys (not counting sines and cosines), and 1 per logit
            or channel to which something is added. None for schemes that wrap attention or mix
            tokens.
    """

    position: str
    parameters: int
    total: int
    multiply_adds: int
    operations: int | None


def scheme_costs(
    name: str, positions: Sequence[str], image_size: int | Grid, **overrides: object
) -> list[SchemeCost]:
    """Counts parameters and operations of schemes in a model, without creating weights.

    >>> (row,) = scheme_costs("vit_digits", ["ape"], 8)
    >>> row.parameters, row.operations  # 4 x 4 tokens of 96 channels
    (1536, 1536)

    Args:
        name: name of the model, as for `create_model`.
        positions: the schemes.
        image_size: pixels, int or (height, width).
        **overrides: further options of `create_model`.

    Raises:
        ValueError: if the model or a scheme does not exist, or they are not compatible.
    """
    return [_scheme_cost(name, position, image_size, overrides) for position in positions]


def _scheme_cost(
    name: str, position: str, image_size: int | Grid, overrides: dict[str, object]
) -> SchemeCost:
    def create() -> nnx.Module:
        return create_model(name, position=position, image_size=image_size, **overrides)

    model = nnx.eval_shape(create)
    modules = cost(model, image_size)
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return SchemeCost(
        position,
        parameters=sum(math.prod(param.shape) for path, param in params if "position" in path),
        total=sum(module.parameters for module in modules),
        multiply_adds=sum(module.multiply_adds for module in modules),
        operations=_operations(model, image_pair(image_size)),
    )


def _operations(model: nnx.Module, image_size: Grid) -> int | None:
    stages = [
        _stage_operations(position, grid, model.patterns(index, grid))
        for index, (position, grid) in enumerate(model.positions(image_size))
    ]
    return None if None in stages else sum(stages)


def _stage_operations(position: Position, grid: Grid, patterns: Sequence[Pattern]) -> int | None:
    """Operations of a scheme in all layers of one stage."""
    parts = position.schemes()
    if any(part.acts in ("between", "transform") for part in parts):
        return None
    graph, state = nnx.split(position)

    def arrays(state: nnx.State) -> tuple[list[Array], list[Array], list[Array]]:
        terms = nnx.merge(graph, state).terms(grid)
        freqs = None if terms.rotation is None else terms.rotation.freqs
        return tuple(map(jax.tree.leaves, (freqs, terms.bias, terms.add)))

    freqs, bias, add = jax.eval_shape(arrays, state)
    stage, area, depth = position.stage, grid[0] * grid[1], len(patterns)
    embeddings = sum(part.acts == "tokens" for part in parts)
    operations = embeddings * (stage.embed_prefix + area) * stage.channels
    if freqs:
        pairs = freqs[0].shape[-1]
        operations += 6 * 2 * pairs * stage.heads * area * depth
    if bias:
        logits = sum(attended_pairs(pattern, grid, stage.prefix) for pattern in patterns)
        operations += logits * stage.heads
    if add:
        operations += (stage.prefix + area) * stage.channels * depth
    return operations
