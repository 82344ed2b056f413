"""A short form of `make test-faults`: kills at random instants and damaged checkpoints."""

import numpy as np
import pytest

from tests.faults import long as faults

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
