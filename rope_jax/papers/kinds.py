"""What all tables and figures of the papers have: runs, cells, pictures, verdicts on claims."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.papers.claims import Claim, Verdict
from rope_jax.papers.lab import IMAGENET_SETS, Lab
from rope_jax.papers.runs import Run

Key = Mapping[str, Any]
Cell = dict[str, Any]  # key, published, ours, note


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A table or figure of a paper.

    Attributes:
        name: "table_4.1".
        title: what it shows.
        claims: of the paper, about its runs.
        note: what a reader should know: how ours differs, what the paper leaves open.
    """

    name: str
    title: str
    claims: Sequence[Claim] = dataclasses.field(default=(), kw_only=True)
    note: str = dataclasses.field(default="", kw_only=True)
    paper: str = dataclasses.field(default="", kw_only=True)  # set by `Paper`

    @property
    def id(self) -> str:
        """Its name in commands and results: "thesis/table_4.1"."""
        return f"{self.paper}/{self.name}"

    @property
    def quantity(self) -> str:
        """The name of the quantity in its cells."""
        return ""

    def runs(self, lab: Lab) -> list[Run]:
        """The runs that it needs."""
        return []

    def sides(self) -> dict[str, set[int]]:
        """The test sides in pixels that it needs, by model."""
        return {}

    def cells(self, lab: Lab) -> list[Cell]:
        """Its numbers, published and ours."""
        return []

    def draw(self, lab: Lab, cells: Sequence[Cell], path: pathlib.Path) -> list[pathlib.Path]:
        """Draws it, if it is a picture, and returns the files."""
        return []

    def row_names(self, lab: Lab) -> set[str]:
        """The names by which --only selects a part of it."""
        return {name for run in self.runs(lab) for name in run.names}

    def value(self, lab: Lab, run: Run, side: int | None) -> dict[int, float]:
        """The number of a run that claims are about, by seed; None for the training size."""
        scores = lab.scores(run, side)
        return {seed: lab.measured({seed: row})["mean"] for seed, row in scores.items()}

    def verdicts(self, lab: Lab) -> list[Verdict]:
        """The verdicts on its claims; runs that are one at this scale are judged once."""
        late, runs = lab.given is not None, self.runs(lab)
        if not late:
            runs = list({lab.run_folder(run, None): run for run in reversed(runs)}.values())
        value = functools.partial(self.value, lab)
        return [
            verdict
            for claim in self.claims
            for verdict in claim.judge(
                runs, value, late, sides=lab.distinct_sides, name=lab.model_name
            )
        ]


def make_cell(key: Key, published: Any, ours: Any, note: str = "") -> Cell:
    """A cell of results.json."""
    return {"key": dict(key), "published": published, "ours": ours, "note": note}


def key_names(key: Key) -> set[str]:
    """The names by which --only selects a cell."""
    return {key[name] for name in ("model", "position", "options") if name in key}


def explain(lab: Lab, run: Run, side: int | None, dataset: str | None, ours: Any) -> str:
    """The note on a cell: which model or data stands in, or why it is empty."""
    if ours is None and dataset in IMAGENET_SETS:
        if lab.small_scale:
            return "needs ImageNet: --scale=released or full"
        name = IMAGENET_SETS[dataset]
        return f"rope_jax evaluate WORKDIR --dataset={name} --images=FOLDER adds it"
    if ours is None and lab.scale == "released":
        named = run.data in lab.data
        return "no weights were published" if named else f"needs --data={run.data}=FOLDER"
    if ours is None:
        return "not trained yet"
    if not lab.small_scale:
        return ""
    if run.task != "classify":
        return f"{lab.model_name(run)} with a small head, on scenes"
    size = "" if side is None else f" at {lab.test_size(run, side)} px"
    return f"{lab.model_name(run)}, tested on {lab.images}{size}"


def lab_words(lab: Lab) -> str:
    """The scale and the images of a lab, in words."""
    if lab.given is not None:
        return "the runs of --runs"
    return f"scale {lab.scale}" + (f": {lab.images}" if lab.small_scale else "")


def given_runs(lab: Lab) -> list[Run]:
    """The user's runs as runs of a paper."""
    models = [result.config.model for result in lab.given]
    return list(dict.fromkeys(Run(m.name, m.position, "given", m.options) for m in models))


def given_dataset(lab: Lab) -> str:
    """The images on which the user's runs were tested.

    Folders of ImageNet have many names: 50,000 test images are its validation set.
    """
    row = lab.given[0].rows[0]
    return "imagenet" if row["count"] == 50_000 else row["dataset"]


def given_sides(lab: Lab, run: Run) -> list[int]:
    """The square test sides of the user's runs, ascending."""
    rows = [row for _, rows in lab.rows(run).values() for row in rows]
    return sorted({r["resolution"][0] for r in rows if len(set(r["resolution"])) == 1})
