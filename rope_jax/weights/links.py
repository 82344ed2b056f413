"""Which tensor of a file fills which parameter of a model, from names and shapes alone."""

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
from rope_jax.weights.layouts import SAME, Rule, Slot, rotary_of
from rope_jax.weights.own import own_name, own_rule
from rope_jax.weights.tables import Table, begins, fill_name, match_name

HEAD = "head."  # start of the names of a classifier's parameters, here
CLASSIFIER = (HEAD, "class_token", "norm.")
"""Starts of the names of what a classifier may have beyond a backbone of dense prediction."""

LARGEST = 2**28  # elements of a table to be resized


@dataclasses.dataclass(frozen=True)
class Link:
    """A parameter of the model and the tensor that fills it."""

    slot: Slot
    key: str
    rule: Rule


def links_of(
    model: nnx.Module, table: Table, source: str, fresh: tuple[str, ...] = ()
) -> tuple[list[Link], list[str]]:
    """The tensor of each parameter by name, and parameters without one.

    Those whose names start as in `fresh` are left out.
    """
    links, problems = [], []
    slots = [slot for slot in slots_of(model) if not begins(slot.name, fresh)]
    slots = [dataclasses.replace(slot, pairing=table.pairing) for slot in slots]
    if table.pairing is None and any(slot.rotary for slot in slots):
        problems.append(
            f"source {source!r} has no models whose position rotates: choose another position, or "
            "the source of one that does"
        )
    for slot in slots:
        found = named(table, slot)
        if not found and slot.scheme is not None:
            for i in range(slot.shape[0]):
                layer = dataclasses.replace(slot, name=f"{slot.name}.{i}", layer=i)
                found += named(table, layer)
        links += found
        if not found:
            problems.append(
                f"{slot.name} of the model has no name in source {source!r}: choose another source "
                "or position"
            )
    return links, problems


def named(table: Table, slot: Slot) -> list[Link]:
    """The tensors of a parameter by a source's names: one, all of its parts, or none."""
    if table.rows is None:
        return [Link(slot, own_name(slot), own_rule(slot))]
    links = []
    for ours, theirs, rule in table.rows:
        if (numbers := match_name(ours, slot.name)) is not None:
            own = dataclasses.replace(slot, part=rule.part)
            links.append(Link(own, fill_name(theirs, numbers), rule))
            if rule.part is None or rule.part[0] + 1 == rule.part[1]:
                break
    return links


def slots_of(model: nnx.Module) -> Iterator[Slot]:
    """The parameters of a model by name.

    Those of a positional scheme are named after the scheme, whatever its place in a sum. Stacked
    blocks have the layer in their names, like blocks in a list.
    """
    modules = nnx.iter_modules(model)
    schemes = {path: module for path, module in modules if isinstance(module, Position)}
    names = {scheme: name for name, scheme in SCHEMES.items()}
    rotaries = {prefix: rotary_of(part.position) for prefix, part in model.parts().items()}
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
                own = dataclasses.replace(slot, layer=layer)
                yield dataclasses.replace(own, name=own_name(own))


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
    """The grid of a table that must be resized, and the problem of a tensor that does not fit."""
    key, slot, rule = link.key, link.slot, link.rule
    if not jnp.issubdtype(dtype, jnp.floating):
        return None, not_floating(key, dtype)
    want = rule.write(np.empty(slot.shape, np.bool_), slot).shape
    share = rule.cut_shape(tuple(shape))
    fits = share == want
    grid = None
    if rule.grid and (fits or math.prod(shape) <= LARGEST):
        grid = rule.grid(share, slot)
    if fits and (not rule.grid or grid == slot.own_grid):
        return None, None
    if fits and grid and not slot.grid:
        one, own = ("x".join(map(str, sides)) for sides in (grid, slot.own_grid))
        return None, (
            f"{key} may be of {one} or, as in this model, of {own} tokens: say which by "
            f"convert_state_dict(grids={{{key!r}: ...}})"
        )
    if grid:
        return grid, None
    hint = "" if rule.cut is None else " of it"
    if slot.grid:
        hint += f", or a table of {slot.grid[0]}x{slot.grid[1]} tokens: correct grids"
    by_class = len(shape) == len(want) and (rule is not SAME or len(shape) == 1)
    if slot.name.startswith(HEAD) and by_class and shape[0] != want[0]:
        hint = f": create the model with num_classes={shape[0]}, or pass new_head=True"
    return None, (
        f"{key} has shape {list(shape)}, but {slot.name} of the model takes {list(want)}{hint}"
    )


def not_floating(key: str, dtype: np.dtype) -> str:
    """The problem of a tensor of another dtype."""
    return f"{key} has dtype {dtype}; weights are floating-point"
