"""Segmentation of scenes with several schemes: does RoPE help beside APE, and more at larger sizes?

    python -m experiments scenes --out experiments/results/scenes_cpu.json

Heo et al. (arXiv 2403.13298, tables 1 to 4) find rotary embeddings above APE in dense prediction.
Here the recipe of `make segment` is trained with every scheme and seed, one run per CPU core at a
time, and evaluated at five sizes. Runs that are finished in the workdir are not repeated:
`--minutes 8` stops after eight minutes, and the same command continues. Differences from APE are
computed per seed; intervals are 95 % (Student's t). Arguments after `--` are passed to all runs,
which then have separate workdirs: `... -- --config.epochs=0.1`.
"""

import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._runner import Keep
from experiments._claims import Table, interval, spread
from experiments._parts import name_of
from experiments.evidence import end, train
from rope_jax.text import markdown_table

SCHEMES = ["none", "ape", "rope2d", "rope_mixed", "rope_mixed+ape", "axial_rope"]
SEEDS = [0, 1, 2]
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
    """A scheme's mIoU less that of APE in points, by size and seed.

    The last row is "more so at larger sizes": the mean difference at sizes with more pixels than in
    training, less that at the training size.
    """
    own, base = scores(runs, position), scores(runs, BASE)
    by_seed = [{size: own[s][size] - base[s][size] for size in own[s]} for s in own if s in base]
    if not by_seed:
        return []
    trained, *others = by_seed[0]
    larger = [size for size in others if math.prod(size) > math.prod(trained)]
    more = [statistics.mean(d[size] for size in larger) - d[trained] for d in by_seed]
    return [*([d[size] for d in by_seed] for size in by_seed[0]), more]


def verdict(values: Sequence[float]) -> str:
    """Formats differences and what their interval says; one seed has none."""
    mean, half = interval(values)
    word = "above" if mean > half else "below" if mean < -half else "not shown"
    return f"{spread(values, '+')}, {word}"


def tables(runs: Sequence[Run], schemes: Sequence[str]) -> list[Table]:
    """mIoU by scheme and size, and differences from APE."""
    found = {position: list(scores(runs, position).values()) for position in schemes}
    found = {position: by_seed for position, by_seed in found.items() if by_seed}
    sizes = next(iter(found.values()), [{}])[0]
    means = [
        [f"`{position}`", *(spread([one[size] for one in by_seed]) for size in sizes)]
        for position, by_seed in found.items()
    ]
    gains = [
        [f"`{position}`", *map(verdict, differences(runs, position))]
        for position in found
        if position != BASE
    ]
    named = ["{}x{} px".format(*size) for size in sizes]
    note = "mIoU (%) on 200 test scenes, mean and 95 % interval over seeds; trained at the first "
    note += f"size. Differences from `{BASE}`, in points:"
    columns = ["position", *named]
    return [
        {"columns": columns, "rows": means, "note": note},
        {"columns": [*columns, "more so at larger sizes"], "rows": gains},
    ]


def collect(position: str, seed: int, workdir: pathlib.Path) -> list[Run]:
    """The rows of a finished run, or nothing."""
    path = workdir / "results.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["eval"]
    kept = [{key: row[key] for key in ("resolution", "miou", "accuracy", "count")} for row in rows]
    return [{"position": position, "seed": seed, "eval": kept}]


def command(position: str, seed: int, workdir: pathlib.Path, flags: Sequence[str]) -> list[str]:
    """The command of a run."""
    recipe = f"--config=configs/scenes.py:position={position},seed={seed}"
    return [sys.executable, "-m", "rope_jax.main", recipe, f"--workdir={workdir}", *flags]


def run(
    keep: Keep,
    *flags: str,
    workdir: pathlib.Path = pathlib.Path("runs/scenes_experiment"),
    minutes: float = math.inf,
    schemes: list[str] = SCHEMES,
    seeds: list[int] = SEEDS,
) -> None:
    """Trains every scheme with every seed, and compares them with APE.

    Args:
        keep: saves the result.
        flags: flags of all runs.
        workdir: folder for the workdirs of the runs
        minutes: time limit; the same command continues
        schemes: schemes to train
        seeds: seeds of each scheme
    """
    folders = {
        (position, seed): workdir / name_of([position, str(seed)], flags)
        for seed in seeds
        for position in schemes
    }

    def collect_all() -> dict[str, Any]:
        found = [one for of, folder in folders.items() for one in collect(*of, folder)]
        settings = {"schemes": schemes, "seeds": seeds, "flags": list(flags)}
        complete, cores = len(found) == len(folders), len(os.sched_getaffinity(0))
        made = {"runs": found, "tables": tables(found, schemes)}
        return keep(settings=settings, cores=cores, complete=complete, **made)

    commands = {
        folder.name: [command(*of, folder, flags)]
        for of, folder in folders.items()
        if not collect(*of, folder)
    }
    failed = train(commands, sorted(os.sched_getaffinity(0)), minutes, collect_all)
    result = collect_all()
    for table in result["tables"]:
        print(markdown_table(table["columns"], table["rows"]))
    end(len(result["runs"]), len(folders), failed)
