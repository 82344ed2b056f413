"""Depthwise convolutions and the schemes made of them, and what joins tokens layer by layer, written out in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions import Stage, create_position
from rope_jax.positions.conditional import depthwise
from rope_jax_kernels import Global, Window, attention

pytestmark = pytest.mark.usefixtures("x64", "quick_compiles")

DEPTH, HEADS, HEAD_DIM, CHANNELS = 3, 2, 4, 8
EXACT = {"rtol": 0, "atol": 1e-12}


def scheme(text, grid=(3, 4), **changes):
    at = Stage(depth=DEPTH, heads=HEADS, head_dim=HEAD_DIM, channels=CHANNELS, grid=grid, dtype=np.dtype(float), **changes)
    position = create_position(text, at, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, param in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        param.set_value(jnp.asarray(rng.standard_normal(param.shape)))
    return position


def normal(*shape):
    return np.random.default_rng(2).standard_normal(shape)


def convolved(image, kernel, bias):
    """torch's Conv2d(C, C, 3, padding=1, groups=C) of a map [H, W, C], term by term."""
    height, width, _ = image.shape
    out = np.zeros_like(image) + bias
    for y, x, i, j in itertools.product(range(height), range(width), range(3), range(3)):
        if 0 <= y + i - 1 < height and 0 <= x + j - 1 < width:
            out[y, x] += image[y + i - 1, x + j - 1] * kernel[i, j]
    return out


