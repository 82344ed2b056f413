"""One kernel, forward and backward: the program that compute-sanitizer checks."""

import sys

import jax
import numpy as np

from tests.gpu.programs import OURS, at

RUNS = [run for run in OURS if at(True, run.implementation == "triton")]


def main(place):
    """Runs one of RUNS; fails if a result is not finite."""
    run = RUNS[place]
    for name, x in jax.jit(run)(*run.operands()).items():
        if not np.isfinite(np.float32(x)).all():
            sys.exit(f"{run}: {name} is not finite")
    print(f"{run} has run")


if __name__ == "__main__":
    main(int(sys.argv[1]))
