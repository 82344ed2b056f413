"""Weights under the names that parameters have here: those of `save_pretrained` and of runs.

A parameter is named by its path, "blocks.0.attn.qkv.kernel". Stacked blocks have the names of
blocks in a list; files in which they are stacked are read, too.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.layers import STORED
from rope_jax.models.pretrained.convert import Shapes
from rope_jax.models.pretrained.layouts import square
from rope_jax.models.pretrained.links import (
    CLASSIFIER,
    HEAD,
    LARGEST,
    is_backbone,
    missing_head,
    names_by_layer,
)
from rope_jax.models.pretrained.tables import begins
from rope_jax.positions import Position
from rope_jax.positions.absolute import Learned
from rope_jax.positions.grids import Grid

OWN = "rope_jax"
"""The source of such weights."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter, or one layer of stacked blocks, and the tensor that fills it.

    Attributes:
        path: of the parameter in the model's state.
        layer: index into its first axis, or None for all of it.
        shape: of the place.
        key: name of the tensor, or None if there is none.
        stored_layer: index into the tensor's first axis, or None for all of it.
        stored: shape of what fills the place.
        skip: rows of the tensor before those that fill the place: of a class token.
        dtype: of the tensor.
    """

    path: tuple[str | int, ...]
    layer: int | None
    shape: tuple[int, ...]
    key: str | None = None
    stored_layer: int | None = None
    stored: tuple[int, ...] | None = None
    skip: int = 0
    dtype: np.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What fills a model, derived from names, shapes and dtypes alone.

    Attributes:
        places: of the model, by name, without those that stay as they are.
        grids: the file's map of each part whose scheme is resized, by the part's prefix.
        problems: everything that does not fit.
        new_head: whether the head keeps its initial weights.
        unused, fresh: see `convert.Conversion`.
    """

    places: dict[str, Place]
    grids: dict[str, Grid]
    problems: list[str]
    new_head: bool
    unused: list[str]
    fresh: tuple[str, ...]


def own_state_dict(model: nnx.Module) -> dict[str, np.ndarray]:
    """All weights of a model by name.

    >>> import rope_jax
    >>> model = rope_jax.create_model("vit_digits", depth=1, width=8, heads=1, scan_layers=True)
    >>> own_state_dict(model)["blocks.0.attn.qkv.kernel"].shape
    (8, 24)
    """
    variables = _variables(model)
    return {
        name: np.asarray(variables[place.path][...])[... if place.layer is None else place.layer]
        for name, place in _places(model, {}).items()
    }


def has_own_names(model: nnx.Module, shapes: Shapes) -> bool:
    """Whether some tensors have names that only parameters here have; torch's end in "weight"."""
    places = _places(model, shapes).values()
    return any(place.key and place.key.endswith((".kernel", ".scale")) for place in places)


def plan_own(
    model: nnx.Module,
    shapes: Shapes,
    *,
    image_size: Grid | None = None,
    new_head: bool = False,
    backbone: bool = False,
) -> Plan:
    """Finds the tensor of each parameter and everything that does not fit, from shapes alone.

    Args:
        model: to be filled.
        shapes: shape and dtype of each tensor.
        image_size: (height, width) in pixels, for which the tensors' position tables are. Without
            it, embeddings that do not fit are taken to be of square maps.
        new_head: leave the head as it is if the weights have none or one for other classes.
        backbone: whether the model is that of a model of dense prediction.
    """
    places = _places(model, shapes)
    # Of another head's backbone, the last norm may be missing.
    starts = (*getattr(model, "beyond_classifier", ()), *(("norm.",) if backbone else ()))
    fresh = tuple(
        start
        for start in starts
        if any(begins(name, (start,)) for name in places)
        and not any(begins(key, (start,)) for key in shapes)
    )
    places = {name: place for name, place in places.items() if not begins(name, fresh)}
    heads = [name for name in places if name.startswith(HEAD)]
    new_head = new_head and any(places[name].stored != places[name].shape for name in heads)
    unexpected = shapes.keys() - {place.key for place in places.values()}
    backbone = backbone or is_backbone(model, fresh)
    dropped = CLASSIFIER if backbone else (HEAD,) if new_head or not heads else ()
    unused = sorted(name for name in unexpected if name.startswith(dropped))
    if new_head:
        places = {name: place for name, place in places.items() if name not in heads}
    if "class_token" in unused:
        places = _without_class_entry(model, places, image_size)
    unexpected -= {*unused}
    there = {name: place for name, place in places.items() if place.key is not None}
    grids = _grids_to_resize(model, there, image_size)
    missing = [name for name in places if name not in there]
    if problem := missing_head(model, heads, missing):
        missing = [name for name in missing if name not in heads]
    problems = [problem] if problem else []
    problems += [f"{name} is missing" for name in missing]
    problems += [f"{name} is not expected" for name in sorted(unexpected)]
    for name, place in there.items():
        if not jnp.issubdtype(place.dtype, jnp.floating):
            problems.append(f"{name} holds {place.dtype}, not floating-point numbers")
        elif place.stored != place.shape and _within(name, grids) is None:
            problems.append(f"{name} has shape {list(place.stored)}, not {list(place.shape)}")
    return Plan(there, grids, problems, new_head, unused, fresh)


