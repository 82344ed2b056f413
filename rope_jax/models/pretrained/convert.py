"""Weights of other code into a model, and back: `convert_state_dict` and `export_state_dict`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.hints import closest
from rope_jax.models.layers import STORED
from rope_jax.models.pretrained import cat, cct, ceit, deit, dinov2, dinov3, lape, nat, naver, resformer, swin, t2t, timm
from rope_jax.models.pretrained.rows import Table, filled, numbers
from rope_jax.models.pretrained.tensors import Rule, Slot, rotary_of
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES

# A file that does not say whose names it has is of the first source that they fit: one of few models comes after one of many.
SOURCES = {
    "deit": deit,
    "swin": swin,
    "nat": nat,
    "lape": lape,
    "naver": naver,
    "timm": timm,
    "dinov2": dinov2,
    "dinov3": dinov3,
    "resformer": resformer,
    "t2t": t2t,
    "ceit": ceit,
    "cct": cct,
    "cat": cat,
}

_LARGEST = 2**28  # elements of a table that is to be resized
_ROUNDING = 2e-5  # of a sinusoid whose angle was rounded to float32, at the 200th token

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Grids = Mapping[str, Grid]


@dataclasses.dataclass(frozen=True)
class Link:
    """A parameter of the model and the tensor that fills it."""

    slot: Slot
    key: str
    rule: Rule


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a conversion will do, and what is wrong with it: known from names, shapes and dtypes alone.

    frozen holds what the model computes and the tensors of those names must therefore contain.
    """

    links: list[Link]
    frozen: dict[str, np.ndarray]
    problems: list[str]


def table_of(model: nnx.Module, source: str) -> Table:
    """The names of `source` for a model; ValueError where there is no such source."""
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is unknown; {closest(source, SOURCES)}")
    return SOURCES[source].table(model)


def convert_state_dict(model: nnx.Module, state_dict: Mapping[str, Any], *, source: str, grids: Grids | None = None) -> None:
    """Puts torch-named weights into a model, in place.

    Weights become the model's dtype and layout; channels of queries and keys are permuted where the source pairs them otherwise for its
    rotation; bias tables change their sign where source and model count offsets in opposite directions. Tables of another map or window
    are resized by their scheme's rule.

    Args:
        model: from `rope_jax.create_model`.
        state_dict: arrays by their names in the source's files.
        source: whose names: "timm", "naver" (RoPE-ViT), "deit", "swin", "nat", "lape", "cct", "ceit", "t2t", "cat",
            "dinov2", "dinov3" or "resformer".
        grids: (rows, columns) of the map or window for which a table was made, by the table's name. Others are of square ones, as all
            official tables are, or else of the model's. Needed only for a table whose length allows both.

    Raises:
        ValueError: names or shapes that do not fit, all of them in one message; the model is left as it was.
    """
    if nested := [key for key, value in state_dict.items() if isinstance(value, Mapping)]:
        raise ValueError(f"state_dict holds dictionaries under {', '.join(nested)}: pass the one that holds the weights by itself")
    arrays = {key: np.asarray(array) for key, array in state_dict.items()}
    plan = plan_conversion(model, {key: (array.shape, array.dtype) for key, array in arrays.items()}, source=source, grids=grids)
    problems = plan.problems + [
        f"{key} is computed here, and is not what the file holds: create the model with the position that these weights were trained with"
        for key, want in plan.frozen.items()
        if not np.allclose(arrays[key], want, rtol=float(jnp.finfo(arrays[key].dtype).eps), atol=_ROUNDING)
    ]
    refuse(problems, source)
    values: dict[int, tuple[nnx.Variable, np.ndarray]] = {}
    for link in plan.links:
        variable = link.slot.variable
        _, value = values.setdefault(id(variable), (variable, np.empty(variable.shape, variable.dtype)))
        array = arrays[link.key] if link.rule.cut is None else arrays[link.key][link.rule.cut]
        link.slot.of(value)[...] = _loaded(link, array.astype(variable.dtype))
    for variable, value in values.values():
        variable.set_value(jnp.asarray(value))


