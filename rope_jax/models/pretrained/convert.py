"""Conversion between the weights of other code and a model's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.layers import STORED
from rope_jax.models.pretrained.dense import detectron2
from rope_jax.models.pretrained.detrex import detrex
from rope_jax.models.pretrained.heads import mask2former, mmseg, segmenter, vit_adapter
from rope_jax.models.pretrained.hierarchical import nat, naver, swin
from rope_jax.models.pretrained.isotropic import deit, dinov2, dinov3, lape, resformer
from rope_jax.models.pretrained.layouts import Slot
from rope_jax.models.pretrained.links import (
    CLASSIFIER,
    HEAD,
    Link,
    fit,
    is_backbone,
    links_of,
    missing_head,
    named,
    not_floating,
    slots_of,
)
from rope_jax.models.pretrained.other_stems import cat, cct, ceit, t2t
from rope_jax.models.pretrained.tables import Table, begins, match_name
from rope_jax.models.pretrained.timm import timm
from rope_jax.positions.grids import Grid
from rope_jax.text import closest

# Without a source, the first one that fits is used: sources with many models come first.
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
    "mmseg": mmseg,
    "segmenter": segmenter,
    "detectron2": detectron2,
    "vit_adapter": vit_adapter,
    "detrex": detrex,
    "mask2former": mask2former,
}

DENSE = ("mmseg", "segmenter", "detectron2", "vit_adapter", "detrex", "mask2former")
"""Sources that name a model with its head; others name classifiers, whose backbone one may be."""

_ROUNDING = 2e-5  # of a sinusoid whose angle was rounded to float32, at the 200th token

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Grids = Mapping[str, Grid]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A plan of a conversion, derived from names, shapes and dtypes alone.

    Attributes:
        links: which tensor fills which parameter.
        zeros: parameters that the file lacks and that are 0 in its model.
        frozen: expected values of tensors that the model computes, by name.
        problems: everything that does not fit.
        new_head: whether the model's head keeps its initial weights.
        unused: tensors of a classifier that the model, which is none, has no place for.
        fresh: starts of the names of parameters that keep their initial weights, as no classifier
            has them.
    """

    links: list[Link]
    zeros: list[Slot]
    frozen: dict[str, np.ndarray]
    problems: list[str]
    new_head: bool
    unused: list[str]
    fresh: tuple[str, ...]


def name_table(model: nnx.Module, source: str) -> Table:
    """The names of a source for a model; raises ValueError for an unknown source."""
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is unknown; {closest(source, SOURCES)}")
    return SOURCES[source](model)


def convert_state_dict(
    model: nnx.Module,
    state_dict: Mapping[str, Any],
    *,
    source: str,
    grids: Grids | None = None,
    new_head: bool = False,
) -> None:
    """Loads torch-named weights into a model, in place.

    Weights are cast to the model's dtype and layout. Channels of queries and keys are permuted
    if the source pairs them differently for its rotation, and bias tables are flipped if source
    and model count offsets in opposite directions. Tables of another map or window are resized by
    their scheme's rule.

    >>> import rope_jax
    >>> from rope_jax.models.pretrained import export_state_dict
    >>> small = {"width": 8, "heads": 1, "depth": 1, "image_size": 32, "num_classes": 2}
    >>> trained = rope_jax.create_model("deit_ti16", seed=1, **small)
    >>> state_dict = export_state_dict(trained, source="timm")
    >>> state_dict["head.weight"].shape
    (2, 8)
    >>> model = rope_jax.create_model("deit_ti16", **small)
    >>> rope_jax.convert_state_dict(model, state_dict, source="timm")
    >>> bool((model.head.kernel[...] == trained.head.kernel[...]).all())
    True

    Args:
        model: from `rope_jax.create_model`.
        state_dict: arrays by their names in the source's files.
        source: naming convention: "timm", "naver" (RoPE-ViT), "deit", "swin", "nat", "lape", "cct",
            "ceit", "t2t", "cat", "dinov2", "dinov3" or "resformer"; for dense prediction
            "detectron2" (ViTDet), "detrex" (DINO), "vit_adapter", "mmseg", "segmenter" or
            "mask2former". With those of classifiers the backbone of a model of dense prediction is
            filled.
        grids: (rows, columns) of the map or window of tables, by name. Other tables are taken to be
            square, as all official ones are, or else of the model's shape. Needed only for a table
            whose length allows both.
        new_head: leave the model's head as it is if the weights have none or one for other classes.

    Parameters that keep their initial weights are printed: of a new head, and what a model of dense
    prediction has beyond a classifier.

    Raises:
        ValueError: names or shapes that do not fit, all of them in one message; the model is not
            changed.
    """
    backbone = source not in DENSE and hasattr(model, "backbone")
    plan = load_state_dict(model, state_dict, source=source, grids=grids, new_head=new_head)
    if told := report(model, plan, backbone=backbone):
        print(told)


