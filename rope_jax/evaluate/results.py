"""Files and tables of results: `results.json` of runs, `evaluations.json` of other evaluations."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.names.text import format_table
from rope_jax.system.files import read_json, set_aside, write_file
from rope_jax.tasks import TASKS, Task
from rope_jax.tasks.evaluator import Row

FRACTIONS = ("top1", "top5")  # of `count` images; other scores have no interval over images


def row_task(row: Row) -> Task:
    """The task whose main score a row has.

    >>> row_task({"miou": 0.5, "accuracy": 0.9}).score_name
    'mean IoU'
    """
    return next(task for task in TASKS.values() if next(iter(task.titles)) in row)


def main_score(row: Row) -> str:
    """The name of a row's first score: top-1 accuracy, mean IoU or average precision.

    >>> main_score({"resolution": [64, 64], "miou": 0.5, "accuracy": 0.9})
    'miou'
    """
    return next(iter(row_task(row).titles))


def class_score(row: Row) -> tuple[str, str] | None:
    """The key of a row's list of class scores, and its name in a sentence; None without one.

    >>> class_score({"miou": 0.5, "iou": [0.5, None]}), class_score({"top1": 0.5})
    (('iou', 'intersection over union'), None)
    """
    score = row_task(row).class_score
    return score if score is not None and score[0] in row else None


def format_score(fraction: float | None) -> str:
    """Formats a fraction for a table; a dash for None, where there is nothing to score.

    >>> format_score(0.5), format_score(None)
    ('0.5000', '-')
    """
    return "-" if fraction is None else f"{fraction:.4f}"


def write_results(workdir: pathlib.Path, step: int, rows: Sequence[Row]) -> None:
    """Writes `results.json`.

    >>> import tempfile
    >>> workdir = pathlib.Path(tempfile.mkdtemp())
    >>> write_results(workdir, 100, [{"resolution": [8, 8], "top1": 0.5}])
    >>> read_results(workdir)["step"]
    100
    """
    _write(workdir / "results.json", {"step": step, "eval": list(rows)})


def read_results(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The content of `results.json`, or None without one.

    >>> read_results(pathlib.Path("runs/none")) is None
    True

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    return _read(workdir / "results.json", "step", "eval")


def usable_results(workdir: pathlib.Path) -> dict[str, Any] | None:
    """`read_results` for a run that can evaluate again: a damaged file is set aside with a warning.

    >>> import tempfile
    >>> workdir = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (workdir / "results.json").write_text('{"step": 100, "eval"')
    >>> usable_results(workdir) is None, sorted(path.name for path in workdir.iterdir())
    (True, ['results.json.damaged'])
    """
    return _read_or_set_aside(workdir / "results.json", "step", "eval")


def _read(path: pathlib.Path, *names: str) -> dict[str, Any] | None:
    """The entries of a file that have these names (earlier versions added a digest), or None."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    rows = value.get(names[-1]) if isinstance(value, dict) else None
    are_rows = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not are_rows or not value.keys() >= set(names):
        raise ValueError(f"{path} is damaged: it must hold {' and '.join(names)}")
    return {name: value[name] for name in names}


def _read_or_set_aside(path: pathlib.Path, *names: str) -> dict[str, Any] | None:
    try:
        return _read(path, *names)
    except ValueError as error:
        set_aside(path, f"{error}; its results are computed again when they are needed")
        return None


def _write(path: pathlib.Path, entries: dict[str, Any]) -> None:
    write_file(path, json.dumps(entries, indent=2) + "\n")


def same_rows(results: dict[str, Any], planned: Sequence[Row]) -> bool:
    """True if the results are those of `planned_rows`; earlier versions did not store the data.

    >>> results = {"step": 100, "eval": [{"resolution": [8, 8], "protocol": "whole", "top1": 0.5}]}
    >>> same_rows(results, [{"resolution": [8, 8], "protocol": "whole"}])
    True
    """
    rows = results["eval"]
    return len(rows) == len(planned) and all(
        ({"data": plan.get("data")} | row).items() >= plan.items()
        for row, plan in zip(rows, planned, strict=True)
    )


