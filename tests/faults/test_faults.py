"""A short form of `make test-faults`: kills at random instants and damaged checkpoints."""

import shutil

import numpy as np
import pytest

from tests.faults import long as faults

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing interrupts: folder, outcome, its seconds."""
    folder = tmp_path_factory.mktemp("faults")
    seconds = faults.complete(folder / "reference", folder / "log")
    return folder, faults.outcome(folder / "reference"), seconds


@pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_killed_runs_end_where_others_do(reference, count):
    """What is lost is bounded by one interval and a save under way."""
    folder, outcome, seconds = reference
    figures = faults.kills(count, outcome, seconds, np.random.default_rng(0), folder)
    assert figures["kills"] == count
    assert figures["runs_completed"] >= 1


def test_damage_is_seen_and_the_step_before_it_restored(reference):
    folder, _, _ = reference
    figures = faults.corruptions(8, folder / "reference", np.random.default_rng(0), folder)
    assert sum(figures["by_kind"].values()) == 8


@pytest.mark.parametrize("kind", faults.DAMAGES)
def test_a_loss_would_be_seen(reference, kind, tmp_path):
    folder, _, _ = reference
    shutil.copytree(folder / "reference" / "checkpoints", tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints" / str(faults.STEPS)
    assert faults.damage(newest / "_CHECKPOINT_METADATA", kind, np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"{faults.STEPS} is damaged"):
        faults.durable(tmp_path)
