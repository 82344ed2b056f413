"""Files and tables of results: `results.json` of runs, `evaluations.json` of other evaluations."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.files import update_file, write_file
from rope_jax.text import format_table

Row = dict[str, Any]


def write_results(workdir: pathlib.Path, step: int, rows: Sequence[Row]) -> None:
    """Writes `results.json`.

    >>> import tempfile
    >>> workdir = pathlib.Path(tempfile.mkdtemp())
    >>> write_results(workdir, 100, [{"resolution": [8, 8], "top1": 0.5}])
    >>> read_results(workdir)["step"]
    100
    """
    text = json.dumps({"step": step, "eval": list(rows)}, indent=2)
    write_file(workdir / "results.json", text + "\n")


def read_results(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The content of `results.json`, or None without one.

    >>> read_results(pathlib.Path("runs/none")) is None
    True
    """
    path = workdir / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def same_rows(results: dict[str, Any], wanted: Sequence[Row]) -> bool:
    """Whether the results' rows have the wanted resolutions, protocols and seeds, in this order.

    >>> results = {"step": 100, "eval": [{"resolution": [8, 8], "protocol": "whole", "top1": 0.5}]}
    >>> same_rows(results, [{"resolution": [8, 8], "protocol": "whole"}])
    True
    """
    keys = ("resolution", "protocol", "seed")
    return [{key: row[key] for key in keys if key in row} for row in results["eval"]] == wanted


def results_table(rows: Sequence[Row]) -> str:
    """Accuracy by resolution (and seed, and protocol), for a terminal.

    >>> print(results_table([{"resolution": [8, 12], "top1": 0.5, "top5": 1.0, "count": 360}]))
    resolution  top-1   top-5   images
    ----------  ------  ------  ------
          8x12  0.5000  1.0000     360

    Args:
        rows: where several are of one resolution and seed, a column has the words in which their
            protocols differ.
    """
    columns = {
        "resolution": ["x".join(map(str, row["resolution"])) for row in rows],
        "top-1": [f"{row['top1']:.4f}" for row in rows],
        "top-5": [f"{row['top5']:.4f}" for row in rows],
        "images": [str(row["count"]) for row in rows],
    }
    if "seed" in rows[0]:
        columns = {"seed": [str(row["seed"]) for row in rows]} | columns
    if len({(*row["resolution"], row.get("seed")) for row in rows}) < len(rows):
        columns["protocol"] = _differences(rows)
    return format_table(list(columns), list(zip(*columns.values(), strict=True)))


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
    """The words of each row's protocol that not all protocols have; nothing where all are equal."""
    protocols = [row.get("protocol", "").split() for row in rows]
    shared = set.intersection(*map(set, protocols))
    return [" ".join(word for word in words if word not in shared) for words in protocols]


def read_evaluations(path: pathlib.Path) -> list[Row]:
    """The rows of an `evaluations.json`; none without the file.

    >>> read_evaluations(pathlib.Path("runs/none/evaluations.json"))
    []
    """
    return json.loads(path.read_text())["rows"] if path.exists() else []


def add_evaluation(path: pathlib.Path, row: Row) -> None:
    """Adds a row to an `evaluations.json`, in place of one with an equal `asked`.

    Several processes may do this at the same time.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "evaluations.json")
    >>> add_evaluation(path, {"asked": {"resolution": [8, 8]}, "top1": 0.5})
    >>> add_evaluation(path, {"asked": {"resolution": [8, 8]}, "top1": 0.6})
    >>> read_evaluations(path)
    [{'asked': {'resolution': [8, 8]}, 'top1': 0.6}]
    """

    def with_row(text: str | None) -> str:
        rows = [] if text is None else json.loads(text)["rows"]
        rows = [other for other in rows if other["asked"] != row["asked"]]
        return json.dumps({"rows": [*rows, row]}, indent=2) + "\n"

    update_file(path, with_row)
