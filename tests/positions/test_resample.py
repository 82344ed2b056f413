"""Resampling of tables: torch's matrices, definitions, and the rules by name."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.interpolate import RectBivariateSpline

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


def place_offsets(before, after):
    """Where BEiT's code places the old offsets: sums of a geometric progression."""
    low, high, terms = 1.01, 1.5, np.arange(before // 2)
    while high - low > 1e-6:
        q = (low + high) / 2
        low, high = (low, q) if (q**terms).sum() > after // 2 else (q, high)
    sums = np.cumsum(q**terms)
    return np.array([*-sums[::-1], 0, *sums])


@pytest.mark.parametrize("after", [(47, 35), (63, 13)])
def test_geometric_is_beits_spline(after):
    """Its code calls FITPACK's `regrid` with smoothing 0, as `RectBivariateSpline` does."""
    table = np.random.default_rng(0).standard_normal((27, 27))
    axes = [place_offsets(27, n) for n in after]
    new = [np.arange(-(n // 2), n // 2 + 1) for n in after]
    want = RectBivariateSpline(*axes, table, s=0)(*new)
    rows, columns = (MATRICES["geometric"](27, n) for n in after)
    np.testing.assert_allclose(rows @ table @ columns.T, want, rtol=0, atol=1e-13)
    end = after[0] // 2  # up to where the bisection stops
    np.testing.assert_allclose(axes[0][[0, 12, 14, -1]], [-end, -1, 1, end], rtol=0, atol=1e-3)


def test_geometric_keeps_the_border_of_small_tables():
    # Of 5 offsets, of which the last can be moved to 2.5, and of 3, of which none can be moved.
    far = MATRICES["geometric"](5, 13)
    np.testing.assert_allclose(far[[3, 9]], np.eye(5)[[0, 4]], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(MATRICES["geometric"](3, 7).argmax(1), [0, 0, 0, 1, 2, 2, 2])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", MATRICES)
def test_both_axes_are_resampled(rule):
    maps = np.random.default_rng(0).standard_normal((2, 3, 7))
    want = MATRICES[rule](3, 5) @ maps @ MATRICES[rule](7, 3).T
    np.testing.assert_allclose(resample(jnp.asarray(maps), (5, 3), rule), want, rtol=0, atol=1e-14)
    unchanged = jnp.asarray(maps)
    assert resample(unchanged, (3, 7), rule) is unchanged


@pytest.mark.parametrize("rule", ["pad", "crop"])
def test_padding_and_cropping_keep_the_centre(rule):
    maps = jnp.arange(1.0, 7.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(resample(maps, (4, 1), rule), [[[0], [2], [5], [0]]])
