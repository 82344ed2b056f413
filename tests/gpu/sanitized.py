"""Every kernel once, forward and backward: the program that compute-sanitizer watches."""

import sys

import jax
import numpy as np

from tests.gpu.programs import OURS, at


def main():
    """Runs all kernels; fails if a result is not finite."""
    runs = [run for run in OURS if at(True, run.implementation == "triton")]
    for run in runs:
        for name, x in jax.jit(run)(*run.operands()).items():
            if not np.isfinite(np.float32(x)).all():
                sys.exit(f"{run}: {name} is not finite")
        print(run, flush=True)
    print(f"{len(runs)} kernels have run")


if __name__ == "__main__":
    main()