def export_state_dict(model: nnx.Module, *, source: str) -> dict[str, np.ndarray]:
    """A model's weights with the names and layouts of `source`; `convert_state_dict` brings them back bit by bit.

    Raises:
        ValueError: the source has no name for some of the parameters; the message lists them.
    """
    found, problems = _links(model, table_of(model, source), source)
    refuse(problems, source)
    tensors: dict[str, list[np.ndarray]] = {}
    starts = lambda link: 0 if link.rule.cut is None else link.rule.cut.start or 0
    for link in sorted(found, key=lambda link: starts(link) < 0):  # rows that are counted from the end of a tensor come last
        tensors.setdefault(link.key, []).append(link.rule.save(link.slot.of(np.asarray(link.slot.variable[...])), link.slot))
    return {key: np.ascontiguousarray(cuts[0] if len(cuts) == 1 else np.concatenate(cuts)) for key, cuts in tensors.items()}


def table_grids(model: nnx.Module, *, source: str) -> dict[str, Grid]:
    """For the names of a model's tables in a file, (rows, columns) of the map or window for which they are made."""
    links, _ = _links(model, table_of(model, source), source)
    return {link.key: link.slot.own_grid for link in links if link.rule.grid}


def plan_conversion(model: nnx.Module, shapes: Shapes, *, source: str, grids: Grids | None = None) -> Plan:
    """Finds the tensor of each parameter and everything that does not fit, before any array is touched.

    Args:
        model: whose parameters are to be filled.
        shapes: shape and dtype of each tensor.
        source: see `convert_state_dict`.
        grids: see `convert_state_dict`.
    """
    table = table_of(model, source)
    found, problems = _links(model, table, source)
    links, frozen, left, grids = [], {}, dict(shapes), grids or {}
    tables = {link.key for link in found if link.rule.grid}
    problems += [f"grids has {key}, which is no table of this model: leave it out" for key in grids if key not in tables]
    for link in found:
        left.pop(link.key, None)
        if (entry := shapes.get(link.key)) is None:
            if not any(numbers(template, link.key) is not None for template in table.optional):
                problems.append(f"{link.key} is missing: it fills {link.slot.name} of the model")
            continue
        link = dataclasses.replace(link, slot=dataclasses.replace(link.slot, grid=grids.get(link.key)))
        grid, problem = _fit(link, *entry)
        problems += [problem] if problem else []
        links.append(dataclasses.replace(link, slot=dataclasses.replace(link.slot, grid=grid)))
    for key, (shape, dtype) in left.items():
        if any(numbers(template, key) is not None for template in table.dropped):
            continue
        want = next((f(model, n, tuple(shape)) for name, f in table.frozen if (n := numbers(name, key)) is not None), None)
        if want is None:
            problems.append(f"{key} of shape {list(shape)} is not expected: no parameter of this model takes it")
        elif want.shape != tuple(shape):
            problems.append(f"{key} has shape {list(shape)}, but what the model computes in its place has shape {list(want.shape)}")
        elif not jnp.issubdtype(dtype, jnp.floating):
            problems.append(_not_floating(key, dtype))
        else:
            frozen[key] = want
    return Plan(links, frozen, problems)


