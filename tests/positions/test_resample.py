"""Resampling of tables: torch's matrices, definitions, and the rules by name."""

import itertools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.resample import MATRICES, resample

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDEN = {
    ("bicubic", name): value
    for name, value in json.loads((DATA / "golden_positions.json").read_text()).items()
    if name.startswith("torch_bicubic_")
} | {
    ("antialias", name): value
    for name, value in json.loads((DATA / "golden_resample.json").read_text()).items()
}


@pytest.mark.parametrize(("rule", "name"), GOLDEN)
def test_matrices_match_torch(rule, name):
    before, after = map(int, name.split("_")[2].split("to"))
    golden = GOLDEN[rule, name]
    want = np.reshape(golden["v"], golden["shape"])  # float32, printed with seven decimals
    np.testing.assert_allclose(MATRICES[rule](before, after), want, rtol=0, atol=2e-7)


@pytest.mark.parametrize(("before", "after"), [(3, 7), (7, 3), (4, 4), (1, 3)])
def test_bilinear_matches_its_definition(before, after):
    want = np.zeros((after, before))
    for i in range(after):
        # torch clamps the place, we clamp the taps, which is equivalent
        place = min(max((i + 0.5) * before / after - 0.5, 0), before - 1)
        below = int(place)
        want[i, below] += 1 - (place - below)
        want[i, min(below + 1, before - 1)] += place - below
    np.testing.assert_allclose(MATRICES["bilinear"](before, after), want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", MATRICES)
def test_constants_stay_constant(rule):
    for before, after in itertools.product((1, 2, 5, 14), repeat=2):
        np.testing.assert_allclose(MATRICES[rule](before, after).sum(axis=1), 1, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", MATRICES)
def test_both_axes_are_resampled(rule):
    maps = np.random.default_rng(0).standard_normal((2, 3, 4))
    want = MATRICES[rule](3, 5) @ maps @ MATRICES[rule](4, 2).T
    np.testing.assert_allclose(resample(jnp.asarray(maps), (5, 2), rule), want, rtol=0, atol=1e-14)
    unchanged = jnp.asarray(maps)
    assert resample(unchanged, (3, 4), rule) is unchanged


@pytest.mark.parametrize("rule", ["pad", "crop"])
def test_padding_and_cropping_keep_the_centre(rule):
    maps = jnp.arange(1.0, 7.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(resample(maps, (4, 1), rule), [[[0], [2], [5], [0]]])
