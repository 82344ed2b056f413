"""The names of parameters in this package: those of `save_pretrained` and of runs.

A parameter is named by its path, "blocks.0.attn.qkv.kernel". Stacked blocks have the names of
blocks in a list.
"""

import dataclasses

import jax
from flax import nnx

from rope_jax.positions.absolute import Learned
from rope_jax.positions.grids import Grid
from rope_jax.weights.layouts import SAME, TOKENS, Rule, Slot, find_rotary, square
from rope_jax.weights.tables import Table

OWN = "rope_jax"
"""The source of such weights."""


def own(model: nnx.Module) -> Table:
    """The names of this package, for a model that pairs channels like the model of the weights."""
    rotaries = [find_rotary(part.position) for part in model.parts().values()]
    pairing = next((rotary.pairing for rotary in rotaries if rotary is not None), None)
    return Table(None, pairing, preprocessing=None)


def parameter_name(slot: Slot) -> str:
    """The path of a parameter; for a layer of stacked blocks, that of a block in a list."""
    steps = [*map(str, slot.path)]
    if slot.layer is not None:
        steps.insert(steps.index("blocks") + 1, str(slot.layer))
    return ".".join(steps)


def parameter_rule(slot: Slot) -> Rule:
    """The layout of a parameter here; those of positional schemes may be for another map."""
    if slot.scheme is None:
        return SAME
    return ROWS if isinstance(slot.scheme, Learned) else MAP


def _is_unchanged(shape: tuple[int, ...], slot: Slot) -> bool:
    return shape == slot.shape and slot.grid in (None, slot.scheme.stage.grid)


def _grid_of_rows(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    return slot.model_grid if _is_unchanged(shape, slot) else TOKENS.grid((1, *shape), slot)


def _grid_of_map(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if _is_unchanged(shape, slot):
        return slot.model_grid
    stage = slot.scheme.stage
    grid = slot.grid or square(shape[0] - stage.embed_prefix if shape else 0) or stage.grid
    resize = dataclasses.replace(slot, grid=grid).resize
    try:
        resized = jax.eval_shape(resize, jax.ShapeDtypeStruct(shape, stage.dtype))
    except (TypeError, ValueError):  # of reshaping a table that is not of this map
        return None
    return grid if resized.shape == slot.shape else None


ROWS = Rule(lambda x, slot: TOKENS.read(x[None], slot), SAME.write, _grid_of_rows)
"""An absolute embedding, [T, C], in which a class token that the model lacks may have an entry."""
MAP = dataclasses.replace(SAME, grid=_grid_of_map)
"""Any other parameter of a scheme, which resizes it by the scheme's rule."""
