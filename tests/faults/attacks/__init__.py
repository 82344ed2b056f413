"""Attacks on a run, one family per module of this package, each tried several times.

An attack is a function of an empty folder and a random generator, registered with its name:

    @attack("a damaged results.json", tries=5)
    def damaged_results(folder, rng):
        ...
        expect(status == 0, "exit status ...")

It raises an AssertionError if the run did not survive, and Absent if a program that it needs is not
installed. `test_attacks.py` tries each once, `make test-faults` as often as is written here; the
counts are shown in `docs/running.md`.
"""

import dataclasses
import importlib
import pathlib
import pkgutil
from collections.abc import Callable

import numpy as np

from rope_jax.workdir.checkpoint import Checkpoints
from rope_jax.workdir.metrics import read_metrics


class Absent(Exception):
    """A program that an attack needs is not installed; the message names it."""


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack, see the module.

    Attributes:
        name: in words, for the table of results.
        tries: in `make test-faults`.
        slow: whether the tests leave it to `make test-slow`.
        run: the function.
    """

    name: str
    tries: int
    slow: bool
    run: Callable[[pathlib.Path, np.random.Generator], None]


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


def last_logged(workdir: pathlib.Path) -> int:
    """The last step in metrics.jsonl, 0 for none."""
    return max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)
