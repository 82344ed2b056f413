"""Conversion between the weights of other code and a model's."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.layers import STORED
from rope_jax.names.text import closest
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES
from rope_jax.weights.dense import detectron2
from rope_jax.weights.detrex import detrex
from rope_jax.weights.heads import mask2former, mmseg, segmenter, vit_adapter
from rope_jax.weights.hierarchical import nat, naver, swin
from rope_jax.weights.isotropic import (
    augreg,
    cat,
    cct,
    ceit,
    deit,
    dinov2,
    dinov3,
    lape,
    resformer,
    t2t,
)
from rope_jax.weights.layouts import Slot, find_rotary
from rope_jax.weights.links import (
    CLASSIFIER,
    HEADS,
    Link,
    find_links,
    fit,
    link_parameters,
    list_slots,
    missing_head,
    not_floating,
)
from rope_jax.weights.own import OWN, own
from rope_jax.weights.tables import Table, begins, match_name
from rope_jax.weights.timm import timm
from rope_jax.weights.transformers import transformers

# Of sources that name a file's tensors equally well the first is used: those with many models come
# first.
SOURCES: dict[str, Callable[[nnx.Module], Table]] = {
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
    "augreg": augreg,
    "transformers": transformers,
    "mmseg": mmseg,
    "segmenter": segmenter,
    "detectron2": detectron2,
    "vit_adapter": vit_adapter,
    "detrex": detrex,
    "mask2former": mask2former,
    OWN: own,
}

WHOLE = (OWN, "mmseg", "segmenter", "detectron2", "vit_adapter", "detrex", "mask2former")
"""Sources that name a model with its head of dense prediction, too; others name classifiers."""

_BUFFERS = (".attn_mask", ".num_batches_tracked", ".relative_position_index")
"""Ends of the names of tensors that follow from others, or count batches, in any source."""

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Grids = Mapping[str, Grid]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A plan of a conversion, derived from names, shapes and dtypes alone.

    Attributes:
        links: parameters and the tensors that fill them.
        zeros: parameters that the file lacks and that are 0 in its model.
        frozen: expected values of tensors that the model computes, by name.
        problems: everything that does not fit.
        new_head: whether the model's head keeps its initial weights.
        unused: tensors of a classifier that have no parameter in a model that is none.
        fresh: starts of the names of parameters that keep their initial weights, because no
            classifier has them.
        backbone: whether the weights are those of a classifier, or of the backbone of another
            model, and the model is for dense prediction.
    """

    links: list[Link]
    zeros: list[Slot]
    frozen: dict[str, np.ndarray]
    problems: list[str]
    new_head: bool
    unused: list[str]
    fresh: tuple[str, ...]
    backbone: bool


def name_table(model: nnx.Module, source: str, names: Collection[str] = ()) -> Table:
    """The names of a source for a model; raises ValueError for an unknown source.

    `names` are those of a file, if there is one.
    """
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is unknown; {closest(source, SOURCES)}")
    return SOURCES[source](model).with_start(names)


