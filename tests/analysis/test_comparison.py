import dataclasses
import pathlib

import numpy as np
import pytest

from rope_jax import config as cfg
from rope_jax.analysis.comparison import paired_differences
from rope_jax.analysis.intervals import newcombe
from rope_jax.analysis.runs import RunResults, group_runs
from tests.analysis.test_report import rows


def run(position, seed, *results):
    config = cfg.resolve({"model": {"position": position}, "seed": seed})
    return RunResults(pathlib.Path("a"), config, 1, rows(*results), (), ())


def test_equal_seeds_are_paired():
    """The spread between seeds, which both schemes share, does not widen the interval.

    Seeds and sizes of one scheme alone are skipped.
    """
    size = (8, 8)
    base = [run("ape", seed, (size, top1)) for seed, top1 in enumerate((0.50, 0.70, 0.90))]
    other = [run("rope2d", seed, (size, top1)) for seed, top1 in enumerate((0.54, 0.73, 0.92))]
    base.append(run("ape", 5, (size, 0.1), ((9, 9), 0.4)))
    other.append(run("rope2d", 7, (size, 0.1), ((9, 9), 0.4)))
    differences = paired_differences({"ape": base, "rope2d": other[::-1]})["rope2d"]
    assert [*differences] == [size]
    difference = differences[size]
    half = 4.302653 * 0.01 / 3**0.5  # Student's t with two degrees of freedom
    expected = (0.03, 0.03 - half, 0.03 + half)
    np.testing.assert_allclose(difference, expected, rtol=1e-5)
    assert difference.text("+") == "+3.0 [+0.5, +5.5]"


def test_seeds_of_different_steps_are_not_averaged():
    first, second = run("ape", 0, ((8, 8), 0.9)), run("ape", 1, ((8, 8), 0.3))
    assert [*group_runs([first, second]).values()] == [[first, second]]
    later = dataclasses.replace(second, step=2)
    assert [*group_runs([first, later]).values()] == [[first], [later]]


def test_the_interval_for_images_matches_the_publication():
    """Newcombe 1998, Statistics in Medicine 17, table II, method 10."""
    for (a, n, b, m), interval in (
        ((56, 70, 48, 80), (0.0524, 0.3339)),
        ((9, 10, 3, 10), (0.1705, 0.8090)),
        ((10, 10, 0, 10), (0.6075, 1.0)),
    ):
        assert newcombe(a / n, n, b / m, m) == pytest.approx(interval, abs=1e-4)
