"""The vision transformer against its definition, with schemes of every kind.

Tolerance: float64 and logits of size 1 leave 1e-13 of rounding; LayerNorm's epsilon moves them by
1e-6 and more.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.definition import places, sinusoids, value, vit
from tests.models.small import SMALL, run, small_model
from tests.models.test_nat import neighbourhoods

pytestmark = pytest.mark.usefixtures("x64")

WIDTH, HEADS, GRID = SMALL["width"], SMALL["heads"], (3, 5)
PLACES = places(GRID)
EPSILON = {"beit": 1e-6, "deit": 1e-6, "deit3": 1e-6}  # of others 1e-5


def behind_class_token(rows):
    return np.concatenate([np.zeros((1, rows.shape[1])), rows])


def ape_of_deit(model):
    return {"tokens": value(model.position.embedding)}


def mixed_and_ape(model):
    mixed, ape = model.position.parts
    freqs = value(mixed.mixed)  # [layer, head, axis, pair]

    def theta(layer):
        return lambda head: behind_class_token(PLACES @ freqs[layer, head])

    return {"tokens": value(ape.embedding), "theta": theta, "interleaved": True}


def axial(model):
    """Two pairs for each axis; rows first."""
    centres = (2 * PLACES + 1 - np.array(GRID)) / max(GRID)

    def theta(head):
        freqs = math.pi * 10 ** ((np.arange(2) * HEADS + head) / (2 * HEADS))
        return np.concatenate([centres[:, :1] * freqs, centres[:, 1:] * freqs], axis=1)

    return {"theta": lambda layer: theta}


def key_minus_query(model):
    table = value(model.position.offsets)
    prefix = model.position.stage.prefix
    reach = np.array(table.shape[2:]) // 2
    steps = (1, model.options.dilation)

    def bias(layer):
        offsets = (PLACES[None] - PLACES[:, None]) // steps[layer % 2] + reach
        inside = ((offsets >= 0) & (offsets <= 2 * reach)).all(axis=2)
        y, x = np.moveaxis(np.where(inside[..., None], offsets, 0), 2, 0)
        return lambda head: np.pad(table[layer, head, y, x] * inside, [(prefix, 0)] * 2)

    return {"bias": bias}


def lape_of_sines(model):
    scale, shift = value(model.position.scale), value(model.position.bias)
    chain, p = [], sinusoids(16, WIDTH)
    for layer in range(len(scale)):
        deviation = np.sqrt(p.var(axis=1, keepdims=True) + 1e-6)
        p = (p - p.mean(axis=1, keepdims=True)) / deviation * scale[layer] + shift[layer]
        chain.append(p)
    return {"joins": lambda layer: chain[layer]}


RES_POST_NORM = {"post_norm": True, "cosine": True, "layer_scale": 0.1}


@pytest.mark.parametrize(
    ("name", "position", "scheme"),
    [
        ("deit_ti16", "ape", ape_of_deit),
        ("deit_s16", "ape", ape_of_deit),
        ("deit_ti16_distilled", "ape", ape_of_deit),
        ("beit_b16", "ape", ape_of_deit),
        ("dinov3_s16", "ape", ape_of_deit),
        ("deit_ti16", "rpb", key_minus_query),
        ("deit_ti16", "lape(sincos1d)", lape_of_sines),
        ("deit3_ti16", "rope_mixed(pairing=interleaved)+ape", mixed_and_ape),
        pytest.param("vit_s16", "axial_rope", axial, marks=pytest.mark.slow),
        pytest.param("vit_s16", "rpb", key_minus_query, marks=pytest.mark.slow),
        ("nat_isotropic_s16", "rpb", key_minus_query),
        ("dinat_isotropic_s16", "rpb", key_minus_query),
        ("nat_isotropic_s16", "axial_rope", axial),
    ],
)
def test_logits_match_the_definition(name, position, scheme):
    options = RES_POST_NORM if name == "deit_s16" else {}
    model = small_model(name, position, dtype=jnp.float64, **options)
    images = np.random.default_rng(1).standard_normal((2, 6, 10, 3))
    logits, _ = run(model, jnp.asarray(images))
    assert logits.dtype == jnp.float64
    assert model.options.norm_epsilon == EPSILON.get(name.partition("_")[0], 1e-5)
    terms = scheme(model)
    if model.options.attention == "neighborhood":
        allowed = neighbourhoods(model.options.kernel_size, [model.options.dilation])
        terms["allowed"] = lambda layer: allowed(0, layer, GRID)
    want = [vit(model, model.options, image, **terms) for image in images]
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-9)