def fill(
    model: nnx.Module,
    plan: Conversion,
    read: Callable[[str], np.ndarray],
    source: str,
    where: str,
) -> None:
    """Fills a model by a plan.

    Args:
        model: of the plan.
        plan: of `plan_conversion`.
        read: reads a tensor by its name.
        source: of the names, for error messages.
        where: path or hub id of the file, for error messages.

    Raises:
        ValueError: the plan has problems, the model computes other values than the file holds, or a
            weight is not finite; the model is not changed.
    """
    read, problems = functools.lru_cache(2)(read), list(plan.problems)  # layers follow each other
    drift = name_table(model, source).drift
    for key, expected in plan.frozen.items():
        array = read(key)
        precision = float(jnp.finfo(array.dtype).eps)
        if not np.allclose(array, expected, rtol=precision, atol=drift):
            problems.append(
                f"{key} is computed here, and is not what the file holds: create the model with "
                "the position and the windows that these weights were trained with"
            )
    refuse(problems, source)
    variables = dict(nnx.to_flat_state(nnx.state(model, STORED)))
    values: dict[tuple, np.ndarray] = {}
    for link in plan.links:
        slot, variable = link.slot, variables[link.slot.path]
        value = values.setdefault(slot.path, np.empty(variable.shape, variable.dtype))
        array = read(link.key)
        array = array if link.rule.cut is None else array[link.rule.cut]
        array = link.rule.read(array.astype(variable.dtype), slot)
        if not np.isfinite(array).all():
            raise ValueError(
                f"{link.key} of {where!r} holds NaN or infinite values: take other weights, or "
                "those of an earlier checkpoint"
            )
        slot.view(value)[...] = array if slot.grid is None else slot.resize(array)
    for slot in plan.zeros:
        values[slot.path] = np.zeros(variables[slot.path].shape, variables[slot.path].dtype)
    for path, value in values.items():
        variables[path].set_value(jax.device_put(value))  # jnp.asarray compiles for each shape


def report(model: nnx.Module, plan: Conversion, head: str | None = None, epsilon: str = "") -> None:
    """Prints the parameters of a model that no weight of a file has filled, if there are any.

    Args:
        model: that was filled.
        plan: by which it was.
        head: the name of the head of the weights' original model; None for a classifier.
        epsilon: text about the norms' epsilon, or "".
    """
    new = [start.rstrip(".") for start in plan.fresh]
    if plan.backbone:
        stored = nnx.to_pure_dict(nnx.state(model, STORED))
        new += [name for name in ("neck", "head") if stored.get(name)]
    if new:
        trained_as = "a classifier" if head is None else f"a model with the head {head!r}"
        unused = f", not used {', '.join(sorted(plan.unused))}" if plan.unused else ""
        print(f"weights of {trained_as}: new {', '.join(new)}{unused}{epsilon}")
    if plan.new_head:
        print(f"head: new, {model.num_classes} classes")
    if plan.zeros:
        print(f"not in the weights, and 0: {', '.join(slot.name for slot in plan.zeros)}")


def export_state_dict(model: nnx.Module, *, source: str) -> dict[str, np.ndarray]:
    """A model's weights with the names and layouts of a source.

    `convert_state_dict` restores them bit for bit.

    Args:
        model: from `rope_jax.create_model`.
        source: see `convert_state_dict`.

    Raises:
        ValueError: the source has no name for some of the parameters; the message lists them.
    """
    links, problems = link_parameters(model, name_table(model, source), source)
    refuse(problems, source)
    variables = dict(nnx.to_flat_state(nnx.state(model, STORED)))
    pieces: dict[str, list[tuple[tuple[bool, int], np.ndarray]]] = {}
    for link in links:
        array = link.slot.view(np.asarray(variables[link.slot.path][...]))
        start = 0 if link.rule.cut is None else link.rule.cut.start or 0
        place = (start < 0, start)  # positions from the end come last
        pieces.setdefault(link.key, []).append((place, link.rule.write(array, link.slot)))
    exported = {}
    for key, parts in pieces.items():
        arrays = [array for _, array in sorted(parts, key=lambda piece: piece[0])]
        tensor = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        exported[key] = np.asarray(tensor, order="C")
    return exported


def table_grids(model: nnx.Module, *, source: str) -> dict[str, Grid]:
    """(rows, columns) of the map or window of each of a model's tables, by name in a file."""
    links, _ = link_parameters(model, name_table(model, source), source)
    return {link.key: link.slot.model_grid for link in links if link.rule.grid}


