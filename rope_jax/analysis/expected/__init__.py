"""What the papers report, as data: every number with the table it stands in.

An entry says `source`, `model` and `position` in this library's names (or `other_model`, which it does not have), and what was measured:
`dataset`, `resolution` [H, W] and `top1` in percent; or `images_per_second` with the `kernel` and `machine`; or the `value` of another
`task`.
"""

import functools
import importlib.resources
import json
from typing import Any

from rope_jax.positions.grammar import Sum, parse

NAMES = ("thesis", "heo", "lape", "cat")


@functools.cache
def entries() -> tuple[dict[str, Any], ...]:
    """All entries of all papers."""
    return tuple(entry for name in NAMES for entry in _read(name))


@functools.cache
def recipes() -> tuple[dict[str, Any], ...]:
    """The papers' tables of hyperparameters.

    Each says `source`, the `recipe` of `configs` that follows it, with its arguments, and `settings`: fields of the config -> what the
    table prints. `differs` names fields in which the recipe has another number, and `note` why.
    """
    return _read("recipes")


@functools.cache
def speedups() -> tuple[dict[str, Any], ...]:
    """How many times faster the thesis found one form of the rotation than another, over its 300 problem sizes (table A.2).

    Each says `precision` (of features and angles), the `form` and the one it is `over`, and `average`, `least` and `most` in percent, as
    printed. They are not all of one kind: those of "fused" are ratios times 100, for the text's 9.34 times over torch.compile is a
    hundredth of the mean of its three averages; those of "compiled" are negative here and there, so they are changes.
    """
    return _read("speedups")


def _read(name: str) -> tuple[dict[str, Any], ...]:
    folder = importlib.resources.files("rope_jax.analysis.expected")
    return tuple(json.loads((folder / f"{name}.json").read_text()))


def find(*, model: str, position: str, dataset: str, resolution: list[int]) -> list[dict[str, Any]]:
    """Accuracies of a model with a scheme; the order of a scheme's options does not matter."""
    wanted = _canonical(position)
    return [
        entry
        for entry in entries()
        if "top1" in entry
        and "variant" not in entry
        and (entry.get("model"), entry["dataset"], entry["resolution"]) == (model, dataset, list(resolution))
        and _canonical(entry["position"]) == wanted
    ]


@functools.cache
def _canonical(position: str) -> frozenset:
    """A scheme as nested sets, whatever the order in which it is written."""
    return _as_set(parse(position))


def _as_set(written: Sum) -> frozenset:
    return frozenset((call.name, frozenset(call.options), tuple(map(_as_set, call.inner))) for call in written.calls)
