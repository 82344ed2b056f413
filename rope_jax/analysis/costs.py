"""What position costs a model: parameters, and operations for one image beside the model's multiply-adds."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array

from rope_jax.models.cost import attended_pairs, cost
from rope_jax.models.pretrained.rows import has_stages
from rope_jax.models.registry import create_model, image_pair
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import Sum
from rope_jax_kernels.attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class SchemeCost:
    """One scheme in one model.

    Attributes:
        position: as written for `create_model`.
        parameters: trainable numbers of the scheme.
        total: of the whole model.
        multiply_adds: of the whole model without its position, see `rope_jax.models.cost`.
        operations: additions and multiplications of the scheme on tokens and logits: 6 for each pair of channels that turns (queries and
            keys; sines and cosines not counted), 1 for each logit or channel to which something is added. None for schemes that transform
            attention or mix tokens: these are programs of their own.
    """

    position: str
    parameters: int
    total: int
    multiply_adds: int
    operations: int | None


def scheme_costs(name: str, positions: Sequence[str], image_size: int | Grid, **overrides: object) -> list[SchemeCost]:
    """Counts each scheme in a model, without making its weights; arguments as in `create_model`.

    Raises:
        ValueError: a model or scheme that does not exist, or does not go together.
    """
    found = []
    for position in positions:
        model = nnx.eval_shape(lambda position=position: create_model(name, position=position, image_size=image_size, **overrides))
        rows = cost(model, image_size)
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        own = sum(math.prod(param.shape) for path, param in params if "position" in path)
        total = sum(row.parameters for row in rows)
        found.append(SchemeCost(position, own, total, sum(row.multiply_adds for row in rows), _operations(model, image_pair(image_size))))
    return found


def _operations(model: nnx.Module, image_size: Grid) -> int | None:
    grids = model.grids(image_size)
    if not has_stages(model):
        return _of_stage(model.position, grids[0], [model.pattern] * model.options.depth)
    places = enumerate(zip(model.stages, grids, strict=True))
    stages = [_of_stage(stage.position, grid, model.patterns(index, grid)) for index, (stage, grid) in places]
    return None if None in stages else sum(stages)


def _of_stage(position: Position, grid: Grid, patterns: Sequence[Pattern]) -> int | None:
    """Operations of a scheme in the layers of a stage."""
    parts = position.parts if isinstance(position, Sum) else [position]
    if any(part.acts in ("between", "transform") for part in parts):
        return None
    graph, state = nnx.split(position)

    def what(state: nnx.State) -> dict[str, list[Array]]:
        terms = nnx.merge(graph, state).terms(grid)
        turns = None if terms.rotation is None else terms.rotation.freqs
        return {name: jax.tree.leaves(term) for name, term in (("turns", turns), ("bias", terms.bias), ("add", terms.add))}

    terms = jax.eval_shape(what, state)
    stage, area = position.stage, grid[0] * grid[1]
    tokens, depth = stage.prefix + area, len(patterns)
    embedded = sum((stage.embed_prefix + area) * stage.channels for part in parts if part.acts == "tokens")
    turned = sum(6 * 2 * freqs.shape[-1] * stage.heads * area * depth for freqs in terms["turns"])
    biased = sum(stage.heads * attended_pairs(pattern, grid, stage.prefix) for pattern in patterns) if terms["bias"] else 0
    added = tokens * stage.channels * depth if terms["add"] else 0
    return embedded + turned + biased + added
