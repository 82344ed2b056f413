"""Every number of the papers' tables: `published/*.json`.

Models, schemes and data sets have this library's names. What the figures show has no printed
numbers; those that Heo et al. published with their code are "heo/code", and the accuracies of
LaPE's main text are "lape/main_text".
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from rope_jax.config.resolve import model_overrides
from rope_jax.models.registry import find_model
from rope_jax.names.notation import parse, unordered
from rope_jax.weights.metadata import options_of_weights

PAPERS = ("thesis", "heo", "lape", "cat")
_ELSEWHERE = {"code": "published results of the code", "main_text": "main text"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A published number, or the text of a table of settings.

    Attributes:
        artifact: "thesis/table_4.1".
        source: the paper and its table, in words.
        key: what was measured: `quantity` ("top1", "miou" and "box_ap" in percent,
            "images_per_second", ...), and as far as it applies `model`, `position`, `options`,
            `dataset`, `resolution` [H, W], `kernel`, `task`; of settings `setting`.
        value: the number, or the text.
    """

    artifact: str
    source: str
    key: Mapping[str, Any]
    value: float | int | str


@functools.cache
def published(artifact: str | None = None) -> tuple[Cell, ...]:
    """The cells of a table, in its order; None for those of all papers.

    >>> len(published("thesis/table_4.1")), published("thesis/table_4.1")[0].value
    (39, 81.8)

    Raises:
        KeyError: no such table.
    """
    if artifact is None:
        return tuple(cell for name in _tables() for cell in published(name))
    source, cells = _tables()[artifact]
    return tuple(
        Cell(
            artifact, source, {k: v for k, v in cell.items() if k != "published"}, cell["published"]
        )
        for cell in cells
    )


@functools.cache
def _tables() -> dict[str, tuple[str, list[dict[str, Any]]]]:
    tables = {}
    for paper in PAPERS:
        content = _read(paper)
        for name, table in content["artifacts"].items():
            words = _ELSEWHERE.get(name, name.replace("_", " "))
            tables[f"{paper}/{name}"] = (f"{content['source']}, {words}", table["cells"])
    return tables


@functools.cache
def recipes() -> tuple[dict[str, Any], ...]:
    """The papers' tables of hyperparameters, and those of their code.

    Each has `source`, the `recipe` of `configs` that follows it, with its arguments, and
    `settings`: fields of the config -> printed values. `differs` lists the fields for which the
    recipe has another value, and `note` gives the reason.
    """
    return tuple(_read("recipes"))


def _read(name: str) -> Any:
    folder = importlib.resources.files("rope_jax.papers") / "published"
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


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
