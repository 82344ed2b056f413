"""Training on a CPU: images per second of a step, beside eager PyTorch.

    python -m benchmarks cpu --torch /path/to/python --out benchmarks/results/cpu.json
    python -m benchmarks cpu -- batch_size=32 model.name=vit_s16 model.options=drop_path=0.0 \\
        model.position=rope_mixed data.image_size=224

The first command takes two minutes; --torch names an interpreter that has torch, of any version of
Python, which trains the same model in eager PyTorch with all cores. Arguments after `--` are
settings of the recipe. Both have a process of their own; they take steps in turns, so that other
load on the machine affects both, and ratios are of times within a turn. Batches are drawn before
the time is taken, with --loader in it, as in a run.
"""

import itertools
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from benchmarks._runner import Keep, Result
from benchmarks._step import config_of, peer_of
from rope_jax.cores import cores
from rope_jax.text import literal, markdown_table

ROOT = pathlib.Path(__file__).parents[1]
OURS, PEER = "one device", "eager PyTorch"  # the names in results


class Worker:
    """A process that takes training steps on request."""

    def __init__(self, command: list[str], asked: dict[str, Any]):
        self._process = subprocess.Popen(
            [*command, json.dumps(asked)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._answer()

    def seconds(self, steps: int) -> float:
        """The time of so many steps."""
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[:3]} ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def ratios(seconds: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Quartiles of how many times as fast `over` is as `under`, turn by turn.

    >>> ratios({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0]}, "a", "b")
    {'low': 2.0, 'median': 2.0, 'high': 2.0}
    """
    each = [b / a for a, b in zip(seconds[over], seconds[under], strict=True)]
    if len(each) == 1:
        each *= 2
    low, median, high = statistics.quantiles(each, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def table(result: Result) -> str:
    """A result as a table in Markdown, and its ratios."""
    rows = []
    for name, rates in result["images_per_second"].items():
        low, median, high = (f"{rates[key]:,.0f}" for key in ("low", "median", "high"))
        rows.append([name, median, f"{low} to {high}"])
    lines = [markdown_table(["training step", "images/s", "quartiles"], rows)]
    for name, ratio in result["ratios"].items():
        low, median, high = (f"{ratio[key]:.2f}" for key in ("low", "median", "high"))
        lines.append(f"- {name}: {median} ({low} to {high})")
    settings = result["settings"]
    how = [f"`{settings['recipe']}`", settings["changed"], f"{result['cores']} cores"]
    how += ["with the loader"] if settings["loader"] else []
    return "\n".join(lines) + f"\n\n{', '.join(filter(None, how))}."


def run(
    keep: Keep,
    *flags: str,
    recipe: str = "digits",
    torch: str | None = None,
    loader: bool = False,
    turns: int = 15,
    seconds: float = 1.5,
) -> None:
    """Measures both in turns, and prints images per second and ratios.

    Args:
        keep: saves the result.
        flags: settings of the recipe, such as batch_size=32
        recipe: name or file, with its arguments
        torch: an interpreter that has torch
        loader: draw batches while the time is taken
        turns: of each
        seconds: of each turn
    """
    changed = {name: literal(value) for name, _, value in (x.partition("=") for x in flags)}
    config = config_of(recipe, changed)
    batch = config.batch_size
    workers: dict[str, Worker] = {}
    try:
        asked = {"recipe": recipe, "settings": changed, "loader": loader}
        workers[OURS] = Worker([sys.executable, "-m", "benchmarks._step"], asked)
        if torch is not None:
            peer = [torch, str(pathlib.Path(__file__).with_name("_torch_vit.py"))]
            workers[PEER] = Worker(peer, peer_of(config))
        if len({worker.about["parameters"] for worker in workers.values()}) > 1:
            raise SystemExit(f"the models differ: { {n: w.about for n, w in workers.items()} }")
        steps = {name: max(2, round(2 * seconds / w.seconds(2))) for name, w in workers.items()}
        times: dict[str, list[float]] = {name: [] for name in workers}
        for _, (name, worker) in itertools.product(range(turns), workers.items()):
            times[name].append(worker.seconds(steps[name]) / steps[name] / batch)
    finally:
        for worker in workers.values():
            worker.end()
    speeds = {}
    for name, each in times.items():
        low, median, high = statistics.quantiles([1 / x for x in each], n=4, method="inclusive")
        speeds[name] = {"low": low, "median": median, "high": high}
    asked = {"recipe": recipe, "changed": " ".join(flags), "loader": loader, "turns": turns}
    result = keep(
        settings=asked,
        arguments=asked,  # without the path of another Python
        cores=cores(),
        workers={name: worker.about for name, worker in workers.items()},
        images_per_second=speeds,
        ratios={f"{OURS} / {PEER}": ratios(times, OURS, PEER)} if PEER in times else {},
        seconds_per_image=times,
    )
    print(table(result))
