"""Finished runs, read from their workdirs and grouped by their settings."""

import dataclasses
import operator
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.config import Config, model_overrides, resolve_stored, settings
from rope_jax.evaluate import read_evaluations, read_results
from rope_jax.evaluate.results import Row, row_task
from rope_jax.models.registry import find_model
from rope_jax.names import plugins
from rope_jax.system.files import read_json
from rope_jax.training.metrics import read_metrics, seed_metrics


@dataclasses.dataclass(frozen=True)
class RunResults:
    """The files of one run, or of one seed of a run that trained several.

    Attributes:
        workdir: of the run.
        config: its settings, with the model's default position if none was given.
        step: the evaluated step.
        rows: of `results.json`, the training resolution first.
        others: rows of `evaluations.json`.
        metrics: lines of `metrics.jsonl`.
    """

    workdir: pathlib.Path
    config: Config
    step: int
    rows: Sequence[Row]
    others: Sequence[Row]
    metrics: Sequence[dict[str, Any]]

    @property
    def main_rows(self) -> list[Row]:
        """The rows of the first protocol, which are compared with other runs."""
        return [row for row in self.rows if row["protocol"] == self.rows[0]["protocol"]]

    @property
    def further_rows(self) -> list[Row]:
        """The rows of further protocols and other evaluations."""
        return [row for row in self.rows if row not in self.main_rows] + list(self.others)


Size = tuple[int, int]  # (height, width) in pixels
Groups = Mapping[str, Sequence[RunResults]]  # label of a row -> its runs, one for each seed


def read_runs(workdir: pathlib.Path) -> list[RunResults]:
    """Reads a workdir.

    Returns:
        One entry for each seed of the run.

    Raises:
        FileNotFoundError: the workdir has no results.
        ValueError: a plug-in of the run cannot be imported.
    """
    results = read_results(workdir)
    if results is None:
        problem = "has no results.json" if workdir.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{workdir} {problem}; complete its run first: rope_jax train --workdir={workdir} ..."
        )
    path = workdir / "config.json"
    config = resolve_stored(read_json(path), path)
    plugins.load(config.plugins, required_by=f"of the run {workdir}")
    position = config.model.position or find_model(config.model.name).position
    model = dataclasses.replace(config.model, position=position)
    config = dataclasses.replace(config, model=model)
    step, rows = results["step"], results["eval"]
    metrics = read_metrics(workdir / "metrics.jsonl")
    others = read_evaluations(workdir / "evaluations.json")
    return [
        RunResults(
            workdir,
            dataclasses.replace(config, seed=seed, seeds=1),
            step,
            [row for row in rows if row.get("seed", seed) == seed],
            [row for row in others if row.get("asked", {}).get("seed", config.seed) == seed],
            [seed_metrics(line, seed) for line in metrics],
        )
        for seed in config.all_seeds
    ]


def group_runs(runs: Sequence[RunResults]) -> dict[str, list[RunResults]]:
    """Groups runs of equal steps that differ only in their seed or in settings without effect.

    Returns:
        Label -> runs. The label is the position; the model is added if there are several, as are
        options in which models differ, and the workdir where the label would be ambiguous.

    Raises:
        ValueError: two runs have the same config and seed, or are of different tasks.
    """
    workdirs = {row_task(run.rows[0]).score_name: run.workdir for run in runs}
    if len(workdirs) > 1:
        (score, workdir), (other_score, other), *_ = workdirs.items()
        raise ValueError(
            f"{workdir} was evaluated by {score} and {other} by {other_score}: "
            "compare runs of one task"
        )
    shared = operator.attrgetter(
        *(
            name
            for name, field in settings().items()
            if name.startswith("eval.")
            or name == "data.path"
            or (name != "seed" and not field.metadata["resumable"])
        )
    )
    by_settings: dict[tuple, list[RunResults]] = {}
    for run in runs:
        group = by_settings.setdefault((run.step, shared(run.config)), [])
        if duplicates := [other.workdir for other in group if other.config.seed == run.config.seed]:
            raise ValueError(
                f"{duplicates[0]} and {run.workdir} hold the same run, of seed {run.config.seed}: "
                "leave one of them out"
            )
        group.append(run)
    models = [group[0].config.model for group in by_settings.values()]
    several_models = len({model.name for model in models}) > 1
    options = differing_options([model.options for model in models])
    groups: dict[str, list[RunResults]] = {}
    for group, model, changed in zip(by_settings.values(), models, options, strict=True):
        label = ", ".join([*[model.name][:several_models], model.position, *changed])
        workdir = group[0].workdir
        labels = (label, f"{label} ({workdir.name})", f"{label} ({workdir})")
        groups[next(label for label in labels if label not in groups)] = group
    return groups


def differing_options(texts: Sequence[str]) -> list[list[str]]:
    """For each of several `model.options`, the options that not all of them have alike.

    >>> differing_options(["depth=2,imprint=none", "depth=2,imprint=tanh", "depth=2"])
    [['imprint=none'], ['imprint=tanh'], []]
    """
    parsed = [model_overrides(text) for text in texts]
    return [
        [
            f"{name}={value}"
            for name, value in options.items()
            if any(other.get(name) != value for other in parsed)
        ]
        for options in parsed
    ]


def rows_by_size(runs: Sequence[RunResults]) -> dict[Size, dict[int, Row]]:
    """The rows of each run's first protocol, by resolution in the order of evaluation, and seed."""
    rows: dict[Size, dict[int, Row]] = {}
    for run in runs:
        for row in run.main_rows:
            rows.setdefault(tuple(row["resolution"]), {})[run.config.seed] = row
    return rows
