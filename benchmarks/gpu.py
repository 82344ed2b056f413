"""Everything that needs a GPU, in one command: tests, measured choices of kernels, speed.

    python -m benchmarks gpu --out=benchmarks/results

Runs one after the other, in separate processes: the tests in tests/gpu, `rope_jax tune` for MODELS,
and `benchmarks speed`, in which calls without a named implementation use these choices. The same
command continues where an earlier one ended. In the folder --out,

    tests_gpu_SOURCES.jsonl   has a line with the outcome of each test, as they end
    speed_gpu.json            is the result that `make tables` reads
    cache/kernels/*.json      are the choices, for kernels/rope_jax_kernels/measured
    cache/, *.done            can be deleted once everything is complete
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax

from benchmarks._runner import Keep
from rope_jax_kernels.tuning.choices import hash_sources

# Model, position, images on one GPU, and further arguments of `tune`, as `speed` measures them.
MODELS = (
    ("deit3_s16", "axial_rope", 256),
    ("swin_t", "axial_rope", 256),
    ("nat_mini", "axial_rope", 256),
    ("deit3_s16", "rope_mixed", 256, "--train"),
    ("swin_t", "axial_rope", 128, "--train"),
    ("nat_mini", "axial_rope", 128, "--train"),
    ("deit3_b16", "axial_rope", 256),
    ("swin_t", "rpb", 256),
    ("nat_mini", "rpb", 256),
)


def steps(out: pathlib.Path, outcomes: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The name and the command of each step."""
    # Side by side; one process runs all tests with the largest arrays.
    workers = ["-q", "-p", "no:cacheprovider", "-n", "4", "--dist", "loadgroup"]
    yield "tests", ["pytest", "tests/gpu", *workers, f"--outcomes={outcomes}"]
    for model, position, batch, *training in MODELS:
        options = [f"--model={model}", f"--position={position}", f"--batch={batch}", *training]
        name = "_".join(["tune", model, position, *(["train"] if training else [])])
        yield name, ["rope_jax.tune", *options, "--seconds=45"]
    yield "speed", ["benchmarks", "speed", f"--out={out}/speed_gpu.json"]


def run(keep: Keep, *, out: pathlib.Path) -> None:
    """Runs the steps that have not succeeded yet, and fails if one of them fails.

    Args:
        keep: unused, because `out` is a folder.
        out: folder for results
    """
    if jax.default_backend() != "gpu":
        raise SystemExit(f"jax runs on {jax.default_backend()}, not on a GPU")
    out.mkdir(parents=True, exist_ok=True)
    outcomes = out / f"tests_gpu_{hash_sources()}.jsonl"
    cache, failed = out.resolve() / "cache", []
    caches = {"ROPE_JAX_CACHE": f"{cache}", "ROPE_JAX_TEST_CACHE": f"{cache}/tests"}
    for name, command in steps(out, outcomes):
        done = out / f"{name}_{jax.__version__}_{hash_sources()}.done"
        if not done.exists():
            print(f"{name}: {' '.join(command)}", flush=True)
            if subprocess.run([sys.executable, "-m", *command], env=os.environ | caches).returncode:
                failed.append(name)
            else:
                done.touch()
    # Those of an earlier call are not repeated.
    if outcomes.exists() and '"outcome": "failed"' in outcomes.read_text():
        failed.append(f"tests of {outcomes}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
