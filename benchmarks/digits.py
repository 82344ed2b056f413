"""The digits recipe with several schemes: accuracy at every resolution, as in the README's table.

Trains each (scheme, seed) by the command that a user would type, resuming what an earlier call left in the workdir, and collects the
results. Eight minutes on two quiet CPU cores. Run: python -m benchmarks digits --out benchmarks/results/digits_cpu.json
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from benchmarks._record import record, write

SCHEMES = ["none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope"]
CONFIG = "configs/digits.py"


def train(position: str, seed: int, workdir: pathlib.Path) -> list[dict]:
    """Trains one model and returns the rows of its evaluation."""
    command = [sys.executable, "-m", "rope_jax.main", f"--config={CONFIG}:position={position}", f"--workdir={workdir}"]
    subprocess.run([*command, f"--config.seed={seed}"], check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "results.json").read_text())["eval"]


def main(argv: list[str]) -> None:
    """Trains all schemes with seed 0, and some again with other seeds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks digits", description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/compare"), help="a folder for the runs' own")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--more-seeds", type=int, nargs="*", default=[1, 2], help="of the last scheme")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    start, runs = time.perf_counter(), []
    for position, seed in [*((scheme, 0) for scheme in args.schemes), *((args.schemes[-1], seed) for seed in args.more_seeds)]:
        rows = train(position, seed, args.workdir / (position if seed == 0 else f"{position}-{seed}"))
        runs.append({"position": position, "seed": seed, "eval": rows})
        print(f"{position} (seed {seed}): " + ", ".join(f"{row['top1']:.1%}" for row in rows), flush=True)
    seconds = time.perf_counter() - start
    write(
        record("digits", vars(args) | {"recipe": CONFIG, "workdir": str(args.workdir)}, cores=os.cpu_count(), seconds=seconds, runs=runs),
        args.out,
    )