def refuse(problems: list[str], source: str) -> None:
    """Raises one ValueError with all problems, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"the weights do not fit the model by the names of source={source!r}; {count}:\n  " + "\n  ".join(problems))


def _links(model: nnx.Module, table: Table, source: str) -> tuple[list[Link], list[str]]:
    links, problems = [], []
    slots = [dataclasses.replace(slot, pairing=table.pairing) for slot in _slots(model)]
    if table.pairing is None and any(slot.rotary for slot in slots):
        problems.append(f"source {source!r} has no models whose position rotates: choose another position, or the source of one that does")
    for slot in slots:
        found = _named(table, slot)
        if not found and slot.scheme is not None:
            layers = [dataclasses.replace(slot, name=f"{slot.name}.{i}", layer=i) for i in range(slot.shape[0])]
            found = [link for layer in layers for link in _named(table, layer)]
        links += found
        if not found:
            problems.append(f"{slot.name} of the model has no name in source {source!r}: choose another source or position")
    return links, problems


def _named(table: Table, slot: Slot) -> list[Link]:
    links = []
    for ours, theirs, rule in table.rows:
        if (found := numbers(ours, slot.name)) is not None:
            links.append(Link(dataclasses.replace(slot, part=rule.part), filled(theirs, found), rule))
            if rule.part is None or rule.part[0] + 1 == rule.part[1]:
                break
    return links


def _slots(model: nnx.Module) -> Iterator[Slot]:
    """The parameters of a model by name; those of a positional scheme are named after the scheme, wherever in a sum it stands.

    Blocks that are kept as one have the layer in their names, too, as if they were a list.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, STORED)):
        holder, scheme, rotary, name = model, None, None, []
        for step in path:
            if isinstance(getattr(holder, "position", None), Position):
                rotary = rotary_of(holder.position)
            if isinstance(holder, Position):
                scheme = holder
            if scheme is None:
                name.append(str(step))
            holder = holder[step] if isinstance(step, int) else getattr(holder, step)
        if variable.get_metadata().get("layers"):
            place = name.index("blocks") + 1
            for layer in range(variable.shape[0]):
                yield Slot(".".join([*name[:place], str(layer), *name[place:]]), variable, layer=layer, rotary=rotary)
            continue
        if scheme is not None:
            name += [next((key for key, cls in SCHEMES.items() if cls is type(scheme)), type(scheme).__name__), str(path[-1])]
        yield Slot(".".join(name), variable, scheme=scheme, rotary=rotary)


def _fit(link: Link, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Grid | None, str | None]:
    """The map or window for which a tensor was made, where that is another than the model's, and what is wrong with it."""
    key, slot, rule = link.key, link.slot, link.rule
    if not jnp.issubdtype(dtype, jnp.floating):
        return None, _not_floating(key, dtype)
    want, share = rule.save(np.empty(slot.shape, np.bool_), slot).shape, rule.cut_shape(tuple(shape))
    fits = share == want
    grid = rule.grid(share, slot) if rule.grid and (fits or math.prod(shape) <= _LARGEST) else None
    if fits and (not rule.grid or grid == slot.own_grid):
        return None, None
    if fits and grid and not slot.grid:
        one, own = ("x".join(map(str, sides)) for sides in (grid, slot.own_grid))
        return None, f"{key} may be of {one} or, as in this model, of {own} tokens: say which by convert_state_dict(grids={{{key!r}: ...}})"
    if grid:
        return grid, None
    if slot.grid:
        return None, f"{key} has shape {list(shape)}, which no table of {slot.grid[0]}x{slot.grid[1]} tokens has: correct grids"
    hint = "" if rule.cut is None else " of it"
    if slot.name.startswith("head.") and len(shape) == len(want) and shape[0] != want[0]:
        hint = f": create the model with num_classes={shape[0]}"
    return None, f"{key} has shape {list(shape)}, but {slot.name} of the model takes {list(want)}{hint}"


def _not_floating(key: str, dtype: np.dtype) -> str:
    return f"{key} has dtype {dtype}; weights are floating-point"


def _loaded(link: Link, array: np.ndarray) -> np.ndarray:
    slot = link.slot
    value = link.rule.load(array, slot)
    if slot.grid is None:
        return value
    # The scheme itself, as if it had been created for the tensor's map, is given the tensor and asked for the model's map.
    scheme, layered = nnx.clone(slot.scheme), slot.layer is not None
    (attribute,) = (key for key, variable in vars(slot.scheme).items() if variable is slot.variable)
    own = scheme.stage.grid
    scheme.stage = dataclasses.replace(scheme.stage, grid=slot.grid)
    getattr(scheme, attribute).set_value(jnp.asarray(value[None] if layered else value))
    scheme.resize(own)
    value = np.asarray(getattr(scheme, attribute)[...])
    return value[0] if layered else value
