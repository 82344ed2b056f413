"""Every number of the papers' tables: `published/*.json`.

Models, schemes and data sets have this library's names. What the figures show has no printed
numbers; those that Heo et al. published with their code are "heo/code", and the accuracies of
LaPE's main text are "lape/main_text".
"""

import dataclasses
import functools
import importlib.resources
import itertools
import json
from collections.abc import Mapping
from typing import Any

from rope_jax.config.resolve import model_overrides
from rope_jax.models.registry import find_model
from rope_jax.names.notation import parse, unordered
from rope_jax.weights.metadata import options_of_weights


@dataclasses.dataclass(frozen=True)
class Cell:
    """A published number, or the text of a table of settings.

    Attributes:
        artifact: "thesis/table_4.1".
        key: what was measured: `quantity` ("top1", "miou" and "box_ap" in percent,
            "images_per_second", ...), and as far as it applies `model`, `position`, `options`,
            `dataset`, `resolution` [H, W], `kernel`, `task`; of settings `setting`.
        value: the number, or the text.
    """

    artifact: str
    key: Mapping[str, Any]
    value: float | int | str


def published(artifact: str | None = None) -> tuple[Cell, ...]:
    """The cells of a table, in its order; None for those of all papers.

    >>> len(published("thesis/table_4.1")), published("thesis/table_4.1")[0].value
    (39, 81.8)

    Raises:
        KeyError: no such table.
    """
    tables = _tables()
    return tuple(itertools.chain(*tables.values())) if artifact is None else tables[artifact]


@functools.cache
def _tables() -> dict[str, tuple[Cell, ...]]:
    """The cells of each table of the papers, by "PAPER/TABLE"."""
    return {
        (artifact := f"{paper}/{name}"): tuple(
            Cell(artifact, {k: v for k, v in cell.items() if k != "published"}, cell["published"])
            for cell in table["cells"]
        )
        for paper, content in _files().items()
        if paper != "recipes"
        for name, table in content["artifacts"].items()
    }


def recipes() -> tuple[dict[str, Any], ...]:
    """The papers' tables of hyperparameters, and those of their code.

    Each has `source`, the `recipe` of `configs` that follows it, with its arguments, and
    `settings`: fields of the config -> printed values. `differs` lists the fields for which the
    recipe has another value, and `note` gives the reason.
    """
    return tuple(_files()["recipes"])


@functools.cache
def _files() -> dict[str, Any]:
    """The contents of `published/*.json` in the order of their names: papers, and "recipes"."""
    folder = importlib.resources.files("rope_jax.papers") / "published"
    files = {x.name.removesuffix(".json"): x for x in folder.iterdir() if x.name.endswith(".json")}
    return {name: json.loads(files[name].read_text(encoding="utf-8")) for name in sorted(files)}


def find_published(*, model: str, position: str, options: str = "", **key: Any) -> list[Cell]:
    """The published numbers of a model with a scheme.

    The order of a scheme's options does not matter. Options that tables of results do not name are
    ignored: weight decay, initial values and resampling.

    >>> query = {"model": "vit_s16", "resolution": [512, 512], "quantity": "top1"}
    >>> [cell.value for cell in find_published(**query, position="rope2d(k_rope=4)")]
    [63.8]
    >>> find_published(**query, position="rope2d(k_rope=4)", options="depth=1")
    []

    Args:
        model: its name.
        position: the scheme.
        options: of the model, "imprint=none"; those on which its weights do not depend are ignored.
        **key: entries of `Cell.key`.
    """
    key["model"] = model
    return [
        cell
        for cell in published()
        if key.items() <= cell.key.items()
        and "position" in cell.key
        and same_position(cell.key["position"], position)
        and _identity(model, cell.key.get("options", "")) == _identity(model, options)
    ]


def same_position(first: str, second: str) -> bool:
    """True if two positions are the same, except for options that tables of results do not name.

    >>> same_position("rope_mixed+ape", "ape+rope_mixed")
    True
    """
    return _schemes(first) == _schemes(second)


@functools.cache
def _identity(model: str, options: str) -> dict[str, Any]:
    """The options of a model that its weights depend on."""
    overrides = model_overrides(options)
    changed = find_model(model).options.override(model, overrides)
    return options_of_weights(dataclasses.asdict(changed))


@functools.cache
def _schemes(position: str) -> frozenset:
    """The schemes of a position, without options that tables of results do not name."""
    return unordered(parse(position, "position"), ("decay", "std", "resize"))
