"""A short form of `make test-faults`: kills at random instants and damaged checkpoints, in runs as a user starts them."""

import shutil

import numpy as np
import pytest

from benchmarks import faults
from rope_jax.metrics import read_events


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing interrupts: folder, outcome, seconds; what it compiled is beside it."""
    folder = tmp_path_factory.mktemp("faults")
    seconds = faults.complete(folder / "reference", folder / "log", folder / "xla")
    return folder, faults.outcome(folder / "reference"), seconds


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_runs_end_where_others_do(reference, count):
    folder, outcome, seconds = reference
    figures = faults.kills(count, outcome, seconds, np.random.default_rng(0), folder, folder / "xla")
    assert figures["kills"] == count
    assert figures["runs_completed"] >= 1
    assert figures["most_steps_repeated"] <= 2 * faults.EVERY  # one interval, and what was computed while its checkpoint was written


def test_damage_is_seen_and_the_step_before_it_restored(reference):
    folder, _, _ = reference
    figures = faults.corruptions(8, folder / "reference", np.random.default_rng(0), folder)
    assert sum(figures["by_kind"].values()) == 8


def test_a_run_says_what_it_has_saved(reference):
    folder, _, _ = reference
    assert faults.durable(folder / "reference") == 72
    events = [event["event"] for event in read_events(folder / "reference" / "metrics.jsonl")]
    assert events == ["start", *9 * ["saved"], "stop"]


@pytest.mark.parametrize("kind", faults.DAMAGES)
def test_a_loss_would_be_seen(reference, kind, tmp_path):
    folder, _, _ = reference
    shutil.copytree(folder / "reference" / "checkpoints", tmp_path / "checkpoints")
    assert faults.damage(tmp_path / "checkpoints" / "72" / "_CHECKPOINT_METADATA", kind, np.random.default_rng(0))
    with pytest.raises(ValueError, match="72 is damaged"):
        faults.durable(tmp_path)
