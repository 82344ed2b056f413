"""Frequencies, coordinates and rotated vectors of the official code (Heo's and HDiT's), and torch's bicubic matrices."""

import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions import Stage, create_position, grids
from rope_jax.positions.resample import bicubic_matrix
from rope_jax_kernels import Rotation, Window, rotate

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "golden_positions.json").read_text())
# Both sides are float32 numbers of size 30 at most, printed with seven decimals.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5}
STAGE = Stage(depth=1, heads=2, head_dim=16, channels=32, grid=(2, 3))


def golden(name, *shape):
    return np.asarray(GOLDEN[name] if isinstance(GOLDEN[name], list) else GOLDEN[name]["v"]).reshape(shape)


def rotated(rotation: Rotation):
    """The golden input [N, L, D], rotated."""
    x = jnp.asarray(GOLDEN["input"]["x"], jnp.float32).reshape(1, 2, 6, 16)
    return rotate(x, x, rotation, layout="BNLD")[0][0]


def scheme(text, stage=STAGE):
    return create_position(text, stage, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("text", "name", "pattern"),
    [
        ("rope2d(pairing=interleaved)", "heo_axial_base100", STAGE.pattern),
        ("rope2d(pairing=interleaved)", "timm_rope_axial_xy", STAGE.pattern),
        ("rope2d(pairing=interleaved,base=50)", "heo_swin_axial_base50", Window((2, 3))),
    ],
)
def test_rope2d_is_heos_axial(text, name, pattern):
    stage = Stage(depth=1, heads=2, head_dim=16, channels=32, grid=(2, 3), pattern=pattern)
    np.testing.assert_allclose(rotated(scheme(text, stage).terms((2, 3)).rotation), golden(name, 2, 6, 16), **TOLERANCE)


def test_dinov3_is_metas():
    np.testing.assert_allclose(rotated(scheme("dinov3").terms((2, 3)).rotation), golden("dinov3_base100_separate", 2, 6, 16), **TOLERANCE)


def test_eva02_is_timms():
    rotation = scheme("eva02(pairing=interleaved)").terms((2, 3)).rotation
    np.testing.assert_allclose(rotated(rotation), golden("timm_eva02_cat_ij_ref16", 2, 6, 16), **TOLERANCE)


def test_rope_mixed_is_heos():
    position = scheme("rope_mixed(pairing=interleaved)")
    columns, rows = np.reshape(GOLDEN["heo_mixed"]["freqs"], GOLDEN["heo_mixed"]["freqs_shape"])
    position.mixed.set_value(jnp.asarray(np.stack([rows, columns], axis=1)[None], jnp.float32))
    want = np.reshape(GOLDEN["heo_mixed"]["out"], (2, 6, 16))
    np.testing.assert_allclose(rotated(position.terms((2, 3)).layer(0).rotation), want, **TOLERANCE)


def test_axial_rope_is_hdits():
    want = GOLDEN["hdit_axial_krope2_nonshared"]
    rotation = scheme("axial_rope").terms((2, 3)).rotation
    theta = np.reshape(want["theta"], want["theta_shape_NhD"]).swapaxes(0, 1)
    np.testing.assert_allclose(rotation.angles(), theta, **TOLERANCE)
    np.testing.assert_allclose(rotated(rotation), np.reshape(want["out"], (2, 6, 16)), **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("hdit_freqs_")])
def test_axial_frequencies_are_hdits(name):
    head_dim, heads = map(int, re.fullmatch(r"hdit_freqs_dhead(\d+)_h(\d+)", name).groups())
    stage = Stage(depth=1, heads=heads, head_dim=head_dim, channels=heads * head_dim, grid=(7, 7))
    freqs = scheme("axial_rope", stage).terms((7, 7)).rotation.freqs
    ladder = golden(name, *GOLDEN[name]["shape"])
    zeros = np.zeros_like(ladder)
    np.testing.assert_allclose(freqs[:, 0], np.concatenate([ladder, zeros], axis=1), **TOLERANCE)  # rows turn the first pairs
    np.testing.assert_allclose(freqs[:, 1], np.concatenate([zeros, ladder], axis=1), **TOLERANCE)


@pytest.mark.parametrize(("coords", "name"), [(grids.centres, "hdit_pos_2x3"), (grids.endpoints, "hdit_pos_2x3_aligncorners")])
def test_coordinates_are_hdits(coords, name):
    np.testing.assert_allclose(coords((2, 3)), golden(name, 2, 3, 2), **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("torch_bicubic_")])
def test_bicubic_is_torchs(name):
    before, after = map(int, name.split("_")[2].split("to"))
    np.testing.assert_allclose(bicubic_matrix(before, after), golden(name, *GOLDEN[name]["shape"]), **TOLERANCE)
