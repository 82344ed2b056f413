"""Absolute embeddings against their definitions, written out token by token in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.resample import resample
from tests.positions.schemes import (
    CHANNELS,
    EXACT,
    GRID,
    GRIDS,
    normal,
    scheme,
    tokens,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")

QUARTER = CHANNELS // 4
WAVES = (math.sin, math.cos)


def embedding_of_tokens(position, grid):
    """The embedding that `embed` adds to the tokens of every example."""
    count = position.stage.embed_prefix + grid[0] * grid[1]
    start = normal(2, count, CHANNELS)
    table = np.asarray(position.embed(jnp.asarray(start), grid)) - start
    np.testing.assert_allclose(table[0], table[1], rtol=0, atol=1e-14)  # a rounded difference
    return table[0]


# Definitions: channel i of a token at (y, x).


def heo(y, x, i, base):
    t, kind = divmod(i, 4)
    return WAVES[kind % 2]((x, y)[kind // 2] * base ** (-t / QUARTER))


def lape(y, x, i, base):
    half = CHANNELS // 2
    place, i = (x, i) if i < half else (y, i - half)
    return WAVES[i % 2](place * math.exp(-2 * (i // 2) * math.log(base) / half))


def moco(y, x, i, base):
    block, t = divmod(i, QUARTER)
    return WAVES[block % 2]((x, y)[block // 2] * base ** (-t / (QUARTER - 1)))


def timm(y, x, i, base):
    block, t = divmod(i, QUARTER)
    return WAVES[block // 2]((y, x)[block % 2] * base ** (-t / QUARTER))


SINCOS2D = [("sincos2d", heo, 0, 10000)] + [
    (f"sincos2d(order={order.__name__},base=100)", order, 1, 100)
    for order in (heo, lape, moco, timm)
]


@pytest.mark.parametrize(("text", "order", "prefix", "base"), SINCOS2D)
def test_sincos2d(text, order, prefix, base):
    position = scheme(text, embed_prefix=prefix, prefix=prefix)
    for grid in GRIDS:
        want = [[order(y, x, i, base) for i in range(CHANNELS)] for y, x in tokens(grid)]
        want = [[0.0] * CHANNELS] * prefix + want
        np.testing.assert_allclose(embedding_of_tokens(position, grid), want, **EXACT)


@pytest.mark.parametrize(("prefix", "base"), [(0, 10000), (1, 100)])
def test_sincos1d(prefix, base):
    def wave(place, i):
        return WAVES[i % 2](place / base ** (2 * (i // 2) / CHANNELS))

    position = scheme(f"sincos1d(base={base})", embed_prefix=prefix, prefix=prefix)
    want = [[wave(place, i) for i in range(CHANNELS)] for place in range(prefix + 12)]
    np.testing.assert_allclose(embedding_of_tokens(position, (3, 4)), want, **EXACT)


@pytest.mark.parametrize("rule", ["bicubic", "antialias", "dinov2", "bilinear", "pad"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_ape(rule, prefix):
    text = "ape" if rule == "bicubic" else f"ape(resize={rule})"
    position = scheme(text, embed_prefix=prefix, prefix=1)
    table = np.asarray(position.embedding[...])
    assert 0.018 < table.std() < 0.022  # 0.02 with up to 768 draws
    np.testing.assert_allclose(embedding_of_tokens(position, GRID), table, rtol=0, atol=1e-14)
    maps = table[prefix:].T.reshape(CHANNELS, *GRID)
    for grid in ((5, 3), (2, 9)):  # the first has as many tokens as the table
        want = np.asarray(resample(jnp.asarray(maps), grid, rule)).reshape(CHANNELS, -1).T
        want = np.concatenate([table[:prefix], want])
        np.testing.assert_allclose(embedding_of_tokens(position, grid), want, rtol=0, atol=1e-14)


# CAPE


def cape(y, x):
    count, waves = CHANNELS // 2, []
    for i in range(count):
        rho = 10 ** (i / (count - 1))
        waves.append(math.pi * rho * (math.cos(i) * x + math.sin(i) * y))
    return [math.cos(w) for w in waves] + [math.sin(w) for w in waves]


@pytest.mark.parametrize(("text", "transposed"), [("cape", False), ("cape(axis_order=yx)", True)])
def test_cape(text, transposed):
    x = normal(2, 16, CHANNELS)
    want = x * np.where(np.arange(16) == 0, 1, math.sqrt(CHANNELS))[:, None]
    places = itertools.product(np.linspace(-1, 1, 3), np.linspace(-1, 1, 5))
    want[:, 1:] += [cape(x, y) if transposed else cape(y, x) for y, x in places]
    got = trained_scheme(text, prefix=1, embed_prefix=1).embed(jnp.asarray(x), GRID)
    np.testing.assert_allclose(got, want, **EXACT)


def test_cape_augments_examples_within_limits():
    grid, batch = (2, 3), 400
    still = np.array([x for _, x in itertools.product((-1, 1), (-1, 0, 1))])
    zeros = jnp.zeros((batch, 6, CHANNELS))

    def shift_of_tokens(text):
        """The shift of tokens in x in training, modulo 2, by the phase of channel 0, cos(pi x)."""
        out = np.asarray(scheme(text).embed(zeros, grid, jax.random.key(0)))
        phase = np.arctan2(out[..., CHANNELS // 2], out[..., 0]) / math.pi
        return (phase - still + 1) % 2 - 1

    # Equal for the tokens of an example, or half of the distance of two columns, which is 1.
    for options, draws, least in (
        ("local_shift=0", batch, 0.45),
        ("global_shift=0", 6 * batch, 0.48),
    ):
        shift = shift_of_tokens(f"cape(global_scale=1,{options})")
        assert least < np.abs(shift).max() < 0.5
        assert np.unique(shift.round(9)).size == draws
    scale = 1 + shift_of_tokens("cape(global_shift=0,local_shift=0)")[:, 2]  # of a token at x = 1
    assert 1 / 1.4 < scale.min() < 0.73
    assert 1.37 < scale.max() < 1.4
    assert abs(np.log(scale).mean()) < 0.03  # uniform in +-0.336: three standard errors