def plan_conversion(
    model: nnx.Module,
    shapes: Shapes,
    *,
    source: str,
    grids: Grids | None = None,
    new_head: bool = False,
    backbone: bool = False,
) -> Conversion:
    """Finds the tensor of each parameter and everything that does not fit, from shapes alone.

    Args:
        model: to be filled.
        shapes: shape and dtype of each tensor.
        source: see `convert_state_dict`.
        grids, new_head: see `convert_state_dict`.
        backbone: whether the model is that of a model of dense prediction.
    """
    table = name_table(model, source, shapes)
    fresh = _fresh(model, table, shapes, backbone)
    named_links, problems = link_parameters(model, table, source, fresh)
    named_links = [_find_alternative(link, table, shapes) for link in named_links]
    links, zeros, missing, grids = [], [], [], grids or {}
    named_links, new_head = _without_head(named_links, shapes, new_head)
    backbone = backbone or (bool(fresh) and not model.num_classes)
    headless = new_head or not model.num_classes
    dropped = CLASSIFIER if backbone else HEADS if headless else ()
    keys = {link.key for link in named_links}
    unused = [key for key in shapes.keys() - keys if _belongs_to(table, key, dropped)]
    tables = {link.key for link in named_links if link.rule.grid}
    for key in grids:
        if key not in tables:
            problems.append(f"grids has {key}, which is no table of this model: leave it out")
    for link in named_links:
        if link.key in shapes:
            placed = dataclasses.replace(link.slot, grid=grids.get(link.key))
            grid, problem = fit(dataclasses.replace(link, slot=placed), *shapes[link.key])
            problems += [problem] if problem else []
            slot = dataclasses.replace(link.slot, grid=grid)
            links.append(dataclasses.replace(link, slot=slot))
        elif _matches_any(table.zeros, link.key):
            zeros.append(link.slot)
        else:
            missing.append(link)
    heads = [link.key for link in named_links if link.slot.name.startswith(HEADS)]
    if problem := missing_head(model, heads, [link.key for link in missing]):
        problems.append(problem)
        missing = [link for link in missing if link.key not in heads]
    problems += [f"{x.key} is missing: it fills {x.slot.name} of the model" for x in missing]
    unmatched = shapes.keys() - keys - {*unused}
    frozen, unexpected = _without_parameter(model, table, shapes, sorted(unmatched))
    problems += unexpected
    return Conversion(links, zeros, frozen, problems, new_head, unused, fresh, backbone)


def count_named(model: nnx.Module, source: str, shapes: Shapes) -> tuple[int, bool]:
    """Counts a file's tensors that a source knows, 0 if none fills a parameter.

    Also returns whether the source has rotations, if the model has: that decides between equal
    counts.
    """
    table = name_table(model, source, shapes)
    links, _ = link_parameters(model, table, source)
    keys = {link.key for link in links}
    if keys.isdisjoint(shapes):
        return 0, False
    count = sum(
        key in keys
        or _is_dropped(table, key)
        or _frozen(model, table, key, tuple(shape)) is not None
        for key, (shape, _) in shapes.items()
    )
    return count, table.pairing is not None or not rotates(model)


def rotates(model: nnx.Module) -> bool:
    """True if some position of a model rotates queries and keys."""
    return any(find_rotary(part.position) is not None for part in model.parts().values())


