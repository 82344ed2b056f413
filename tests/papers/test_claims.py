"""Verdicts on claims."""

import numpy as np
import pytest
from scipy import stats

from rope_jax.papers.claims import Claim, above, as_good, judge
from rope_jax.papers.runs import Run

RUNS = [Run(model, position) for model in ("a", "b") for position in ("ape", "rope2d")]


def test_intervals_are_those_of_paired_differences():
    better, worse = {0: 81.0, 1: 82.5, 2: 80.4, 5: 99.0}, {0: 80.0, 1: 80.5, 2: 79.9}
    verdict = judge(better, worse)
    low, high = stats.ttest_rel([81.0, 82.5, 80.4], [80.0, 80.5, 79.9]).confidence_interval()
    assert verdict["seeds"] == [0, 1, 2]
    np.testing.assert_allclose(verdict["interval"], [low, high])
    assert verdict["verdict"] == "not shown"


@pytest.mark.parametrize(
    ("difference", "margin", "word"),
    [(1.0, 0.0, "shown"), (-1.0, 0.0, "refuted"), (-0.2, 0.5, "shown"), (-0.9, 0.5, "refuted")],
)
def test_verdicts_compare_the_interval_with_the_margin(difference, margin, word):
    worse = {seed: 80.0 + seed for seed in range(3)}
    better = {seed: number + difference + 0.01 * seed for seed, number in worse.items()}
    assert judge(better, worse, margin)["verdict"] == word


def test_one_seed_tests_nothing():
    assert judge({0: 1.0}, {0: 0.0})["verdict"] == "not tested"


def test_claims_compare_runs_of_one_model():
    (claim,) = above("rope2d", "ape")
    pairs = [(run.model, base.model, run.position) for run, base in claim.pairs(RUNS)]
    assert pairs == [("a", "a", "rope2d"), ("b", "b", "rope2d")]


def test_claims_about_models_compare_their_own_schemes():
    runs = [Run("cat_5", "cat_rope"), Run("cat_vit_5", "sincos1d")]
    ((run, base),) = Claim("cat_5", "cat_vit_5", by="model").pairs(runs)
    assert (run.model, base.model) == ("cat_5", "cat_vit_5")


def test_numbers_are_averaged_over_sizes_for_each_seed():
    values = {"rope2d": {256: {0: 3.0, 1: 4.0}, 512: {0: 1.0, 1: 2.5, 2: 9.0}}}
    values["ape"] = {256: {0: 1.0, 1: 1.0}, 512: {0: 1.0, 1: 1.0}}
    claim = Claim("rope2d", "ape", at=(256, 512))
    value = lambda run, side: values[run.position][side]
    (verdict,) = claim.judge(RUNS[:2], value, after_the_fact=True)
    assert verdict["difference"] == pytest.approx((1.0 + 2.25) / 2)
    assert verdict["claim"] == "rope2d above ape, a, at 256, 512 px"
    assert not list(claim.judge(RUNS[2:3], value, after_the_fact=True))
    assert verdict["after_the_fact"]


def test_runs_on_other_images_are_not_compared():
    runs = [
        Run("cct_7_3x1", position, f"cct:dataset={data},variant=cct_7_3x1")
        for data in ("cifar10", "cifar100")
        for position in ("ape", "lape(ape)")
    ]
    (claim,) = above("lape(ape)", "ape")
    assert [run.data == base.data for run, base in claim.pairs(runs)] == [True, True]


def test_sizes_that_say_nothing_are_left_out():
    (claim,) = above("rope2d", "ape", at=(160, 192))
    value = lambda run, side: {0: float(side or 0), 1: 2.0}
    none = lambda run, at: []
    (verdict,) = claim.judge(RUNS[:2], value, after_the_fact=False, sides=none)
    assert verdict["verdict"] == "not tested"


def test_as_good_has_a_margin():
    assert as_good("rope2d", "ape").margin == 0.5
