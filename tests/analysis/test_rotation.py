import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.analysis.correlation import (
    middle_token,
    position_correlation,
    stage_positions,
)
from rope_jax.analysis.costs import scheme_costs
from rope_jax.analysis.rotation import (
    READINGS,
    fourier_mask_reconstruction,
    fourier_reconstruction,
    frequencies,
    rotation_angles,
    score_decay,
)
from rope_jax.positions import Stage, create_position
from rope_jax_kernels import Window
from tests.models.small import small_model

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "golden_positions.json").read_text()
)


def position(text, **changes):
    stage = Stage(
        **{"depth": 2, "heads": 3, "head_dim": 16, "channels": 48, "grid": (6, 6)} | changes
    )
    return create_position(text, stage, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("hdit_freqs_dhead")])
def test_angles_match_official_tables(name):
    table = np.reshape(GOLDEN[name]["v"], GOLDEN[name]["shape"])
    np.testing.assert_allclose(
        rotation_angles("hdit", table.size, heads=len(table)), table.ravel(), rtol=1e-6
    )


def test_one_frequency_reconstructs_a_plane_wave():
    wave = 2 * np.pi * np.array([1 / 8, 2 / 8])  # one period down, two across
    y, x = np.mgrid[:8, :8]
    expected = np.cos((y - 4) * wave[0] + (x - 4) * wave[1])
    freqs = wave[None, None, :, None]  # [layers, N, A, R]
    np.testing.assert_allclose(fourier_reconstruction(freqs, (8, 8)), expected, atol=1e-12)
    np.testing.assert_allclose(fourier_mask_reconstruction(freqs, (8, 8)), expected, atol=1e-12)


def test_all_frequencies_of_a_grid_reconstruct_the_point():
    y, x = 2 * np.pi * np.mgrid[:6, :8].reshape(2, -1) / np.array([[6], [8]])
    point = np.zeros((6, 8))
    point[3, 4] = 1
    for reconstruct in (fourier_reconstruction, fourier_mask_reconstruction):
        np.testing.assert_allclose(reconstruct(np.stack([y, x]), (6, 8)), point, atol=1e-12)


@pytest.mark.parametrize("text", ["axial_rope", "rope_mixed", "rope2d"])
def test_frequencies_are_angles_from_token_to_token(text):
    scheme = position(text)
    freqs = frequencies(scheme, (6, 9))
    layer = scheme.terms((6, 9)).layer(1).rotation
    theta = np.einsum("la,nar->nlr", layer.coords, layer.freqs).reshape(
        layer.freqs.shape[0], 6, 9, -1
    )
    np.testing.assert_allclose(theta[:, 3, 4] - theta[:, 2, 4], freqs[-1, :, 0], atol=1e-5)
    np.testing.assert_allclose(theta[:, 3, 4] - theta[:, 3, 3], freqs[-1, :, 1], atol=1e-5)


def test_windows_have_the_spacing_of_their_map():
    windowed = frequencies(position("axial_rope", pattern=Window((3, 3))), (6, 6))
    np.testing.assert_allclose(windowed, frequencies(position("axial_rope"), (6, 6)), rtol=1e-5)


@pytest.mark.parametrize("grid", [(1, 4), (4, 1), (1, 1)])
def test_frequencies_are_zero_along_a_side_of_one_token(grid):
    expected = frequencies(position("rope2d"), (4, 4)) * (np.array(grid) > 1)[:, None]
    np.testing.assert_allclose(frequencies(position("rope2d"), grid), expected)


def test_scores_match_rotated_vectors():
    scheme = position("rope1d", heads=1)
    freqs = frequencies(scheme, (6, 6))
    score, bound = score_decay(freqs, np.array([0.0, 1, 7]))
    theta = freqs[0, 0, 0]
    np.testing.assert_allclose(
        score, [1, np.cos(theta).mean(), np.cos(7 * theta).mean()], rtol=1e-6
    )
    sums = [abs(np.exp(7j * theta[:n]).sum()) for n in range(1, len(theta) + 1)]
    np.testing.assert_allclose(bound[2], np.mean(sums), rtol=1e-6)
    assert bound[0] == pytest.approx((len(theta) + 1) / 2)


