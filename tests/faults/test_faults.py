"""A short form of `make test-faults`: kills, damaged checkpoints, and one try of every attack."""

import numpy as np
import pytest

from tests.faults import long as faults
from tests.faults.attacks import Absent, all_attacks

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run: folder, outcome, seconds."""
    folder = tmp_path_factory.mktemp("faults")
    seconds = faults.complete(folder / "reference", folder / "log")
    return folder, faults.outcome(folder / "reference"), seconds


@pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_killed_runs_end_like_uninterrupted_ones(reference, count):
    """Lost work is bounded by one interval and a save in progress."""
    folder, outcome, seconds = reference
    figures = faults.kills(count, outcome, seconds, np.random.default_rng(0), folder)
    assert figures["kills"] == count
    assert figures["runs_completed"] >= 1


def test_damage_is_detected_and_the_previous_step_restored(reference):
    folder, _, _ = reference
    figures = faults.corruptions(8, folder / "reference", np.random.default_rng(0), folder)
    assert sum(figures["by_kind"].values()) == 8


def cases():
    for candidate in all_attacks():
        yield pytest.param(
            candidate, id=candidate.name, marks=[pytest.mark.slow] if candidate.slow else []
        )


@pytest.mark.parametrize("attack", list(cases()))
def test_runs_survive(attack, tmp_path):
    try:
        attack.run(tmp_path, 0, np.random.default_rng(0))
    except Absent as absent:
        pytest.skip(str(absent))
