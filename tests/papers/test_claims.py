"""Verdicts on claims."""

import numpy as np
import pytest
from scipy import stats

from rope_jax.papers.claims import Claim, judge
from rope_jax.papers.runs import Run

RUNS = [Run(model, position) for model in ("a", "b") for position in ("ape", "rope2d")]


def test_intervals_are_those_of_paired_differences():
    better, worse = {0: 81.0, 1: 82.5, 2: 80.4, 5: 99.0}, {0: 80.0, 1: 80.5, 2: 79.9}
    verdict = judge(better, worse)
    low, high = stats.ttest_rel([81.0, 82.5, 80.4], [80.0, 80.5, 79.9]).confidence_interval()
    assert verdict["seeds"] == [0, 1, 2]
    np.testing.assert_allclose(verdict["interval"], [low, high])
    assert verdict["verdict"] == "not shown"
    assert judge(better, {0: 80.0})["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("difference", "margin", "word"),
    [(1.0, 0.0, "shown"), (-1.0, 0.0, "refuted"), (-0.2, 0.5, "shown"), (-0.9, 0.5, "refuted")],
)
def test_verdicts_compare_the_interval_with_the_margin(difference, margin, word):
    worse = {seed: 80.0 + seed for seed in range(3)}
    better = {seed: number + difference + 0.01 * seed for seed, number in worse.items()}
    assert judge(better, worse, margin)["verdict"] == word


def test_numbers_are_averaged_over_sizes_for_each_seed():
    values = {"rope2d": {256: {0: 3.0, 1: 4.0}, 512: {0: 1.0, 1: 2.5, 2: 9.0}}}
    values["ape"] = {256: {0: 1.0, 1: 1.0}, 512: {0: 1.0, 1: 1.0}}
    claim = Claim("rope2d", "ape", at=(256, 512))
    value = lambda run, side: values[run.position][side]
    (verdict,) = claim.judge(RUNS[:2], value, after_the_fact=True)
    assert verdict["difference"] == pytest.approx((1.0 + 2.25) / 2)
    assert verdict["claim"] == "rope2d above ape, a, at 256, 512 px"
    assert verdict["after_the_fact"]
    no_sizes = lambda run, at: []
    (verdict,) = claim.judge(RUNS[:2], value, after_the_fact=True, sides=no_sizes)
    assert verdict["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("claim", "runs", "pairs"),
    [
        (Claim("rope2d", "ape"), RUNS, [(1, 0), (3, 2)]),
        (
            Claim("cat_5", "cat_vit_5", by="model"),
            [Run("cat_5", "cat_rope"), Run("cat_vit_5", "sincos1d")],
            [(0, 1)],
        ),
        (
            Claim("lape(ape)", "ape"),
            [
                Run("cct_7_3x1", position, f"cct:dataset={data},variant=cct_7_3x1")
                for data in ("cifar10", "cifar100")
                for position in ("ape", "lape(ape)")
            ],
            [(1, 0), (3, 2)],
        ),
    ],
    ids=["schemes of one model", "models with their own schemes", "same images"],
)
def test_runs_that_differ_in_the_claim_alone_are_compared(claim, runs, pairs):
    assert [*claim.pairs(runs)] == [(runs[run], runs[base]) for run, base in pairs]
