"""The four papers as they are declared, and the results of an artifact."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from rope_jax.evaluate.curves import available
from rope_jax.names.text import closest
from rope_jax.papers import cat, heo, lape, thesis
from rope_jax.papers.kinds import Artifact
from rope_jax.papers.lab import Lab


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper.

    Attributes:
        name: in ids.
        title: author and subject.
        artifacts: its tables and figures, in the order of its text.
    """

    name: str
    title: str
    artifacts: Sequence[Artifact]

    def __post_init__(self):
        own = [dataclasses.replace(artifact, paper=self.name) for artifact in self.artifacts]
        object.__setattr__(self, "artifacts", tuple(own))


DECLARED = (
    Paper("thesis", "Kane, thesis: Axial RoPE", thesis.ARTIFACTS),
    Paper("heo", "Heo et al.: RoPE for ViT", heo.ARTIFACTS),
    Paper("lape", "Yu et al.: LaPE", lape.ARTIFACTS),
    Paper("cat", "Erickson: Cross-Axis Transformer", cat.ARTIFACTS),
)
ARTIFACTS = {artifact.id: artifact for paper in DECLARED for artifact in paper.artifacts}


def find_artifacts(ids: Iterable[str]) -> list[Artifact]:
    """The tables and figures with these ids: "heo/figure_4", a paper ("heo"), or "all".

    Raises:
        ValueError: there is no such one; the message names the nearest.
    """
    found: dict[str, Artifact] = {}
    for name in ids:
        fitting = {x: a for x, a in ARTIFACTS.items() if name in ("all", x, a.paper)}
        if not fitting:
            names = [*ARTIFACTS, *(paper.name for paper in DECLARED), "all"]
            raise ValueError(f"{name} is no table or figure; {closest(name, names)}")
        found |= fitting
    return list(found.values())


def sides_by_model() -> dict[str, list[int]]:
    """The test sides in pixels of all tables and figures that a model is in."""
    sides: dict[str, set[int]] = {}
    for artifact in ARTIFACTS.values():
        for model, at in artifact.sides().items():
            sides.setdefault(model, set()).update(at)
    return {model: sorted(at) for model, at in sides.items()}


def result(artifact: Artifact, lab: Lab, folder: pathlib.Path) -> dict[str, Any]:
    """An artifact's entry in results.json, with its pictures in a folder."""
    cells = artifact.cells(lab)
    name = artifact.id.replace("/", "_")
    files = artifact.draw(lab, cells, folder / f"{name}.png") if available() else []
    rows = [rows[0] for run in artifact.runs(lab) for _, rows in lab.rows(run).values()]
    return {
        "title": artifact.title,
        "quantity": artifact.quantity,
        "note": artifact.note,
        "columns": getattr(artifact, "columns", "position"),
        "protocol": list(
            dict.fromkeys(f"{r['dataset']} {r['split']}, {r['protocol']}" for r in rows)
        ),
        "cells": cells,
        "claims": artifact.verdicts(lab),
        "files": [path.name for path in files],
    }