def _without_parameter(
    model: nnx.Module, table: Table, shapes: Shapes, unmatched: list[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Tensors that the model computes instead of storing, and problems of others.

    Args:
        model, table: that is filled, and the names of the source.
        shapes: of all tensors.
        unmatched: tensors that fill no parameter.
    """
    frozen, problems, unexpected = {}, [], []
    for key in unmatched:
        shape, dtype = shapes[key]
        if _is_dropped(table, key):
            continue
        expected = _frozen(model, table, key, tuple(shape))
        if expected is None:
            unexpected.append(key)
        elif expected.shape != tuple(shape):
            problems.append(
                f"{key} has shape {list(shape)}, but what the model computes in its place has "
                f"shape {list(expected.shape)}"
            )
        elif not jnp.issubdtype(dtype, jnp.floating):
            problems.append(not_floating(key, dtype))
        else:
            frozen[key] = expected
    schemes = _find_schemes(model, shapes) if unexpected else {}
    advice = f'; create it with position="{"+".join(dict.fromkeys(schemes.values()))}"'
    for key in unexpected:
        problems.append(
            f"{key} of shape {list(shapes[key][0])} is not expected: no parameter of this model "
            f"takes it{advice if key in schemes else ''}"
        )
    return frozen, problems


def _find_alternative(link: Link, table: Table, shapes: Shapes) -> Link:
    """Links to the tensor that a file has in place of another; see `Table.alternatives`."""
    keys = [key for name, key in table.alternatives if match_name(name, link.key) is not None]
    if link.key in shapes or not keys or keys[0] not in shapes:
        return link
    return dataclasses.replace(link, key=keys[0])


def _belongs_to(table: Table, key: str, starts: tuple[str, ...]) -> bool:
    """True if a tensor is that of a parameter whose name here has one of some starts."""
    if table.rows is None:
        return key.startswith(starts)
    rows = (theirs for ours, theirs, _ in table.rows if ours.startswith(starts))
    return any(match_name(theirs, key) is not None for theirs in rows)


def _find_schemes(model: nnx.Module, shapes: Shapes) -> dict[str, str]:
    """Finds the positional schemes of tensors in the tables of all sources, by tensor."""
    classifier = model.parts() and not hasattr(model, "backbone")  # of which all sources have names
    rows = [
        (match[1], theirs)
        for source in (SOURCES if classifier else WHOLE)
        for ours, theirs, _ in name_table(model, source).rows or ()
        if (match := re.search(r"position\.(\w+)\.", ours)) and not SCHEMES[match[1]].wraps
    ]
    return {
        key: scheme
        for key in shapes
        for scheme, theirs in rows
        if match_name(theirs, key) is not None
    }


def _fresh(model: nnx.Module, table: Table, shapes: Shapes, backbone: bool) -> tuple[str, ...]:
    """Starts of the names of parameters beyond those of a classifier that a file lacks altogether.

    The last norm of another head's backbone may be missing, too.
    """
    starts = (*getattr(model, "beyond_classifier", ()), *(("norm.",) if backbone else ()))
    slots = list(list_slots(model)) if starts else []

    def is_present(start: str) -> bool:
        members = [slot for slot in slots if begins(slot.name, (start,))]
        links = (link for slot in members for link in find_links(table, slot))
        return not members or any(link.key in shapes for link in links)

    return tuple(start for start in starts if not is_present(start))


def _without_head(links: list[Link], shapes: Shapes, allowed: bool) -> tuple[list[Link], bool]:
    """The links without those of a head that stays new, and whether there is such a head."""
    heads = [link for link in links if link.slot.name.startswith(HEADS)]
    fits = all(
        link.key in shapes
        and tuple(shapes[link.key][0])
        == link.rule.write(np.empty(link.slot.shape, np.bool_), link.slot).shape
        for link in heads
    )
    if fits or not allowed:
        return links, False
    return [link for link in links if link not in heads], True


def refuse(problems: list[str], source: str) -> None:
    """Raises one ValueError with all problems, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        details = "\n  ".join(problems)
        raise ValueError(
            f"the weights do not fit the model by the names of source={source!r}; {count}:"
            f"\n  {details}"
        )


def _is_dropped(table: Table, key: str) -> bool:
    return key.endswith(_BUFFERS) or _matches_any(table.dropped, key)


def _matches_any(templates: tuple[str, ...], key: str) -> bool:
    return any(match_name(template, key) is not None for template in templates)


def _frozen(model: nnx.Module, table: Table, key: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The expected value of a tensor that the model computes, or None."""
    for template, compute in table.frozen:
        if (numbers := match_name(template, key)) is not None:
            return compute(model, numbers, shape)
    return None
