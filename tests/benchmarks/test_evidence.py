"""What the benchmark `evidence` concludes from accuracies that are given here."""

import math
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import evidence
from benchmarks.evidence import Claim
from configs.evidence import BACKBONES


def runs(position, values):
    rows = lambda value: [{"resolution": [20, 20], "top1": value, "count": 100}, {"resolution": [12, 12], "top1": value / 2, "count": 100}]
    return [{"backbone": "vit", "position": position, "seed": seed, "eval": rows(value)} for seed, value in enumerate(values)]


def test_interval_is_students():
    mean, half = evidence.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom, standard deviation 1
    assert math.isnan(evidence.interval([1.0])[1])


@pytest.mark.parametrize(
    ("better", "worse", "equal", "verdict"),
    [
        ((0.80, 0.81, 0.82), (0.70, 0.71, 0.72), False, "shown"),
        ((0.70, 0.71, 0.72), (0.80, 0.81, 0.82), False, "the opposite"),
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), False, "not shown"),
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), True, "no difference seen"),
        ((0.80, 0.81, 0.82), (0.70, 0.71, 0.72), True, "a difference"),
    ],
)
def test_a_claim_is_judged_by_the_interval_of_its_difference(better, worse, equal, verdict):
    claim = Claim("somewhere", ("vit", "a"), ("vit", "b"), equal=equal)
    judged = evidence.judge(claim, runs("a", better) + runs("b", worse))
    assert judged["verdict"] == verdict
    assert judged["difference"] == pytest.approx(100 * np.mean(np.subtract(better, worse)))


def test_differences_are_taken_seed_by_seed_at_the_resolution_of_the_claim():
    found = runs("a", (0.2, 0.6)) + runs("b", (0.1, 0.5, 0.9))
    judged = evidence.judge(Claim("somewhere", ("vit", "a"), ("vit", "b"), 12), found)
    assert judged["seeds"] == 2
    assert judged["difference"] == pytest.approx(5.0)
    assert judged["half_width"] == pytest.approx(0, abs=1e-9)
    assert evidence.judge(Claim("somewhere", ("vit", "a"), ("vit", "c")), found) is None


def test_every_claim_is_about_runs_that_are_made():
    made = {pair for pairs in evidence.PARTS.values() for pair in pairs}
    for claim in evidence.claims():
        assert {claim.better, claim.worse} <= made


def test_every_claim_at_another_resolution_is_about_one_that_is_evaluated():
    for claim in evidence.claims():
        if claim.resolution is not None:
            for backbone, _ in (claim.better, claim.worse):
                assert claim.resolution in BACKBONES[backbone][3]


def test_runs_are_stopped_when_the_time_is_up_and_nothing_new_starts(monkeypatch, tmp_path):
    stopped = tmp_path / "stopped"
    script = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(stopped)!r}).touch(), sys.exit(0)))
print(flush=True)
time.sleep(60)
"""
    started = []

    def start(run, *_):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.close()
        started.append(process)
        return process

    monkeypatch.setattr(evidence, "start", start)
    monkeypatch.setattr(evidence.os, "sched_getaffinity", lambda _: {0})
    evidence.train([("vit", "none", seed) for seed in range(3)], tmp_path / "x.npz", tmp_path, 0.01, [])
    assert len(started) == 1
    assert stopped.exists()
    assert started[0].returncode == 0


def test_a_run_that_fails_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "start", lambda *_: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    with pytest.raises(RuntimeError, match="vit-none-0 ended with status 3"):
        evidence.train([("vit", "none", 0)], tmp_path / "x.npz", tmp_path, 1, [])
