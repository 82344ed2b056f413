"""Results reported by the papers, each with its table.

An entry has `source`, `model` and `position` in this library's names (or `other_model` for a model
that it does not have), and a measurement: `dataset`, `resolution` [H, W] and `top1` in percent; or
`images_per_second` with `kernel` and `machine`; or the `value` of another `task`.
"""

import functools
import importlib.resources
import json
from typing import Any

from rope_jax.names.notation import Call, parse

NAMES = ("thesis", "heo", "lape", "cat")
Entry = dict[str, Any]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All entries of all papers."""
    return tuple(entry for name in NAMES for entry in _read(name))


@functools.cache
def recipes() -> tuple[Entry, ...]:
    """The papers' tables of hyperparameters.

    Each has `source`, the `recipe` of `configs` that follows it, with its arguments, and
    `settings`: fields of the config -> printed values. `differs` lists the fields for which the
    recipe has another value, and `note` gives the reason.
    """
    return _read("recipes")


@functools.cache
def speedups() -> tuple[Entry, ...]:
    """Speedups of one form of the rotation over another in the thesis (table A.2, 300 sizes).

    Each has `precision` (of features and angles), `form`, the form that it is `over`, and
    `average`, `least` and `most` in percent, as printed. Those of "fused" are ratios times 100: the
    text's factor of 9.34 over torch.compile is a hundredth of the mean of its three averages. Those
    of "compiled" are relative changes, and partly negative.
    """
    return _read("speedups")


def _read(name: str) -> tuple[Entry, ...]:
    folder = importlib.resources.files("rope_jax.analysis.expected")
    return tuple(json.loads((folder / f"{name}.json").read_text()))


def find(*, model: str, position: str, dataset: str, resolution: list[int]) -> list[Entry]:
    """Accuracies of a model with a scheme.

    The order of a scheme's options does not matter. Options that tables of results do not name are
    ignored: weight decay, initial values and resampling.

    >>> query = {"model": "vit_s16", "position": "rope2d(k_rope=4)", "resolution": [512, 512]}
    >>> [entry["top1"] for entry in find(**query, dataset="imagenet")]
    [63.8]
    """
    query = {"model": model, "dataset": dataset, "resolution": list(resolution)}
    return [
        entry
        for entry in entries()
        if "top1" in entry
        and "variant" not in entry
        and query.items() <= entry.items()
        and _canonical(entry["position"]) == _canonical(position)
    ]


@functools.cache
def _canonical(position: str) -> frozenset:
    """A scheme as nested sets."""
    return _as_set(parse(position, "position"))


_UNNAMED = ("decay", "std", "resize")


def _as_set(calls: tuple[Call, ...]) -> frozenset:
    return frozenset(
        (
            call.name,
            frozenset(option for option in call.options if option[0] not in _UNNAMED),
            tuple(map(_as_set, call.inner)),
        )
        for call in calls
    )
