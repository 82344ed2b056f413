"""How learned tables come to another grid: torch's matrices, the definitions, and the names of options."""

import itertools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions import Stage, create_position
from rope_jax.positions.resample import RESAMPLERS, antialias_matrix, bilinear_matrix

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "golden_resample.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_antialiasing_is_torchs(name):
    before, after = map(int, name.split("_")[2].split("to"))
    want = np.reshape(GOLDEN[name]["v"], GOLDEN[name]["shape"])
    np.testing.assert_allclose(antialias_matrix(before, after), want, rtol=0, atol=6e-8)  # printed with seven decimals


@pytest.mark.parametrize(("before", "after"), [(3, 7), (7, 3), (4, 4), (1, 3)])
def test_bilinear_is_its_definition(before, after):
    want = np.zeros((after, before))
    for i in range(after):
        place = min(max((i + 0.5) * before / after - 0.5, 0), before - 1)  # torch clamps the place, we the taps: the same
        left = int(place)
        want[i, left] += 1 - (place - left)
        want[i, min(left + 1, before - 1)] += place - left
    np.testing.assert_allclose(bilinear_matrix(before, after), want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("matrix", [antialias_matrix, bilinear_matrix])
def test_constants_stay_constant(matrix):
    for before, after in itertools.product((1, 2, 5, 14), repeat=2):
        np.testing.assert_allclose(matrix(before, after).sum(axis=1), 1, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("resize", ["bicubic", "antialias", "bilinear", "pad"])
@pytest.mark.parametrize("grid", [(5, 3), (3, 4)])
def test_ape_takes_each_by_name(resize, grid):
    stage = Stage(depth=1, heads=1, head_dim=4, channels=4, grid=(3, 4), prefix=1, embed_prefix=1, dtype=np.dtype(float))
    position = create_position(f"ape(resize={resize})", stage, rngs=nnx.Rngs(0))
    table = np.asarray(position.embedding[...])
    got = np.asarray(position.embed(jnp.zeros((1, 1 + grid[0] * grid[1], 4)), grid))[0]
    np.testing.assert_array_equal(got[0], table[0])
    maps = jnp.asarray(table[1:].T.reshape(4, 3, 4))
    np.testing.assert_allclose(got[1:], np.asarray(RESAMPLERS[resize](maps, grid)).reshape(4, -1).T, rtol=0, atol=1e-15)


def test_padding_keeps_the_centre():
    maps = jnp.arange(1.0, 7.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(RESAMPLERS["pad"](maps, (4, 1)), [[[0], [2], [5], [0]]])


@pytest.mark.usefixtures("x64")
def test_bias_tables_take_other_rules_by_name():
    stage = Stage(depth=1, heads=2, head_dim=4, channels=8, grid=(3, 3), dtype=np.dtype(float))
    position = create_position("rpb(grow=antialias,shrink=bilinear)", stage, rngs=nnx.Rngs(0))
    table = np.asarray(position.offsets[...])
    bias = np.asarray(position.terms((4, 2)).layer(0).bias).reshape(2, 7, 3)[:, ::-1, ::-1]
    want = np.einsum("yh,nhw,xw->nyx", antialias_matrix(5, 7), table[0], bilinear_matrix(5, 3))
    np.testing.assert_allclose(bias, want, rtol=0, atol=1e-15)
