"""Depthwise convolutions and the schemes made of them, written out in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.conditional import depthwise
from tests.positions.schemes import (
    CHANNELS,
    DEPTH,
    EXACT,
    HEAD_DIM,
    HEADS,
    compiled,
    normal,
    scheme,
    tokens,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")


def convolve(image, kernel, bias):
    """Computes torch's Conv2d(C, C, 3, padding=1, groups=C) of a map [H, W, C], term by term."""
    height, width, _ = image.shape
    out = np.zeros_like(image) + bias
    for y, x, i, j in itertools.product(range(height), range(width), range(3), range(3)):
        if 0 <= y + i - 1 < height and 0 <= x + j - 1 < width:
            out[y, x] += image[y + i - 1, x + j - 1] * kernel[i, j]
    return out


def test_depthwise_convolves_in_the_precision_of_the_kernel():
    rough, run = jnp.asarray(normal(2, 3, 5, 8), jnp.bfloat16), jax.jit(depthwise)
    kernel, bias = normal(3, 3, 8), normal(8)
    rounded_once = run(rough.astype(jnp.float64), kernel, bias).astype(jnp.bfloat16)
    np.testing.assert_array_equal(run(rough, kernel, bias), rounded_once)


@pytest.mark.parametrize("grid", [(3, 4), (5, 2)])
def test_gpe(grid):
    def wave(y, x, channel):
        half, i = divmod(channel, CHANNELS // 2)
        place = ((y + 1) / grid[0], (x + 1) / grid[1])[half]
        angle = 2 * math.pi * place / 10000 ** (2 * (i // 2) / (CHANNELS // 2))
        return math.cos(angle) if i % 2 else math.sin(angle)

    position = trained_scheme("gpe", prefix=1, embed_prefix=1)
    waves = [[wave(y, x, channel) for channel in range(CHANNELS)] for y, x in tokens(grid)]
    kernel, bias = np.asarray(position.kernel[...]), np.asarray(position.bias[...])
    want = convolve(np.reshape(waves, (*grid, CHANNELS)), kernel, bias).reshape(-1, CHANNELS)
    embed = lambda position, tokens: position.embed(tokens, grid)
    got = compiled(embed, position, np.ones((1, 1 + len(want), CHANNELS)))[0]
    np.testing.assert_array_equal(got[0], 1)  # prefix tokens have no embedding
    np.testing.assert_allclose(got[1:], 1 + want, **EXACT)


@pytest.mark.parametrize("prefix", [0, 2])
def test_lpe(prefix):
    grid = (5, 3)
    position = trained_scheme("lpe", prefix=prefix)
    q, k, v = normal(3, 2, prefix + 15, HEADS, HEAD_DIM)
    add = lambda q, k, v: q + k + v
    run = lambda position, *qkv: position.terms(grid).layer(1).transform(*qkv, add)
    got = compiled(run, position, q, k, v)
    want = q + k + v
    kernel, bias = (np.asarray(x[1]) for x in (position.kernel, position.bias))
    for b, n in tokens((2, HEADS)):
        image = v[b, prefix:, n].reshape(*grid, HEAD_DIM)
        want[b, prefix:, n] += convolve(image, kernel, bias).reshape(-1, HEAD_DIM)
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize(("text", "after"), [("peg", 0), ("peg(after=2)", 2)])
def test_peg(text, after):
    grid = (4, 3)
    position = trained_scheme(text, prefix=1)
    assert position.mix_after(DEPTH) == (after,)
    x = normal(2, 13, CHANNELS)
    want, (kernel, bias) = x.copy(), map(np.asarray, (position.kernel[...], position.bias[...]))
    for b in range(2):
        image = x[b, 1:].reshape(*grid, CHANNELS)
        want[b, 1:] += convolve(image, kernel, bias).reshape(-1, CHANNELS)
    for layer in range(DEPTH):
        got = compiled(lambda position, x, layer=layer: position.mix(x, grid, layer), position, x)
        np.testing.assert_allclose(got, want if layer == after else x, **EXACT)


def test_initial_peg_matches_twins():
    position = scheme("peg", heads=8)
    # 1152 normal draws: three standard errors of 0.01
    assert abs(float(position.kernel[...].std()) - (2 / 9) ** 0.5) < 0.04
    assert not position.bias[...].any()
