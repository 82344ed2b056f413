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
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks._runner import Keep
from experiments._claims import interval
from experiments.evidence import train

SCHEMES = ["none", "ape", "rope2d", "rope_mixed", "rope_mixed+ape", "axial_rope"]
SEEDS = [0, 1, 2]
BASE = "ape"
Size = tuple[int, int]
Run = dict[str, Any]  # position, seed, eval: rows of results.json


class Difference(NamedTuple):
    """A scheme's mIoU less that of APE, in points.

    Attributes:
        position: the scheme.
        size: at which both are evaluated; None for "more so at larger sizes": the mean difference
            at sizes with more pixels than in training, less that at the training size.
        mean, half_width: over seeds, with the half width of the 95 % interval.
        seeds: number of them.
    """

    position: str
    size: Size | None
    mean: float
    half_width: float
    seeds: int

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.mean > self.half_width:
            return "above"
        return "below" if self.mean < -self.half_width else "not shown"


def scores(runs: Sequence[Run], position: str) -> dict[int, dict[Size, float]]:
    """mIoU in percent of a scheme, by seed and size; the training size comes first."""
    return {
        run["seed"]: {tuple(row["resolution"]): 100 * row["miou"] for row in run["eval"]}
        for run in runs
        if run["position"] == position
    }


def differences(runs: Sequence[Run], position: str) -> list[Difference]:
    """A scheme's differences from APE at every size, and "more so at larger sizes" as the last.

    They are empty with fewer than two seeds of both.
    """
    own, base = scores(runs, position), scores(runs, BASE)
    seeds = sorted(own.keys() & base.keys())
    if len(seeds) < 2 or position == BASE:
        return []
    by_seed = [{size: own[s][size] - base[s][size] for size in own[s]} for s in seeds]
    trained, *others = by_seed[0]
    larger = [size for size in others if math.prod(size) > math.prod(trained)]
    more = [sum(d[size] for size in larger) / len(larger) - d[trained] for d in by_seed]
    columns = {size: [d[size] for d in by_seed] for size in by_seed[0]} | {None: more}
    return [
        Difference(position, size, *interval(values), len(seeds))
        for size, values in columns.items()
    ]


def collect(position: str, seed: int, workdir: pathlib.Path) -> list[Run]:
    """The rows of a finished run, or nothing."""
    path = workdir / "results.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["eval"]
    kept = [{key: row[key] for key in ("resolution", "miou", "accuracy", "count")} for row in rows]
    return [{"position": position, "seed": seed, "eval": kept}]


def folder(position: str, seed: int, flags: Sequence[str]) -> str:
    """Name of a run's workdir, which differs for other flags."""
    more = [flag.removeprefix("--config.").replace("/", "_") for flag in flags]
    return "-".join([position, str(seed), *more])


def command(position: str, seed: int, workdir: pathlib.Path, flags: Sequence[str]) -> list[str]:
    """The command of a run."""
    recipe = f"--config=configs/scenes.py:position={position},seed={seed}"
    run = [sys.executable, "-m", "rope_jax.main", recipe]
    return [*run, f"--workdir={workdir / folder(position, seed, flags)}", *flags]


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
    planned = [(position, seed) for seed in seeds for position in schemes]

    def collect_all() -> list[Run]:
        found = [
            one
            for position, seed in planned
            for one in collect(position, seed, workdir / folder(position, seed, flags))
        ]
        settings = {"schemes": schemes, "seeds": seeds, "flags": list(flags)}
        complete, cores = len(found) == len(planned), len(os.sched_getaffinity(0))
        keep(settings=settings, cores=cores, complete=complete, runs=found)
        return found

    commands = {
        folder(*one, flags): [command(*one, workdir, flags)]
        for one in planned
        if not collect(*one, workdir / folder(*one, flags))
    }
    failed = train(commands, sorted(os.sched_getaffinity(0)), minutes, collect_all)
    found = collect_all()
    for position in schemes:
        for one in differences(found, position):
            where = "more so at larger sizes" if one.size is None else "{}x{} px".format(*one.size)
            text = f"{one.mean:+.1f} ± {one.half_width:.1f} points of mIoU"
            print(f"{position} and {BASE}, {where}: {text}, {one.verdict}")
    more = "" if len(found) == len(planned) else "; run the same command again to continue"
    print(f"{len(found)} of {len(planned)} runs are finished{more}")
    if failed:
        raise SystemExit("; ".join(failed))
