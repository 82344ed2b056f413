"""Attacks on a run, one family per module of this package, each tried several times.

An attack is a function of an empty folder, the try's number (from 0) and a random generator,
registered with its name:

    @attack("a damaged results.json", tries=len(DAMAGES))
    def damaged_results(folder, number, rng):
        kind = DAMAGES[number % len(DAMAGES)]
        ...
        expect(status == 0, "exit status ...")

The number selects the case, so that all of them are tried; instants and places are random.

It raises an AssertionError if the run did not survive, and Absent if a required program is not
installed. `test_attacks.py` tries each once, `make test-faults` as often as specified here; the
counts are shown in `docs/running.md`.
"""

import dataclasses
import importlib
import pathlib
import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.metrics import read_metrics
from tests.faults.processes import ROOT, Run

SMALL = [  # 36 steps; a later argument of the same name takes precedence
    f"--config={ROOT}/configs/digits.py:epochs=3",
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.batch_size=120",
    "--config.log_every=1",
    "--config.checkpoint_every=8",
    "--config.eval.resolutions=((4, 6),)",
    "--config.eval.batch_size=100",
]
ENDLESS = "--config.epochs=4000.0"
BOUND = 120  # seconds in which everything must end


class Absent(Exception):
    """A program that an attack needs is not installed; the message names it."""


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack, see the module.

    Attributes:
        name: in words, for the table of results.
        tries: in `make test-faults`.
        slow: True if only `make test-slow` runs it.
        run: the function.
    """

    name: str
    tries: int
    slow: bool
    run: Callable[[pathlib.Path, int, np.random.Generator], None]


_ATTACKS: list[Attack] = []


def attack(name: str, *, tries: int = 1, slow: bool = False) -> Callable[[Callable], Callable]:
    """Registers the decorated function as an attack."""

    def register(function: Callable) -> Callable:
        _ATTACKS.append(Attack(name, tries, slow, function))
        return function

    return register


def all_attacks() -> list[Attack]:
    """The attacks of all modules of this package."""
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    return list(_ATTACKS)


def expect(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def durable(workdir: pathlib.Path) -> int:
    """The newest step on disk that verifies, 0 for none.

    Raises:
        ValueError: a checkpoint is damaged.
    """
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        return 0
    with Checkpoints(folder) as checkpoints:
        return checkpoints.newest_verified(strict=True) or 0


def last_logged_step(workdir: pathlib.Path) -> int:
    """The last step in metrics.jsonl, 0 for none."""
    return max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)


def start(
    folder: pathlib.Path, *arguments: str, settings: Sequence[str] = SMALL, **options: Any
) -> Run:
    """Starts a run of one process in folder/run; the options are those of `Run`."""
    all_arguments = [*settings, f"--workdir={folder / 'run'}", *arguments]
    return Run(all_arguments, folder / "log.txt", **options)


def wait_for_exit(runs: Sequence[Run], seconds: float = BOUND) -> list[int]:
    """The exit statuses; raises AssertionError if a process does not end."""
    deadline = time.monotonic() + seconds
    try:
        statuses = [run.wait(max(0.0, deadline - time.monotonic())) for run in runs]
        expect(None not in statuses, f"exit statuses {statuses} after {seconds} s: {outputs(runs)}")
        return statuses
    finally:
        for run in runs:
            run.kill()


def outputs(runs: Sequence[Run]) -> str:
    """The end of the output of all processes."""
    return "".join(
        f"\nprocess {number}: {run.read_output()[-2000:]}" for number, run in enumerate(runs)
    )


def expect_end(runs: Sequence[Run], status: int = 0, seconds: float = BOUND) -> None:
    """Expects all processes to end in time, with a status."""
    statuses = wait_for_exit(runs, seconds)
    expect(statuses == [status] * len(runs), f"exit statuses {statuses}: {outputs(runs)}")


def expect_saved(folder: pathlib.Path, runs: Sequence[Run]) -> None:
    """Expects all to end within a minute with status 0 and the last logged step on disk."""
    expect_end(runs, seconds=60)
    logged, saved = last_logged_step(folder / "run"), durable(folder / "run")
    expect(saved >= logged > 0, f"step {logged} was logged, {saved} is on disk: {outputs(runs)}")


def expect_refusal(runs: Sequence[Run], *words: str, status: int = 2) -> None:
    """Expects all processes to end with a status, and with one error that has these words."""
    expect_end(runs, status)
    for run in runs:
        last = run.read_output().strip().splitlines()[-1]
        expect(last.startswith("rope_jax: "), f"no sentence: {outputs(runs)}")
        expect(all(word in last for word in words), f"{words} are not in: {last}")
        expect("Traceback" not in run.read_output(), outputs(runs))