def test_depthwise_is_a_convolution_in_the_kernels_precision():
    maps, kernel, bias = normal(2, 3, 5, CHANNELS), normal(3, 3, CHANNELS), normal(CHANNELS)
    got = depthwise(*map(jnp.asarray, (maps, kernel, bias)))
    np.testing.assert_allclose(got, [convolved(image, kernel, bias) for image in maps], **EXACT)
    rough = jnp.asarray(maps, jnp.bfloat16)
    once = depthwise(rough.astype(jnp.float64), jnp.asarray(kernel), jnp.asarray(bias)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(depthwise(rough, jnp.asarray(kernel), jnp.asarray(bias)), once)


@pytest.mark.parametrize("grid", [(3, 4), (5, 2)])
def test_gpe(grid):
    position = scheme("gpe", prefix=1, embed_prefix=1)
    waves = np.zeros((*grid, CHANNELS))
    for y, x in itertools.product(*map(range, grid)):
        for half, place in enumerate([(y + 1) / grid[0], (x + 1) / grid[1]]):
            for i in range(CHANNELS // 2):
                angle = 2 * math.pi * place / 10000 ** (2 * (i // 2) / (CHANNELS // 2))
                waves[y, x, half * CHANNELS // 2 + i] = math.cos(angle) if i % 2 else math.sin(angle)
    want = convolved(waves, np.asarray(position.kernel[...]), np.asarray(position.bias[...])).reshape(-1, CHANNELS)
    got = position.embed(jnp.ones((1, 1 + len(want), CHANNELS)), grid)[0]
    np.testing.assert_array_equal(got[0], 1)  # a class token that takes part in embeddings gets none
    np.testing.assert_allclose(got[1:], 1 + want, **EXACT)


@pytest.mark.parametrize("prefix", [0, 2])
def test_lpe(prefix):
    grid = (5, 3)
    position = scheme("lpe", prefix=prefix)
    q, k, v = normal(3, 2, prefix + 15, HEADS, HEAD_DIM)
    plain = lambda q, k, v, bias=None: attention(q, k, v, pattern=Global())
    got = position.terms(grid).layer(1).transform(*map(jnp.asarray, (q, k, v)), plain)
    want = np.array(plain(*map(jnp.asarray, (q, k, v))))
    kernel, bias = (np.asarray(x[1]) for x in (position.kernel, position.bias))
    for b, n in itertools.product(range(2), range(HEADS)):
        want[b, prefix:, n] += convolved(v[b, prefix:, n].reshape(*grid, HEAD_DIM), kernel, bias).reshape(-1, HEAD_DIM)
    np.testing.assert_allclose(got, want, **EXACT)


def test_lpe_of_windows_convolves_the_whole_map():
    position = scheme("lpe", pattern=Window((2, 2)))
    v = jnp.asarray(normal(1, 4, 6, HEADS, HEAD_DIM))
    nothing = lambda q, k, v, bias=None: jnp.zeros_like(v)
    in_windows = position.terms((4, 6)).layer(2).transform(v, v, v, nothing)
    whole = position.terms((4, 6)).layer(2).transform(*[v.reshape(1, 24, HEADS, HEAD_DIM)] * 3, nothing)
    np.testing.assert_array_equal(in_windows.reshape(whole.shape), whole)


def test_lpe_starts_as_if_it_were_not_there():
    at = Stage(depth=2, heads=HEADS, head_dim=HEAD_DIM, channels=CHANNELS, grid=(2, 2))
    assert not any(leaf.any() for leaf in jax.tree.leaves(nnx.state(create_position("lpe", at, rngs=nnx.Rngs(0)), nnx.Param)))


@pytest.mark.parametrize(("text", "after"), [("peg", 0), ("peg(after=2)", 2)])
def test_peg(text, after):
    grid = (4, 3)
    position = scheme(text, prefix=1)
    assert position.mix_after(DEPTH) == (after,)
    x = normal(2, 13, CHANNELS)
    want = x.copy()
    for b in range(2):
        image = x[b, 1:].reshape(*grid, CHANNELS)
        want[b, 1:] += convolved(image, np.asarray(position.kernel[...]), np.asarray(position.bias[...])).reshape(-1, CHANNELS)
    for layer in range(DEPTH):
        np.testing.assert_allclose(position.mix(jnp.asarray(x), grid, layer), want if layer == after else x, **EXACT)


def test_peg_starts_as_in_twins():
    at = Stage(depth=2, heads=2, head_dim=64, channels=128, grid=(2, 2))
    position = create_position("peg", at, rngs=nnx.Rngs(0))
    assert abs(float(position.kernel[...].std()) - (2 / 9) ** 0.5) < 0.04  # 1152 normal draws: three standard errors of 0.01
    assert not position.bias[...].any()


# CAPE


def cape(y, x):
    count = CHANNELS // 2
    waves = []
    for i in range(count):
        rho = 10 ** (i / (count - 1))
        waves.append(math.pi * rho * (math.cos(i) * x + math.sin(i) * y))
    return [math.cos(w) for w in waves] + [math.sin(w) for w in waves]


def test_cape():
    grid = (3, 5)
    position = scheme("cape", prefix=1, embed_prefix=1)
    x = normal(2, 16, CHANNELS)
    want = x * np.where(np.arange(16) == 0, 1, math.sqrt(CHANNELS))[:, None]
    want[:, 1:] += [cape(y, x) for y, x in itertools.product(np.linspace(-1, 1, 3), np.linspace(-1, 1, 5))]
    np.testing.assert_allclose(position.embed(jnp.asarray(x), grid), want, **EXACT)


def test_cape_augments_each_example_within_its_limits():
    grid, batch = (2, 3), 400
    zeros = jnp.zeros((batch, 6, CHANNELS))
    waves = lambda text: np.asarray(scheme(text).embed(zeros, grid, jax.random.key(0)))
    places = list(itertools.product((-1, 1), (-1, 0, 1)))

    def phases(text):
        """What channel 0, cos(pi x), and the sine beside it say of x: modulo 2."""
        out = waves(text)
        return np.arctan2(out[..., CHANNELS // 2], out[..., 0]) / math.pi - np.array([x for _, x in places])

    wrapped = lambda x: (x + 1) % 2 - 1
    shift = wrapped(phases("cape(local_shift=0,global_scale=1)"))
    np.testing.assert_allclose(shift, shift[:, :1] + np.zeros(6), rtol=0, atol=1e-9)  # all tokens of an example together
    assert 0.45 < np.abs(shift).max() < 0.5
    assert np.unique(shift[:, 0].round(9)).size == batch
    local = wrapped(phases("cape(global_shift=0,global_scale=1)"))
    assert 0.48 < np.abs(local).max() < 0.5  # half of the distance of two columns, which is 1
    assert np.unique(local.round(9)).size == 6 * batch
    scale = 1 + wrapped(phases("cape(global_shift=0,local_shift=0)"))[:, 2]  # of a token at x = 1
    assert 1 / 1.4 < scale.min() < 0.73
    assert 1.37 < scale.max() < 1.4
    assert abs(np.log(scale).mean()) < 0.03  # uniform in +-0.336: three standard errors


# LaPE and what it is compared with


def layer_norm(x, scale, bias):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6) * scale + bias


def test_shared_norm_is_one_norm_again_and_again():
    position = scheme("lape(ape,join=shared_norm)", prefix=1)
    want = np.concatenate([np.zeros((1, CHANNELS)), np.asarray(position.inner.table((3, 4)))])
    for layer in range(DEPTH):
        want = layer_norm(want, np.asarray(position.scale[...]), np.asarray(position.bias[...]))
        np.testing.assert_allclose(position.terms((3, 4)).layer(layer).add, want, **EXACT)


@pytest.mark.parametrize("join", ["share", "unshare"])
def test_embeddings_that_join_the_tokens_before_every_layer(join):
    position = scheme(f"lape(ape,join={join})", prefix=1)
    x = jnp.asarray(normal(1, 13, CHANNELS))
    tables = [position.inner.table((3, 4))] * DEPTH
    if join == "unshare":
        tables[1:] = [later.table((3, 4)) for later in position.later]
        assert not np.allclose(tables[1], tables[2])
    np.testing.assert_allclose(position.embed(x[:, 1:], (3, 4)), x[:, 1:] + tables[0], **EXACT)
    for layer in range(DEPTH):
        want = np.array(x)
        if layer < DEPTH - 1:
            want[:, 1:] += tables[layer + 1]
        np.testing.assert_allclose(position.mix(x, (3, 4), layer), want, **EXACT)
    assert jax.tree.leaves(position.terms((3, 4))) == []
    position.resize((2, 5))
    assert {leaf.shape for leaf in jax.tree.leaves(nnx.state(position, nnx.Param))} == {(10, CHANNELS)}
    assert position.mix(x[:, :11], (2, 5), 0).shape == (1, 11, CHANNELS)
