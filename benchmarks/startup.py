"""How long a run takes to start: compilation with the layers unrolled and scanned, and the first step with empty and with warm caches.

    python -m benchmarks startup --out benchmarks/results/startup_h200.json     on a GPU: a ViT-B, in a few minutes
    python -m benchmarks startup                                                on a CPU: a small model

Compilation is that of `python -m benchmarks scan` at one depth: the scan is compiled first, so that what XLA tunes once in a process is
tuned at its cost. First steps are those of `rope_jax.main`, in a process of its own each, from its start until it tells of step 1: imports,
images, model, compilation and the step. Its cache of compiled programs is where users have it, in a cache folder that is new for every
pair: the first run finds it empty, the second one finds what the first one left.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks import scan
from benchmarks._record import record, write

ROOT = pathlib.Path(__file__).parents[1]


def first_step(folder: pathlib.Path, cache: pathlib.Path, args: argparse.Namespace) -> float:
    """Seconds from the start of a training run, in a process of its own, to the line of its only step.

    Args:
        folder: where the images are, see `make_images`; the run gets a new folder there.
        cache: what stands for the user's cache folder.
        args: of the command line.

    Raises:
        RuntimeError: the run ended before its step.
    """
    settings = {
        "data.source": "npz",
        "data.path": folder / "images.npz",
        "data.augment": "none",
        "model.name": args.model,
        "model.options": f"depth={args.depth}",
        "dtype": args.dtype,
        "batch_size": args.batch,
        "epochs": 1.0,
        "optim.warmup_epochs": 0.0,
        "eval.resolutions": (),
        "eval.batch_size": args.batch,
    }
    workdir = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "rope_jax.main", "--config=configs/digits.py", f"--workdir={workdir}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    lines, start = [], time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                seconds = time.monotonic() - start
                process.terminate()  # what comes after is not asked for
                process.stdout.read()
                return seconds
    raise RuntimeError(f"the run ended before its first step, with status {process.returncode}:\n{''.join(lines)[-2000:]}")


def make_images(folder: pathlib.Path, batch: int, size: int) -> None:
    """One batch of random images, to train and to evaluate."""
    rng = np.random.default_rng(0)
    split = lambda name: {
        f"{name}_images": rng.integers(0, 256, (batch, size, size, 3), np.uint8),
        f"{name}_labels": np.arange(batch, dtype=np.int32) % 10,
    }
    np.savez(folder / "images.npz", **split("train"), **split("test"))


def first_steps(args: argparse.Namespace, deadline: float) -> dict[str, list[float]]:
    """Seconds to the first step with empty and warm caches, in turns; at least one of each."""
    seconds = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make_images(folder, args.batch, args.image_size)
        for _ in range(args.starts):
            cache = pathlib.Path(tempfile.mkdtemp(dir=folder))
            for name in seconds:
                seconds[name].append(first_step(folder, cache, args))
            if time.monotonic() > deadline:
                break
    return seconds


def goals(result: dict) -> dict[str, dict[str, Any]]:
    """Goal -> its value; of compilation also by how much the scan's steps are slower."""
    found = {}
    if result["rows"]:
        unrolled, scanned = (scan.Row(**row) for row in result["rows"])
        slower = 100 * (scanned.step_ms / unrolled.step_ms - 1)
        found["S1"] = {"value": unrolled.compile_s / scanned.compile_s, "slower_percent": slower}
    if seconds := result["first_step_s"]:
        cold, warm = (statistics.median(seconds[name]) for name in ("cold", "warm"))
        found["S2"] = {"value": cold / warm}
    return found


def table(result: dict) -> str:
    """A result as tables in Markdown."""
    settings, text = result["settings"], ""
    reached = goals(result)
    if result["rows"]:
        text = scan.table([scan.Row(**row) for row in result["rows"]])
        faster, slower = reached["S1"].values()
        text += f"\n\nThe scan compiles {faster:.2f} times as fast; its steps take {1 + slower / 100:.2f} times as long.\n"
    if result["first_step_s"]:
        text += "\n| caches | seconds to the first step: median (least, most) | starts |\n|---|---|---|\n"
        for name, values in result["first_step_s"].items():
            caches = {"cold": "empty", "warm": "warm"}[name]
            text += f"| {caches} | {statistics.median(values):.1f} ({min(values):.1f}, {max(values):.1f}) | {len(values)} |\n"
        text += f"\nEmpty / warm: {reached['S2']['value']:.2f}.\n"
    return text + f"\n`{settings['model']}`, batch {settings['batch']}, {settings['image_size']} px, {settings['dtype']}.\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; what is not given depends on whether there is a GPU."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="deit3_b16" if on_gpu else "deit3_ti16", help="an isotropic model")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 4)
    parser.add_argument("--image-size", type=int, default=224 if on_gpu else 64)
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=21 if on_gpu else 5, help="timed steps of each form")
    parser.add_argument("--starts", type=int, default=3, help="pairs of processes with empty and warm caches")
    parser.add_argument("--limit-s", type=float, default=180.0, help="start no further pair after this time")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measures, prints the tables, and writes the figures where --out says, after each of the two parts."""
    # The processes need room on the GPU, too. Read when jax first looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv)
    deadline = time.monotonic() + args.limit_s
    figures: dict[str, Any] = {"rows": [], "first_step_s": {}}

    def keep() -> dict:
        result = record("startup", vars(args), **figures)
        result["goals"] = goals(result) if jax.default_backend() == "gpu" else {}
        write(result, args.out)
        return result

    jax.config.update("jax_enable_compilation_cache", False)  # what is measured is compilation
    rows = scan.compare(args.model, args.depth, batch=args.batch, image_size=args.image_size, turns=args.turns, dtype=args.dtype)
    figures["rows"] = [dataclasses.asdict(row) for row in rows]
    keep()
    figures["first_step_s"] = first_steps(args, deadline)
    print(table(keep()))