def results_table(rows: Sequence[Row], published: Mapping[int, float] | None = None) -> str:
    """Scores by resolution (and seed, and protocol), for a terminal.

    >>> print(results_table([{"resolution": [8, 12], "top1": 0.5, "top5": 1.0, "count": 360}]))
    resolution  top-1   top-5   images
    ----------  ------  ------  ------
          8x12  0.5000  1.0000     360

    Args:
        rows: where several are of one resolution and seed, a column has the words in which their
            protocols differ.
        published: main scores that others published, by the side of square images; they get a
            column.
    """
    columns = {"resolution": ["x".join(map(str, row["resolution"])) for row in rows]}
    for score, title in row_task(rows[0]).titles.items():
        if score in rows[0]:
            columns[title] = [format_score(row[score]) for row in rows]
    if published:
        sides = [h if h == w else 0 for h, w in (row["resolution"] for row in rows)]
        columns["published"] = [format_score(published.get(side)) for side in sides]
    columns["images"] = [str(row["count"]) for row in rows]
    if "seed" in rows[0]:
        columns = {"seed": [str(row["seed"]) for row in rows]} | columns
    if len({(*row["resolution"], row.get("seed")) for row in rows}) < len(rows):
        columns["protocol"] = _differences(rows)
    return format_table(list(columns), list(zip(*columns.values(), strict=True)))


def class_names(row: Row) -> list[str]:
    """The names of the classes of a row with a score of each, or their numbers."""
    return row.get("class_names") or [str(k) for k in range(len(row[class_score(row)[0]]))]


def class_table(rows: Sequence[Row]) -> str:
    """The score of each class, one column per row.

    >>> row = {"resolution": [8, 8], "miou": 0.5, "iou": [0.5, None], "class_names": ["sky", "sea"]}
    >>> print(class_table([row]))
    class  8x8
    -----  ------
    sky    0.5000
    sea    -

    Args:
        rows: with a `class_score`; a class that cannot be scored has None.
    """
    header = ["class", *("x".join(map(str, row["resolution"])) for row in rows)]
    columns = [[format_score(x) for x in row[class_score(row)[0]]] for row in rows]
    return format_table(header, list(zip(class_names(rows[0]), *columns, strict=True)))


def rows_by_line(position: str, rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    """The rows of each line of the accuracy plot: one per seed and protocol.

    >>> list(rows_by_line("ape", [{"seed": 0}, {"seed": 1}]))
    ['ape, seed 0', 'ape, seed 1']
    """
    lines: dict[str, list[Row]] = {}
    for row, protocol in zip(rows, _differences(rows), strict=True):
        seed = f"seed {row['seed']}" if "seed" in row else ""
        name = ", ".join(filter(None, (position, seed, protocol)))
        lines.setdefault(name, []).append(row)
    return lines


def _differences(rows: Sequence[Row]) -> list[str]:
    """The words of each row's protocol that differ; nothing where all protocols are equal."""
    protocols = [row.get("protocol", "").split() for row in rows]
    shared = set.intersection(*map(set, protocols))
    return [" ".join(word for word in words if word not in shared) for words in protocols]


def read_evaluations(path: pathlib.Path) -> list[Row]:
    """The rows of an `evaluations.json`; none without the file.

    >>> read_evaluations(pathlib.Path("runs/none/evaluations.json"))
    []

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    return (_read(path, "rows") or {"rows": []})["rows"]


def usable_evaluations(path: pathlib.Path) -> list[Row]:
    """`read_evaluations` for a command that can evaluate again: a damaged file is set aside.

    >>> usable_evaluations(pathlib.Path("runs/none/evaluations.json"))
    []
    """
    return (_read_or_set_aside(path, "rows") or {"rows": []})["rows"]


def add_evaluation(path: pathlib.Path, row: Row) -> None:
    """Adds a row to an `evaluations.json`, in place of one with an equal `asked`.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "evaluations.json")
    >>> add_evaluation(path, {"asked": {"resolution": [8, 8]}, "top1": 0.5})
    >>> add_evaluation(path, {"asked": {"resolution": [8, 8]}, "top1": 0.6})
    >>> read_evaluations(path)
    [{'asked': {'resolution': [8, 8]}, 'top1': 0.6}]
    """
    others = [other for other in usable_evaluations(path) if other.get("asked") != row["asked"]]
    _write(path, {"rows": [*others, row]})