@pytest.mark.parametrize("name", ["rope1d", "rope2d", "axial_rope", "rope_mixed"])
def test_no_score_exceeds_its_bound(name):
    score, bound = score_decay(frequencies(position(name), (6, 6)), np.linspace(0, 20, 81))
    assert (abs(score) <= bound + 1e-12).all()


def test_readings_match_their_formulas():
    t = np.arange(8) / 8
    values = [100**-t, np.pi * 10**t, 10**t, np.pi ** (t * np.log(10))]
    for name, expected in zip(READINGS, values, strict=True):
        np.testing.assert_allclose(rotation_angles(name, 8), expected, rtol=1e-12)
    heads = rotation_angles("rope2d", 8, heads=2)  # share one ladder
    np.testing.assert_allclose(heads, rotation_angles("rope2d", 8))


def test_correlations_of_known_positions():
    rows = np.array([[[1.0, 0], [1, 1], [0, 1], [-1, 0]]])
    np.testing.assert_allclose(
        position_correlation(rows, (2, 2), 0), [[[1, np.sqrt(0.5)], [0, -1]]], atol=1e-12
    )
    assert middle_token((14, 14)) == 90  # the paper's code
    with pytest.raises(ValueError, match="token=4 is not on the map of 2x2"):
        position_correlation(rows, (2, 2), 4)


def test_positions_of_layers():
    size = (6, 10)  # 3 x 5 tokens
    model = small_model("deit_ti16", "lape(ape)")
    expected = model.position.terms((3, 5)).add.value[:, 1:]
    ((_, rows),) = stage_positions(model, size)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    model = small_model("deit_ti16", "ape", scan_layers=True)
    norm = model.blocks.norm1
    embedding = np.asarray(model.position.embed(jnp.zeros((1, 16, 48)), (3, 5))[0, 1:])
    centred = embedding - embedding.mean(-1, keepdims=True)
    expected = centred / np.sqrt(embedding.var(-1, keepdims=True) + 1e-6) * norm.scale[1]
    expected += norm.bias[1]
    ((_, rows),) = stage_positions(model, size)
    np.testing.assert_allclose(rows[1], expected, atol=1e-5)
    model = small_model("deit_ti16", "lape(ape,join=unshare)")
    ((_, rows),) = stage_positions(model, size)
    model.position.inner.embedding[...] = -model.position.later[0].embedding[...]
    ((_, changed),) = stage_positions(model, size)
    assert (changed[0] != rows[0]).any()
    np.testing.assert_allclose(changed[1], model.blocks[1].norm1.bias * jnp.ones((15, 1)))
    with pytest.raises(ValueError, match="adds no embedding to the tokens"):
        stage_positions(small_model("deit_ti16", "rope2d"), size)


def test_costs_match_the_papers():
    """Heo et al.: 9,216 parameters, and 10.8 million operations in ViT-B if all are counted.

    Their 1.8 million are one product per channel.
    """
    mixed, lape = scheme_costs("deit3_b16", ["rope_mixed", "lape(ape)"], 224)
    (none,) = scheme_costs("vit_digits", ["none"], 8)
    assert (none.parameters, none.operations) == (0, 0)
    assert (mixed.parameters, mixed.total) == (9_216, 86_444_008)
    assert mixed.operations == 6 * 32 * 2 * 12 * 196 * 12
    assert lape.operations == 197 * 768 * 12
    (rpb,) = scheme_costs("swin_t", ["rpb"], 224)
    assert rpb.parameters == 28_288_354 - 28_265_032
    assert scheme_costs("deit3_s16", ["irpe"], 224, depth=1)[0].operations is None
