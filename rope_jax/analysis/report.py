"""Compares finished runs: one table and one picture. `python -m rope_jax.analysis.report WORKDIR [WORKDIR ...] [--out=FOLDER]`."""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.config import from_json
from rope_jax.evaluate import read_results
from rope_jax.metrics import format_table

_OUT = flags.DEFINE_string("out", None, "folder for table and picture (default: the parent of the first workdir)")


def comparison_table(runs: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Top-1 accuracy in percent, one row per run and one column per resolution; the first column is the training resolution."""
    sizes = list(dict.fromkeys(tuple(row["resolution"]) for rows in runs.values() for row in rows))
    header = ("position", *(f"{h}x{w}" for h, w in sizes))
    body = []
    for name, rows in runs.items():
        found = {tuple(row["resolution"]): f"{100 * row['top1']:.1f}" for row in rows}
        body.append((name, *(found.get(size, "-") for size in sizes)))
    return format_table(header, body)


def main(arguments: list[str]) -> None:
    """Reads the workdirs and writes `comparison.txt` and `comparison.png`."""
    workdirs = [pathlib.Path(argument) for argument in arguments[1:]]
    if not workdirs:
        sys.exit("report: name at least one workdir of a finished run")
    runs = {}
    for workdir in workdirs:
        results = read_results(workdir)
        if results is None:
            sys.exit(f"report: {workdir} has no results.json; run rope_jax.main with --workdir={workdir} to its end first")
        name = from_json((workdir / "config.json").read_text()).model.position
        runs[name if name not in runs else f"{name} ({workdir.name})"] = results["eval"]
    out = pathlib.Path(_OUT.value) if _OUT.value else workdirs[0].parent
    out.mkdir(parents=True, exist_ok=True)
    table = comparison_table(runs)
    (out / "comparison.txt").write_text(table + "\n")
    print(f"top-1 accuracy (%) at test resolution; trained at the first one\n\n{table}\n\ntable: {out / 'comparison.txt'}")
    picture = accuracy_against_resolution(runs, out / "comparison.png")
    print(f"picture: {picture}" if picture else "no picture: matplotlib is not installed (pip install 'rope_jax[plot]')")


if __name__ == "__main__":
    app.run(main)
