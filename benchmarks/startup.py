"""Start-up time: compilation of unrolled and scanned layers; first steps with and without caches.

    python -m benchmarks startup --out benchmarks/results/startup_gpu.json

Measures a ViT-B on a GPU, in a few minutes, or a small model on a CPU. A training step (forward,
backward, AdamW) is compiled with its blocks in a list and in a scan (`scan_layers=True`), and both
are timed in turns. The time to the first step is that of a new process of `rope_jax.main`, from its
start until it reports step 1: imports, images, model, compilation and the step. Each pair of
processes shares a new cache folder, which is empty for the first and filled for the second.
"""

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
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rope_jax
from benchmarks._runner import Keep, Result, alarm, earlier
from benchmarks._training import training_step
from rope_jax.config import OptimConfig
from rope_jax.text import markdown_table
from rope_jax.training import optim

ROOT = pathlib.Path(__file__).parents[1]
Seconds = dict[str, list[float]]  # to the first step, with caches that are "cold" and "warm"


@dataclasses.dataclass(frozen=True)
class Model:
    """The model to measure.

    Attributes:
        name: name of an isotropic model.
        depth: number of blocks.
        batch: images per batch.
        image_size: side in pixels.
        dtype: dtype of the computation.
    """

    name: str
    depth: int
    batch: int
    image_size: int
    dtype: str


class Step:
    """A compiled training step with its state."""

    def __init__(self, of: Model, *, scan: bool):
        model = rope_jax.create_model(
            of.name,
            depth=of.depth,
            image_size=of.image_size,
            dtype=jnp.dtype(of.dtype),
            scan_layers=scan,
        )
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        optimizer = optim.make_optimizer(OptimConfig(), optax.constant_schedule(1e-4), params)
        params = nnx.to_pure_dict(params)
        self.state = {"params": params, "opt": optimizer.init(params)}
        shape = (of.batch, of.image_size, of.image_size, 3)
        self.images = jax.random.normal(jax.random.key(0), shape)
        step = jax.jit(training_step(graph, rest, optimizer), donate_argnums=0)
        start = time.perf_counter()
        self.step = step.lower(self.state, self.images).compile()
        self.compile_s = time.perf_counter() - start

    def run(self) -> float:
        """Runs one step and returns its time in milliseconds."""
        start = time.perf_counter()
        self.state, loss = self.step(self.state, self.images)
        jax.block_until_ready(loss)
        return 1e3 * (time.perf_counter() - start)


def compare(of: Model, turns: int) -> list[dict[str, Any]]:
    """Measures the list and the scan, and checks that both train to the same weights."""
    # The scan is compiled first, so that it includes what XLA tunes or loads once per process.
    steps = {scan: Step(of, scan=scan) for scan in (True, False)}
    times = {scan: [] for scan in steps}
    for turn in range(turns + 1):
        for scan, step in steps.items():
            took = step.run()
            if turn:  # the first turn is the warm-up
                times[scan].append(took)
    one, other = (step.state["params"]["head"]["kernel"] for step in steps.values())
    # The mean is compared, as AdamW amplifies rounding errors where a gradient is almost 0.
    if jnp.abs(one - other).mean() > (5e-5 if of.dtype == "float32" else 5e-4):
        raise AssertionError("list and scan have trained to different weights")
    return [
        {
            "depth": of.depth,
            "scan": scan,
            "compile_s": steps[scan].compile_s,
            "step_ms": statistics.median(times[scan]),
            "temp_bytes": steps[scan].step.memory_analysis().temp_size_in_bytes,
        }
        for scan in (False, True)
    ]


def make_images(folder: pathlib.Path, batch: int, size: int) -> None:
    """Writes one batch of random images as the training and test sets."""
    rng, arrays = np.random.default_rng(0), {}
    for name in ("train", "test"):
        arrays[f"{name}_images"] = rng.integers(0, 256, (batch, size, size, 3), np.uint8)
        arrays[f"{name}_labels"] = np.arange(batch, dtype=np.int32) % 10
    np.savez(folder / "images.npz", **arrays)


def first_step(folder: pathlib.Path, cache: pathlib.Path, of: Model, limit_s: float) -> float:
    """Seconds from the start of a training process to the report of its first step.

    Args:
        folder: folder with the files of `make_images`, in which the workdir is created.
        cache: cache folder of the process.
        of: the model.
        limit_s: seconds after which the process is killed.

    Raises:
        RuntimeError: if the process ends before its first step.
    """
    settings = {
        "data.source": "npz",
        "data.path": folder / "images.npz",
        "data.augment": "none",
        "model.name": of.name,
        "model.options": f"depth={of.depth}",
        "dtype": of.dtype,
        "batch_size": of.batch,
        "epochs": 1.0,
        "optim.warmup_epochs": 0.0,
        "eval.resolutions": (),
        "eval.batch_size": of.batch,
    }
    command = [sys.executable, "-m", "rope_jax.main", "--config=configs/digits.py"]
    command.append(f"--workdir={tempfile.mkdtemp(dir=folder)}")
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environment = kept | {"ROPE_JAX_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    lines, start = [], time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process,
        alarm(limit_s, process.kill),
    ):
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                seconds = time.monotonic() - start
                process.terminate()  # the rest of the run is not needed
                process.stdout.read()
                return seconds
    output = "".join(lines)[-2000:]
    raise RuntimeError(
        f"the run ended before its first step, with status {process.returncode}:\n{output}"
    )


