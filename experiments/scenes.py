"""Segmentation of scenes with several schemes: is RoPE above APE, and more so at larger sizes?

    python -m experiments scenes --out experiments/results/scenes_cpu.json

Heo et al. (arXiv 2403.13298, tables 1 to 4) find rotary embeddings above APE in dense prediction.
Here `rope_jax compare` trains the recipe of `make segment` with every scheme and seed, and
evaluates at five sizes. It can be interrupted: the same command continues. Differences from APE are
computed per seed; intervals are 95 % (Student's t). Arguments after `--` are passed to all runs,
which then need another workdir: `... --workdir runs/short -- --config.epochs=0.1`.
"""

import math
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks._runner import Keep
from experiments._claims import Table, spread
from rope_jax.analysis.intervals import student
from rope_jax.analysis.runs import read_runs
from rope_jax.commands import compare
from rope_jax.names.text import markdown_table

SCHEMES = ["none", "ape", "rope2d", "rope_mixed", "rope_mixed+ape", "axial_rope"]
BASE = "ape"
Size = tuple[int, int]
Run = dict[str, Any]  # position, seed, eval: rows of results.json


def scores(runs: Sequence[Run], position: str) -> dict[int, dict[Size, float]]:
    """mIoU in percent of a scheme, by seed and size; the training size comes first."""
    return {
        run["seed"]: {tuple(row["resolution"]): 100 * row["miou"] for row in run["eval"]}
        for run in runs
        if run["position"] == position
    }


def differences(runs: Sequence[Run], position: str) -> list[list[float]]:
    """A scheme's mIoU minus that of APE in points, by size and seed.

    The last row is "more so at larger sizes": the mean difference at sizes with more pixels than in
    training, minus the difference at the training size.
    """
    scheme, base = scores(runs, position), scores(runs, BASE)
    by_seed = [
        {size: scheme[s][size] - base[s][size] for size in scheme[s]} for s in scheme if s in base
    ]
    trained, *others = by_seed[0]
    larger = [size for size in others if math.prod(size) > math.prod(trained)]
    more = [statistics.mean(d[size] for size in larger) - d[trained] for d in by_seed]
    return [*([d[size] for d in by_seed] for size in by_seed[0]), more]


def verdict(values: Sequence[float]) -> str:
    """Formats differences and the verdict of their interval; a single seed has none."""
    mean, half = student(values)
    word = "above" if mean > half else "below" if mean < -half else "not shown"
    return f"{spread(values, '+')}, {word}"


def tables(runs: Sequence[Run], schemes: Sequence[str]) -> list[Table]:
    """mIoU by scheme and size, and differences from APE."""
    by_position = {position: list(scores(runs, position).values()) for position in schemes}
    sizes = list(by_position[schemes[0]][0])
    means = [
        [
            f"`{position}`",
            *(spread([seed_scores[size] for seed_scores in by_seed]) for size in sizes),
        ]
        for position, by_seed in by_position.items()
    ]
    gains = [
        [f"`{position}`", *map(verdict, differences(runs, position))]
        for position in by_position
        if position != BASE
    ]
    size_columns = ["{}x{} px".format(*size) for size in sizes]
    note = "mIoU (%) on 200 test scenes, mean and 95 % interval over seeds; trained at the first "
    note += f"size. Differences from `{BASE}`, in points:"
    columns = ["position", *size_columns]
    return [
        {"columns": columns, "rows": means, "note": note},
        {"columns": [*columns, "more so at larger sizes"], "rows": gains},
    ]


def run(
    keep: Keep,
    *flags: str,
    workdir: pathlib.Path = pathlib.Path("runs/scenes_experiment"),
    schemes: list[str] = SCHEMES,
    seeds: int = 3,
) -> None:
    """Trains every scheme with every seed, and compares them with APE.

    Args:
        keep: saves the result.
        flags: flags of all runs.
        workdir: folder for the workdirs of the runs
        schemes: schemes to train
        seeds: number of seeds of each scheme
    """
    arguments = ["--config=scenes", f"--positions={','.join(schemes)}", f"--seeds={seeds}"]
    compare.main([*arguments, f"--out={workdir}", *flags])
    folders = sorted(path.parent for path in workdir.glob("*/results.json"))
    names = ("resolution", "miou", "accuracy", "count")
    runs = [
        {
            "position": result.config.model.position,
            "seed": result.config.seed,
            "eval": [{name: row[name] for name in names} for row in result.rows],
        }
        for folder in folders
        for result in read_runs(folder)
        if result.config.model.position in schemes
    ]
    result_tables = tables(runs, schemes)
    keep(cores=len(os.sched_getaffinity(0)), runs=runs, tables=result_tables)
    for table in result_tables:
        print(markdown_table(table["columns"], table["rows"]))