def load_own(model: nnx.Module, read: Callable[[str], np.ndarray], plan: Plan) -> None:
    """Fills a model by a plan without problems; schemes resize their parameters by their rules."""
    read, variables = functools.lru_cache(1)(read), _variables(model)  # layers follow each other
    values: dict[tuple, np.ndarray] = {}
    positions: dict[str, dict[tuple, np.ndarray]] = {prefix: {} for prefix in plan.grids}
    for name, place in plan.places.items():
        array = read(place.key)
        array = array if place.stored_layer is None else array[place.stored_layer]
        array = array[place.skip :] if place.skip else array
        prefix = _within(name, plan.grids)
        if prefix is not None:
            positions[prefix][_inside(place.path)] = array
            continue
        variable = variables[place.path]
        value = values.setdefault(place.path, np.empty(variable.shape, variable.dtype))
        value[... if place.layer is None else place.layer] = array
    for path, value in values.items():
        variables[path].set_value(jax.device_put(value))  # jnp.asarray compiles for each shape
    for prefix, grid in plan.grids.items():
        position = model.parts()[prefix].position
        own = _variables(position)
        arrays = {p: jax.device_put(x.astype(own[p].dtype)) for p, x in positions[prefix].items()}
        for path, value in _resized(position, arrays, grid).items():
            own[path].set_value(value)


def _without_class_entry(
    model: nnx.Module, places: Mapping[str, Place], image_size: Grid | None
) -> dict[str, Place]:
    """The places, with tables of absolute positions without the row of a class token."""
    places, tables = dict(places), {}
    grids = model.grids(image_size) if image_size else [None] * len(model.parts())
    for (prefix, part), grid in zip(model.parts().items(), grids, strict=True):
        for path, module in nnx.iter_modules(part.position):
            if isinstance(module, Learned):
                tables[".".join([f"{prefix}position", *map(str, path), "embedding"])] = grid
    for name, grid in tables.items():
        place = places[name]
        rows = 0 if place.stored is None else place.stored[0]
        if rows - 1 == math.prod(grid) if grid else square(rows - 1) and not square(rows):
            stored = (rows - 1, *place.stored[1:])
            places[name] = dataclasses.replace(place, skip=1, stored=stored)
    return places


def _variables(module: nnx.Module) -> dict[tuple, nnx.Variable]:
    return dict(nnx.to_flat_state(nnx.state(module, STORED)))


def _places(model: nnx.Module, shapes: Shapes) -> dict[str, Place]:
    places = {}
    for path, variable in _variables(model).items():
        for name, layer in names_by_layer(path, variable):
            place = Place(path, layer, tuple(variable.shape[layer is not None :]))
            stacked = re.match(r"(.*\bblocks)\.(\d+)(\..*)", name)
            if name in shapes:
                shape, dtype = shapes[name]
                place = dataclasses.replace(place, key=name, stored=tuple(shape), dtype=dtype)
            elif stacked and (key := stacked[1] + stacked[3]) in shapes:
                shape, dtype = shapes[key]
                if shape and int(stacked[2]) < shape[0]:
                    about = {"stored_layer": int(stacked[2]), "stored": tuple(shape[1:])}
                    place = dataclasses.replace(place, key=key, dtype=dtype, **about)
            places[name] = place
    return places


def _grids_to_resize(
    model: nnx.Module, places: Mapping[str, Place], image_size: Grid | None
) -> dict[str, Grid]:
    """The stored map of each part whose scheme must be resized and can be.

    It is that of `image_size`, or else square, with as many rows as the square root of a table's.
    """
    parts, found = model.parts(), {}
    stored = [None] * len(parts)
    if image_size is not None:
        with contextlib.suppress(ValueError):  # other patches, whose shapes are refused
            stored = model.grids(image_size)
    for (prefix, part), grid in zip(parts.items(), stored, strict=True):
        stage = part.position.stage
        own = [place for name, place in places.items() if name.startswith(f"{prefix}position.")]
        shapes = {_inside(place.path): place.stored for place in own}
        fits = all(place.stored == place.shape for place in own)
        if fits and grid in (None, stage.grid):
            continue
        if grid is None:
            rows = max((shape[0] for shape in shapes.values() if shape), default=0)
            grid = (math.isqrt(max(rows - stage.embed_prefix, 1)),) * 2
        small = all(math.prod(shape) <= LARGEST for shape in shapes.values())
        if small and _can_resize(part.position, shapes, grid):
            found[prefix] = grid
    return found


def _can_resize(position: Position, shapes: Mapping[tuple, Sequence[int]], grid: Grid) -> bool:
    """Whether parameters of `shapes`, for a map of `grid`, become those of the scheme."""
    own = _variables(position)
    arrays = {p: jax.ShapeDtypeStruct(shape, own[p].dtype) for p, shape in shapes.items()}

    def resize(values: list[jax.Array]) -> list[jax.Array]:
        resized = _resized(position, dict(zip(arrays, values, strict=True)), grid)
        return [resized[path] for path in arrays]

    try:
        resized = jax.eval_shape(resize, list(arrays.values()))
    except (TypeError, ValueError):  # of reshaping a table that is not of this map
        return False
    return all(x.shape == own[path].shape for path, x in zip(arrays, resized, strict=True))


def _resized(
    position: Position, values: Mapping[tuple, jax.Array], grid: Grid
) -> dict[tuple, jax.Array]:
    """Parameters for a map of `grid`, resized to the scheme's own by its rule."""
    copy = nnx.clone(position)
    variables = _variables(copy)
    for path, value in values.items():
        variables[path].set_value(value)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Position):
            module.stage = dataclasses.replace(module.stage, grid=grid)
    copy.resize(position.stage.grid)
    return {path: variable[...] for path, variable in _variables(copy).items()}


def _inside(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The path of a scheme's parameter within the scheme."""
    return path[path.index("position") + 1 :]


def _within(name: str, prefixes: Mapping[str, Grid]) -> str | None:
    """The part whose scheme a parameter belongs to, if it is among `prefixes`."""
    return next((p for p in prefixes if name.startswith(f"{p}position.")), None)