def first_steps(of: Model, known: Seconds, deadline: float) -> Seconds:
    """Seconds to the first step with empty and filled caches: those known, and one more pair.

    Without another pair if its processes do not reach their first step before the deadline.
    """
    pair = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_images(folder, of.batch, of.image_size)
        for caches in ("cold", "warm"):
            left = deadline - time.monotonic()
            try:
                pair[caches] = first_step(folder, folder / "cache", of, max(0.0, left))
            except RuntimeError:
                if time.monotonic() < deadline:
                    raise
                return known
    return {caches: [*known.get(caches, []), seconds] for caches, seconds in pair.items()}


def goals(rows: list[dict], first_step_s: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Goals S1 (with the slowdown of the scan's steps) and S2, if measured."""
    found = {}
    if rows:
        unrolled, scanned = rows
        slower = 100 * (scanned["step_ms"] / unrolled["step_ms"] - 1)
        ratio = unrolled["compile_s"] / scanned["compile_s"]
        found["S1"] = {"value": ratio, "slower_percent": slower}
    if first_step_s:
        cold, warm = (statistics.median(first_step_s[name]) for name in ("cold", "warm"))
        found["S2"] = {"value": cold / warm}
    return found


def table(result: Result) -> str:
    """Formats a result as tables in Markdown."""
    settings, text = result["settings"], ""
    reached = goals(result["rows"], result["first_step_s"])
    if result["rows"]:
        header = ("blocks", "blocks in", "compile, s", "step, ms", "temporary memory, MB")
        cells = []
        for row in result["rows"]:
            figures = [f"{row['compile_s']:.1f}", f"{row['step_ms']:.0f}"]
            form = "a scan" if row["scan"] else "a list"
            cells.append([str(row["depth"]), form, *figures, f"{row['temp_bytes'] / 1e6:.0f}"])
        faster, slower = reached["S1"].values()
        text = (
            f"{markdown_table(header, cells)}\nThe scan compiles {faster:.2f} times as fast; "
            f"its steps take {1 + slower / 100:.2f} times as long.\n"
        )
    if seconds := result["first_step_s"]:
        header = ("caches", "seconds to the first step: median (least, most)", "starts")
        cells = []
        for name, caches in (("cold", "empty"), ("warm", "filled")):
            values = seconds[name]
            median = f"{statistics.median(values):.1f} ({min(values):.1f}, {max(values):.1f})"
            cells.append([caches, median, str(len(values))])
        ratio = f"Empty / filled: {reached['S2']['value']:.2f}."
        text += f"\n{markdown_table(header, cells)}\n{ratio}\n"
    about = f"batch {settings['batch']}, {settings['image_size']} px, {settings['dtype']}"
    return f"{text}\n`{settings['model']}`, {about}.\n"


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None,
    model: str | None = None,
    depth: int = 12,
    batch: int | None = None,
    image_size: int | None = None,
    dtype: str | None = None,
    turns: int | None = None,
    starts: int = 3,
    limit_s: float = 180.0,
) -> None:
    """Measures compilation, then first steps, and saves the result after each.

    Args:
        keep: saves the result.
        out: of an earlier call, to continue.
        model: an isotropic model; default: deit3_b16, or deit3_ti16 without a GPU
        depth: number of blocks
        batch: images per batch
        image_size: side in pixels
        dtype: dtype of the computation, float32 or bfloat16
        turns: timed steps of list and scan
        starts: pairs of processes with empty and filled caches
        limit_s: end after this many seconds
    """
    deadline, on_gpu = time.monotonic() + limit_s, jax.default_backend() == "gpu"
    of = Model(
        model or ("deit3_b16" if on_gpu else "deit3_ti16"),
        depth,
        batch or (64 if on_gpu else 4),
        image_size or (224 if on_gpu else 64),
        dtype or ("bfloat16" if on_gpu else "float32"),
    )
    turns = turns or (21 if on_gpu else 5)
    settings = dataclasses.asdict(of) | {"turns": turns, "starts": starts, "limit_s": limit_s}
    settings["model"] = settings.pop("name")
    same = {name: value for name, value in settings.items() if name != "limit_s"}
    before = earlier(out, "startup", same)

    def keep_all(rows: list[dict], seconds: Seconds) -> Result:
        reached = goals(rows, seconds) if on_gpu else {}
        left = starts - len(seconds.get("warm", []))
        return keep(settings=settings, rows=rows, first_step_s=seconds, goals=reached, left=left)

    jax.config.update("jax_enable_compilation_cache", False)  # to measure compilation itself
    rows, seconds = before.get("rows") or compare(of, turns), before.get("first_step_s", {})
    result = keep_all(rows, seconds)
    while result["left"] > 0 and time.monotonic() < deadline:
        seconds = first_steps(of, seconds, deadline)
        result = keep_all(rows, seconds)
    print(table(result))
