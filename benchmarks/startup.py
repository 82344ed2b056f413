"""Start-up: seconds from the start of a training process to its first step.

    python -m benchmarks startup --out benchmarks/results/startup_gpu.json

A ViT-B on a GPU, or a small model on a CPU: imports, images, model, compilation and the step, until
`rope_jax train` reports step 1. Each pair of processes shares a new cache folder: empty for the
first, filled for the second.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax

from benchmarks._runner import Keep

ROOT = pathlib.Path(__file__).parents[1]
COLUMNS = ("caches", "seconds to the first step", "least", "most", "starts")


def first_step(flags: list[str], cache: pathlib.Path) -> float:
    """Seconds from the start of a training process to the report of its first step.

    Args:
        flags: of the training command.
        cache: cache folder of the process.

    Raises:
        SystemExit: the process ends before its first step.
    """
    command = [sys.executable, "-m", "rope_jax.main", "--config=configs/digits.py", *flags]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environment = inherited | {"ROPE_JAX_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, f"--workdir={folder}/run"], cwd=ROOT, env=environment, **pipes
        ) as process,
    ):
        lines = []
        for line in process.stdout:
            if line.startswith("step "):
                seconds = time.monotonic() - begun
                process.kill()  # the rest of the run is not needed
                return seconds
            lines.append(line)
    raise SystemExit(f"the run ended before its first step:\n{''.join(lines[-20:])}")


def run(
    keep: Keep,
    *,
    model: str | None = None,
    batch: int | None = None,
    image_size: int | None = None,
    starts: int = 3,
) -> None:
    """Measures pairs of starts, and saves the result.

    Args:
        keep: saves the result.
        model: an isotropic model; default: deit3_b16, or deit3_ti16 without a GPU
        batch: images per batch
        image_size: side in pixels
        starts: pairs of processes with empty and filled caches
    """
    on_gpu = jax.default_backend() == "gpu"
    model = model or ("deit3_b16" if on_gpu else "deit3_ti16")
    batch, image_size = batch or (64 if on_gpu else 4), image_size or (224 if on_gpu else 64)
    dtype = "bfloat16" if on_gpu else "float32"
    settings = {
        "model.name": model,
        "data.image_size": image_size,
        "data.augment": "none",
        "batch_size": batch,
        "dtype": dtype,
        "epochs": 1.0,
        "optim.warmup_epochs": 0.0,
        "eval.resolutions": (),
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    seconds: dict[str, list[float]] = {"empty": [], "filled": []}
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as cache:
            for each in seconds.values():
                each.append(first_step(flags, pathlib.Path(cache)))
    rows = [
        [name, statistics.median(each), min(each), max(each), len(each)]
        for name, each in seconds.items()
    ]
    arguments = {"model": model, "batch": batch, "image_size": image_size, "starts": starts}
    note = f"`{model}`, batch {batch}, {image_size} px, {dtype}."
    keep(settings=arguments, columns=COLUMNS, rows=rows, note=note, first_step_s=seconds)
