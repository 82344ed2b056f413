"""Training on a CPU: images per second of a step, compared with eager PyTorch.

    python -m benchmarks cpu --torch /path/to/python --out benchmarks/results/cpu.json
    python -m benchmarks cpu -- batch_size=32 model.name=vit_s16 model.options=drop_path=0.0 \\
        model.position=rope_mixed data.image_size=224

The first command takes two minutes; --torch names an interpreter that has torch, of any version of
Python, which trains the same model in eager PyTorch with all cores (`_torch_vit.py`). Arguments
after `--` are settings of the recipe. Both take steps in turns, so that other load on the machine
affects both, and the ratio is of times within a turn. Batches are drawn before the time is taken.
"""

import contextlib
import itertools
import json
import math
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks._runner import Keep
from rope_jax.config import Config, load_recipe, read_settings, resolve
from rope_jax.models.vit import ViT
from rope_jax.system.cores import cores
from rope_jax.system.sharding import put_batch, start_devices
from rope_jax.training.setup import create, initial_state, prepare, training_batches
from rope_jax.training.step import make_step

BATCHES = 16
OURS, PEER = "rope_jax", "eager PyTorch"
COLUMNS = ("training step", "images/s", "quartiles", "times as fast: median (quartiles)")
Take = Callable[[int], float]  # takes so many steps, and returns their seconds


def make_config(recipe: str, flags: Sequence[str]) -> Config:
    """Makes the config of a recipe with changed settings, such as batch_size=32."""
    changes = read_settings(f"--config.{flag}" for flag in flags)
    # Nothing is evaluated, so any image size will do.
    return resolve(load_recipe(recipe, changes | {"eval.resolutions": ()}))


def ours(config: Config) -> tuple[int, Take]:
    """The number of parameters, and our training step."""
    start_devices()
    setup, model = prepare(config)
    state, step = initial_state(setup, model), make_step(setup)
    stream, resident = training_batches(setup, 0)
    batches = itertools.cycle([next(stream) for _ in range(BATCHES)])

    def take(steps: int) -> float:
        nonlocal state
        before = None
        begun = time.perf_counter()
        for _ in range(steps):  # as in a run: metrics are fetched while the next step runs
            state, metrics = step(state, put_batch(next(batches), setup.mesh) | resident)
            jax.device_get(before)
            before = metrics
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - begun

    return sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"])), take


def peer_arguments(config: Config) -> dict[str, Any]:
    """The arguments of `_torch_vit.py`, for the same model and optimizer.

    Raises:
        SystemExit: that script has no such model.
    """
    model = create(config)
    options = model.options
    if type(model) is not ViT or options.drop_path or config.model.position != "rope_mixed":
        raise SystemExit("--torch has ViTs with rope_mixed and without drop path")
    names = ("patch_size", "width", "depth", "heads", "mlp_ratio", "norm_epsilon", "patch_norm")
    return {name: getattr(options, name) for name in names} | {
        "image_size": model.position.stage.grid[0] * options.patch_size,
        "batch": config.batch_size,
        "label_smoothing": config.label_smoothing,
        "learning_rate": config.optim.learning_rate,
        "weight_decay": config.optim.weight_decay,
        "clip_norm": config.optim.clip_norm,
    }


def peer(process: subprocess.Popen) -> tuple[int, Take]:
    """The number of parameters, and the training step of a process of `_torch_vit.py`."""

    def answer() -> Any:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{process.args[:2]} ended with {process.wait()}")
        return json.loads(line)

    def take(steps: int) -> float:
        print(steps, file=process.stdin, flush=True)
        return answer()

    return answer(), take


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile.

    >>> quartiles([2.0])
    [2.0, 2.0, 2.0]
    """
    several = values if len(values) > 1 else [*values] * 2
    return statistics.quantiles(several, n=4, method="inclusive")


def table_rows(seconds: dict[str, list[float]]) -> list[list[str]]:
    """Rows of COLUMNS, with our speed relative to each other one, turn by turn.

    Args:
        seconds: seconds per image, by name and turn.
    """
    rows = []
    for name, each in seconds.items():
        low, median, high = (f"{x:,.0f}" for x in quartiles([1 / x for x in each]))
        pairs = zip(each, seconds[OURS], strict=True)
        least, middle, most = (f"{x:.2f}" for x in quartiles([x / y for x, y in pairs]))
        times = "" if name == OURS else f"{middle} ({least} to {most})"
        rows.append([name, median, f"{low} to {high}", times])
    return rows


def run(
    keep: Keep,
    *flags: str,
    recipe: str = "digits",
    torch: str | None = None,
    turns: int = 15,
    seconds: float = 1.5,
) -> None:
    """Measures both in turns, and prints images per second.

    Args:
        keep: saves the result.
        flags: settings of the recipe, such as batch_size=32
        recipe: name or file, with its arguments
        torch: an interpreter that has torch
        turns: of each
        seconds: of each turn
    """
    config = make_config(recipe, flags)
    with contextlib.ExitStack() as stack:
        takers = {OURS: ours(config)}
        if torch is not None:
            script = str(pathlib.Path(__file__).with_name("_torch_vit.py"))
            command, pipes = [torch, script, json.dumps(peer_arguments(config))], subprocess.PIPE
            other = stack.enter_context(
                subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True)
            )
            stack.callback(other.kill)
            takers[PEER] = peer(other)
        if len(parameters := {count for count, _ in takers.values()}) > 1:
            raise SystemExit(f"the models differ: they have {parameters} parameters")
        takes = {name: take for name, (_, take) in takers.items()}
        steps = {name: max(2, round(2 * seconds / take(2))) for name, take in takes.items()}
        times: dict[str, list[float]] = {name: [] for name in takes}
        for _, (name, take) in itertools.product(range(turns), takes.items()):
            times[name].append(take(steps[name]) / steps[name] / config.batch_size)
    settings = {"recipe": recipe, "changed": " ".join(flags), "turns": turns}
    note = ", ".join([f"`{recipe}`", *flags, f"{cores()} cores."])
    rows = table_rows(times)
    keep(settings=settings, columns=COLUMNS, rows=rows, note=note, seconds_per_image=times)