def load_state_dict(
    model: nnx.Module,
    state_dict: Mapping[str, Any],
    *,
    source: str,
    grids: Grids | None = None,
    new_head: bool = False,
) -> Conversion:
    """As `convert_state_dict`, but prints nothing, and returns what was done."""
    whole = model
    if source not in DENSE:
        model = getattr(model, "backbone", model)
    if nested := [key for key, value in state_dict.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"state_dict holds dictionaries under {', '.join(nested)}: pass the one that holds "
            "the weights by itself"
        )
    arrays = {key: np.asarray(array) for key, array in state_dict.items()}
    shapes = {key: (array.shape, array.dtype) for key, array in arrays.items()}
    how = {"grids": grids, "new_head": new_head, "backbone": model is not whole}
    conversion = plan_conversion(model, shapes, source=source, **how)
    problems = list(conversion.problems)
    for key, want in conversion.frozen.items():
        precision = float(jnp.finfo(arrays[key].dtype).eps)
        if not np.allclose(arrays[key], want, rtol=precision, atol=_ROUNDING):
            problems.append(
                f"{key} is computed here, and is not what the file holds: create the model with "
                "the position that these weights were trained with"
            )
    refuse(problems, source)
    variables = dict(nnx.to_flat_state(nnx.state(model, STORED)))
    values: dict[tuple, np.ndarray] = {}
    for link in conversion.links:
        slot, variable = link.slot, variables[link.slot.path]
        value = values.setdefault(slot.path, np.empty(variable.shape, variable.dtype))
        array = arrays[link.key]
        array = array if link.rule.cut is None else array[link.rule.cut]
        array = link.rule.read(array.astype(variable.dtype), slot)
        slot.of(value)[...] = array if slot.grid is None else _resized(array, slot)
    for slot in conversion.zeros:
        values[slot.path] = np.zeros(variables[slot.path].shape, variables[slot.path].dtype)
    for path, value in values.items():
        variables[path].set_value(jax.device_put(value))
    return conversion


def report(
    model: nnx.Module,
    plan: Any,
    *,
    backbone: bool,
    head: str | None = None,
    epsilon: str = "",
) -> str:
    """The parameters of a model that no weight of a file has filled; "" if there are none.

    Args:
        model: that was filled.
        plan: by which it was, a `Conversion` or an `own.Plan`.
        backbone: whether the weights are those of the backbone of a model of dense prediction.
        head: the name of the head of their own model; None for a classifier.
        epsilon: what else to report.
    """
    lines, new = [], [start.rstrip(".") for start in plan.fresh]
    if backbone:
        stored = nnx.to_pure_dict(nnx.state(model, STORED))
        new += [name for name in ("neck", "head") if stored.get(name)]
    if new:
        trained_as = "a classifier" if head is None else f"a model with the head {head!r}"
        unused = f", not used {', '.join(plan.unused)}" if backbone and plan.unused else ""
        lines.append(f"weights of {trained_as}: new {', '.join(new)}{unused}{epsilon}")
    if plan.new_head:
        lines.append(f"head: new, {model.num_classes} classes")
    if zeros := [slot.name for slot in getattr(plan, "zeros", ())]:
        lines.append(f"not in the weights, and 0: {', '.join(zeros)}")
    return "\n".join(lines)


def _resized(table: np.ndarray, slot: Slot) -> np.ndarray:
    """A table of the map `slot.grid`, resized to the model's by its scheme's rule."""
    # A copy of the scheme as if it had been created for the file's map.
    scheme, layered = nnx.clone(slot.scheme), slot.layer is not None
    scheme.stage = dataclasses.replace(scheme.stage, grid=slot.grid)
    parameter = slot.path[-1]
    getattr(scheme, parameter).set_value(jnp.asarray(table[None] if layered else table))
    scheme.resize(slot.scheme.stage.grid)
    resized = np.asarray(getattr(scheme, parameter)[...])
    return resized[0] if layered else resized


