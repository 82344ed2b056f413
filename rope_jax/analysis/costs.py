"""Parameters and operations that a positional scheme adds to a model."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jaxtyping import Array

from rope_jax.models.attention import attended_pairs
from rope_jax.models.cost import cost
from rope_jax.names.text import image_pair
from rope_jax.positions import Terms
from rope_jax.positions.grids import Grid
from rope_jax.weights.create import create_model


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
    costs = []
    for position in positions:
        create = functools.partial(
            create_model, name, position=position, image_size=image_size, **overrides
        )
        model = nnx.eval_shape(create)
        modules = cost(model, image_size)
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        costs.append(
            SchemeCost(
                position,
                parameters=sum(math.prod(x.shape) for path, x in params if "position" in path),
                total=sum(module.parameters for module in modules),
                multiply_adds=sum(module.multiply_adds for module in modules),
                operations=_operations(model, create, image_pair(image_size)),
            )
        )
    return costs


def _operations(
    model: nnx.Module, create: Callable[[], nnx.Module], image_size: Grid
) -> int | None:
    """Operations of a model's scheme in all layers; `model` has the shapes of `create()`."""
    stages = model.positions(image_size)
    acts = {part.acts for position, _ in stages for part in position.schemes()}
    if acts & {"between", "transform"}:
        return None
    shapes = jax.eval_shape(
        lambda: [_arrays(position.terms(grid)) for position, grid in create().positions(image_size)]
    )
    operations = 0
    for index, ((position, grid), (freqs, bias, add)) in enumerate(
        zip(stages, shapes, strict=True)
    ):
        stage, area, patterns = position.stage, grid[0] * grid[1], model.patterns(index, grid)
        embeddings = sum(part.acts == "tokens" for part in position.schemes())
        operations += embeddings * (stage.embed_prefix + area) * stage.channels
        if freqs:
            operations += 6 * 2 * freqs[0].shape[-1] * stage.heads * area * len(patterns)
        if bias:
            logits = sum(attended_pairs(pattern, grid, stage.prefix) for pattern in patterns)
            operations += logits * stage.heads
        if add:
            operations += (stage.prefix + area) * stage.channels * len(patterns)
    return operations


def _arrays(terms: Terms) -> tuple[list[Array], list[Array], list[Array]]:
    """The frequencies, the biases and what joins the tokens."""
    freqs = None if terms.rotation is None else terms.rotation.freqs
    return tuple(map(jax.tree.leaves, (freqs, terms.bias, terms.add)))
