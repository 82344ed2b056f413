"""Links between the tensors of a file and a model's parameters, from names and shapes alone."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.layers import STORED
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES
from rope_jax.weights.layouts import SAME, Rule, Slot, find_rotary
from rope_jax.weights.own import parameter_name, parameter_rule
from rope_jax.weights.tables import Table, begins, fill_name, match_name

HEADS = ("head.", "distillation_head.")
"""Starts of the names of the parameters of a classifier's heads, here."""
CLASSIFIER = (*HEADS, "class_token", "norm.")
"""Starts of the names of parameters that a classifier may have, and a dense backbone may lack."""

LARGEST = 2**28  # elements of a table to be resized


@dataclasses.dataclass(frozen=True)
class Link:
    """A parameter of the model and the tensor that fills it."""

    slot: Slot
    key: str
    rule: Rule


def link_parameters(
    model: nnx.Module, table: Table, source: str, fresh: tuple[str, ...] = ()
) -> tuple[list[Link], list[str]]:
    """Links each parameter to its tensor by name, and lists parameters without one.

    Parameters whose names start as in `fresh` are left out.
    """
    links, problems = [], []
    slots = [slot for slot in list_slots(model) if not begins(slot.name, fresh)]
    slots = [dataclasses.replace(slot, pairing=table.pairing) for slot in slots]
    if table.pairing is None and any(slot.rotary for slot in slots):
        problems.append(
            f"source {source!r} has no models whose position rotates: choose another position, or "
            "the source of one that does"
        )
    for slot in slots:
        part_links = find_links(table, slot)
        if not part_links and slot.scheme is not None:
            for i in range(slot.shape[0]):
                layer = dataclasses.replace(slot, name=f"{slot.name}.{i}", layer=i)
                part_links += find_links(table, layer)
        links += part_links
        if not part_links:
            problems.append(
                f"{slot.name} of the model has no name in source {source!r}: choose another source "
                "or position"
            )
    return links, problems


def find_links(table: Table, slot: Slot) -> list[Link]:
    """Finds the tensors of a parameter by a source's names: one, all of its parts, or none."""
    if table.rows is None:
        return [Link(slot, parameter_name(slot), parameter_rule(slot))]
    links = []
    for ours, theirs, rule in table.rows:
        if (numbers := match_name(ours, slot.name)) is not None:
            part_slot = dataclasses.replace(slot, part=rule.part)
            links.append(Link(part_slot, fill_name(theirs, numbers), rule))
            if rule.part is None or rule.part[0] + 1 == rule.part[1]:
                break
    return links


def list_slots(model: nnx.Module) -> Iterator[Slot]:
    """Lists the parameters of a model by name.

    Those of a positional scheme are named after the scheme, whatever its place in a sum. Stacked
    blocks have the layer in their names, like blocks in a list.
    """
    modules = nnx.iter_modules(model)
    schemes = {path: module for path, module in modules if isinstance(module, Position)}
    names = {scheme: name for name, scheme in SCHEMES.items()}
    rotaries = {prefix: find_rotary(part.position) for prefix, part in model.parts().items()}
    for path, variable in nnx.to_flat_state(nnx.state(model, STORED)):
        steps = [str(step) for step in path]
        owners = [n for n in range(len(path)) if path[:n] in schemes]
        prefix = max((p for p in rotaries if ".".join(steps).startswith(p)), key=len, default="")
        slot = Slot("", path, tuple(variable.shape), rotary=rotaries.get(prefix))
        if owners:
            scheme = schemes[path[: owners[-1]]]
            name = names.get(type(scheme), type(scheme).__name__)
            name = ".".join([*steps[: owners[0]], name, *steps[owners[-1] :]])
            yield dataclasses.replace(slot, name=name, scheme=scheme, place=path[owners[-1] :])
        else:
            stacks = "blocks" in steps and variable.get_metadata().get("layers")
            for layer in range(variable.shape[0]) if stacks else [None]:
                layer_slot = dataclasses.replace(slot, layer=layer)
                yield dataclasses.replace(layer_slot, name=parameter_name(layer_slot))


def missing_head(model: nnx.Module, head: Iterable[str], missing: Iterable[str]) -> str | None:
    """The problem of a classifier's weights that have no head at all; None for others.

    Args:
        model: to be filled.
        head: names in the file of the tensors of a head.
        missing: names of all tensors that the file lacks.
    """
    names = dict.fromkeys(head)
    if not names or not names.keys() <= {*missing} or hasattr(model, "backbone"):
        return None
    return (
        f"{', '.join(names)} are missing: these weights have no head. Create the model with "
        "num_classes=0 for the pooled features, or with num_classes=N, the number of your own "
        "classes, for a new head (in rope_jax.convert_state_dict, new_head=True)"
    )


def fit(link: Link, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Grid | None, str | None]:
    """Returns the grid of a table that must be resized, and the problem of an unfit tensor."""
    key, slot, rule = link.key, link.slot, link.rule
    if not jnp.issubdtype(dtype, jnp.floating):
        return None, not_floating(key, dtype)
    expected = rule.write(np.empty(slot.shape, np.bool_), slot).shape
    part_shape = rule.cut_shape(tuple(shape))
    fits = part_shape == expected
    grid = None
    if rule.grid and (fits or math.prod(shape) <= LARGEST):
        grid = rule.grid(part_shape, slot)
    if fits and (not rule.grid or grid == slot.model_grid):
        return None, None
    if fits and grid and not slot.grid:
        other, current = ("x".join(map(str, sides)) for sides in (grid, slot.model_grid))
        return None, (
            f"{key} may be of {other} or, as in this model, of {current} tokens: say which by "
            f"convert_state_dict(grids={{{key!r}: ...}})"
        )
    if grid:
        return grid, None
    hint = "" if rule.cut is None else " of it"
    if slot.grid:
        hint += f", or a table of {slot.grid[0]}x{slot.grid[1]} tokens: correct grids"
    by_class = len(shape) == len(expected) and (rule is not SAME or len(shape) == 1)
    if slot.name.startswith(HEADS) and by_class and shape[0] != expected[0]:
        hint = (
            f": create the model with num_classes={shape[0]}; for a new head, name num_classes in "
            "create_model, or pass new_head=True to load_pretrained"
        )
    return None, (
        f"{key} has shape {list(shape)}, but {slot.name} of the model takes {list(expected)}{hint}"
    )


def not_floating(key: str, dtype: np.dtype) -> str:
    """The problem of a tensor of another dtype."""
    return f"{key} has dtype {dtype}; weights are floating-point"