def export_state_dict(model: nnx.Module, *, source: str) -> dict[str, np.ndarray]:
    """A model's weights with the names and layouts of a source.

    `convert_state_dict` restores them bit for bit.

    Args:
        model: from `rope_jax.create_model`.
        source: see `convert_state_dict`.

    Raises:
        ValueError: the source has no name for some of the parameters; the message lists them.
    """
    links, problems = links_of(model, name_table(model, source), source)
    refuse(problems, source)
    variables = dict(nnx.to_flat_state(nnx.state(model, STORED)))
    pieces: dict[str, list[tuple[tuple[bool, int], np.ndarray]]] = {}
    for link in links:
        array = link.slot.of(np.asarray(variables[link.slot.path][...]))
        start = 0 if link.rule.cut is None else link.rule.cut.start or 0
        place = (start < 0, start)  # those that are counted from the end are the last
        pieces.setdefault(link.key, []).append((place, link.rule.write(array, link.slot)))
    exported = {}
    for key, found in pieces.items():
        arrays = [array for _, array in sorted(found, key=lambda piece: piece[0])]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        exported[key] = np.ascontiguousarray(whole)
    return exported


def table_grids(model: nnx.Module, *, source: str) -> dict[str, Grid]:
    """(rows, columns) of the map or window of each of a model's tables, by name in a file."""
    links, _ = links_of(model, name_table(model, source), source)
    return {link.key: link.slot.own_grid for link in links if link.rule.grid}


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
    table = name_table(model, source)
    fresh = _fresh(model, table, shapes)
    found, problems = links_of(model, table, source, fresh)
    links, zeros, missing, frozen, left, grids = [], [], [], {}, dict(shapes), grids or {}
    found, new_head = _without_head(found, shapes, new_head)
    headless = new_head or not model.num_classes
    backbone = backbone or is_backbone(model, fresh)
    dropped = CLASSIFIER if backbone else (HEAD,) if headless else ()
    names = {theirs for ours, theirs, _ in table.rows if ours.startswith(dropped)}
    unused = [key for key in left if key in names - {link.key for link in found}]
    left = {key: shape for key, shape in left.items() if key not in unused}
    tables = {link.key for link in found if link.rule.grid}
    for key in grids:
        if key not in tables:
            problems.append(f"grids has {key}, which is no table of this model: leave it out")
    for link in found:
        left.pop(link.key, None)
        if link.key in shapes:
            given = dataclasses.replace(link.slot, grid=grids.get(link.key))
            grid, problem = fit(dataclasses.replace(link, slot=given), *shapes[link.key])
            problems += [problem] if problem else []
            slot = dataclasses.replace(link.slot, grid=grid)
            links.append(dataclasses.replace(link, slot=slot))
        elif _matches_any(table.zeros, link.key):
            zeros.append(link.slot)
        else:
            missing.append(link)
    heads = [link.key for link in found if link.slot.name.startswith(HEAD)]
    if problem := missing_head(model, heads, [link.key for link in missing]):
        problems.append(problem)
        missing = [link for link in missing if link.key not in heads]
    problems += [f"{x.key} is missing: it fills {x.slot.name} of the model" for x in missing]
    for key, (shape, dtype) in left.items():
        if _matches_any(table.dropped, key):
            continue
        want = _frozen(model, table, key, tuple(shape))
        if want is None:
            problems.append(
                f"{key} of shape {list(shape)} is not expected: no parameter of this model takes it"
            )
        elif want.shape != tuple(shape):
            problems.append(
                f"{key} has shape {list(shape)}, but what the model computes in its place has "
                f"shape {list(want.shape)}"
            )
        elif not jnp.issubdtype(dtype, jnp.floating):
            problems.append(not_floating(key, dtype))
        else:
            frozen[key] = want
    return Conversion(links, zeros, frozen, problems, new_head, unused, fresh)


def _fresh(model: nnx.Module, table: Table, shapes: Shapes) -> tuple[str, ...]:
    """Starts of the names of what a family adds to classifiers, where the file has none of it."""
    starts = getattr(model, "beyond_classifier", ())
    slots = list(slots_of(model)) if starts else []

    def there(start: str) -> bool:
        own = [slot for slot in slots if begins(slot.name, (start,))]
        return not own or any(link.key in shapes for slot in own for link in named(table, slot))

    return tuple(start for start in starts if not there(start))


def _without_head(links: list[Link], shapes: Shapes, allowed: bool) -> tuple[list[Link], bool]:
    """The links without those of a head that stays new, and whether there is such a head."""
    heads = [link for link in links if link.slot.name.startswith(HEAD)]
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


def _matches_any(templates: tuple[str, ...], key: str) -> bool:
    return any(match_name(template, key) is not None for template in templates)


def _frozen(model: nnx.Module, table: Table, key: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The expected value of a tensor that the model computes, or None."""
    for template, compute in table.frozen:
        if (numbers := match_name(template, key)) is not None:
            return compute(model, numbers, shape)
    return None
