"""The digits recipe with several schemes: accuracy at every resolution, for the README's table.

    python -m experiments digits --out experiments/results/digits_cpu.json

Runs `rope_jax.main` once for each scheme and seed; runs that are finished in the workdir are not
repeated. Takes about ten minutes on two CPU cores.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks._runner import Keep

SCHEMES = ["none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope"]
MORE_SEEDS = [1, 2]
RECIPE = "configs/digits.py"


def train(position: str, seed: int, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Trains one model and returns the rows of its evaluation."""
    recipe = f"--config={RECIPE}:position={position},seed={seed}"
    command = [sys.executable, "-m", "rope_jax.main", recipe, f"--workdir={workdir}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "results.json").read_text())["eval"]


def run(
    keep: Keep,
    *,
    workdir: pathlib.Path = pathlib.Path("runs/compare"),
    schemes: list[str] = SCHEMES,
    repeat: str = "rope_mixed",
    more_seeds: list[int] = MORE_SEEDS,
) -> None:
    """Trains every scheme with seed 0, and one scheme with further seeds.

    Args:
        keep: saves the result.
        workdir: folder for the workdirs of the runs
        schemes: schemes to train
        repeat: scheme to train with further seeds
        more_seeds: further seeds of that scheme
    """
    settings = {"workdir": workdir, "schemes": schemes, "more_seeds": more_seeds}
    settings |= {"repeat": repeat, "recipe": RECIPE}
    start, runs = time.perf_counter(), []
    for position, seed in [(x, 0) for x in schemes] + [(repeat, x) for x in more_seeds]:
        folder = workdir / (position if seed == 0 else f"{position}-{seed}")
        rows = train(position, seed, folder)
        runs.append({"position": position, "seed": seed, "eval": rows})
        accuracies = ", ".join(f"{row['top1']:.1%}" for row in rows)
        print(f"{position} (seed {seed}): {accuracies}", flush=True)
        seconds = time.perf_counter() - start
        keep(settings=settings, cores=os.cpu_count(), seconds=seconds, runs=runs)
