"""Biases and their definitions, written out pair by pair in float64."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.attention import SelfAttention
from rope_jax.positions import Stage, create_position
from rope_jax_kernels import Global, Neighborhood, Window, attention
from rope_jax_kernels.attention.reference import window_bias

pytestmark = pytest.mark.usefixtures("x64", "quick_compiles")

DEPTH, HEADS, HEAD_DIM = 2, 3, 8
EXACT = {"rtol": 0, "atol": 1e-12}


def scheme(text, grid=(3, 4), **changes):
    at = Stage(depth=DEPTH, heads=HEADS, head_dim=HEAD_DIM, channels=24, grid=grid, dtype=np.dtype(float), **changes)
    position = create_position(text, at, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, param in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        param.set_value(jnp.asarray(rng.standard_normal(param.shape)))
    return position


def tokens(grid):
    return list(itertools.product(range(grid[0]), range(grid[1])))


def weights_of(terms, grid, prefix):
    """Weights [L, L] of attention with no content, in one head."""
    length = prefix + grid[0] * grid[1]
    layer = SelfAttention(length, 1, qkv_bias=False, rngs=nnx.Rngs(0), dtypes={"dtype": jnp.float64, "param_dtype": jnp.float64})
    eye = jnp.eye(length)
    layer.qkv.kernel.set_value(jnp.concatenate([0 * eye, 0 * eye, eye], axis=1))  # no queries and keys; the value says which token it is
    layer.proj.kernel.set_value(eye)
    return np.asarray(layer(eye[None], grid, Global(), terms))[0]


def test_prefix_tokens_have_three_biases():
    grid, prefix = (2, 3), 2
    at = Stage(depth=DEPTH, heads=1, head_dim=8, channels=8, grid=grid, prefix=prefix, dtype=np.dtype(float))
    position = create_position("rpb(prefix=True)", at, rngs=nnx.Rngs(0))
    offsets, three = (np.random.default_rng(i).standard_normal(x.shape) for i, x in enumerate([position.offsets, position.prefix_offsets]))
    position.offsets.set_value(jnp.asarray(offsets))
    position.prefix_offsets.set_value(jnp.asarray(three))
    want = np.zeros((8, 8))
    for (i, q), (j, k) in itertools.product(enumerate([None, None, *tokens(grid)]), repeat=2):
        if q is None or k is None:  # BEiT's index: class token to map, map to class token, class token to itself
            want[i, j] = three[1, 0, 2 if q is k else 0 if q is None else 1]
        else:
            want[i, j] = offsets[1, 0, k[0] - q[0] + 1, k[1] - q[1] + 2]
    got = weights_of(position.terms(grid).layer(1), grid, prefix)
    np.testing.assert_allclose(got, np.exp(want) / np.exp(want).sum(axis=1, keepdims=True), **EXACT)
    # A sum with a bias that says nothing of prefix tokens keeps what the other says.
    summed = create_position("rpb(prefix=True)+alibi2d", at, rngs=nnx.Rngs(0))
    entries = summed.terms(grid).layer(0).bias
    np.testing.assert_array_equal(entries[:, -3:], summed.parts[0].prefix_offsets[0])
    assert entries.shape == (1, 3 * 5 + 3)


@pytest.mark.parametrize("prefix", [0, 1])
def test_biases_through_a_norm_over_the_keys(prefix):
    grid = (3, 4)
    at = Stage(depth=DEPTH, heads=1, head_dim=8, channels=8, grid=grid, prefix=prefix, dtype=np.dtype(float))
    position = create_position("rpb(key_norm=True)", at, rngs=nnx.Rngs(0))
    start = position.key_scale[...], position.key_bias[...]
    np.testing.assert_array_equal(start, [np.ones((DEPTH, *grid)), np.zeros((DEPTH, *grid))])
    offsets, scale, shift = (np.random.default_rng(i).standard_normal(x.shape) for i, x in enumerate([position.offsets, *start]))
    for param, value in zip((position.offsets, position.key_scale, position.key_bias), (offsets, scale, shift), strict=True):
        param.set_value(jnp.asarray(value))
    want = np.zeros((prefix + 12, prefix + 12))
    for i, q in enumerate(tokens(grid)):
        row = np.array([offsets[1, 0, k[0] - q[0] + 2, k[1] - q[1] + 3] for k in tokens(grid)])
        want[prefix + i, prefix:] = (row - row.mean()) / np.sqrt(row.var() + 1e-5) * scale[1].ravel() + shift[1].ravel()
    got = weights_of(position.terms(grid).layer(1), grid, prefix)
    np.testing.assert_allclose(got, np.exp(want) / np.exp(want).sum(axis=1, keepdims=True), **EXACT)


@pytest.mark.parametrize("grid", [(3, 4), (5, 2)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_cpb(grid, prefix):
    position = scheme("cpb(hidden=6)", prefix=prefix)
    kernel1, bias1, kernel2 = (np.asarray(x[...]) for x in (position.kernel1, position.bias1, position.kernel2))
    for layer in range(DEPTH):
        bias = np.asarray(position.terms(grid).layer(layer).bias)
        for (qy, qx), (ky, kx) in itertools.product(tokens(grid), repeat=2):
            apart = [(qy - ky) / 2, (qx - kx) / 3]  # 1 at the border of the map of creation, 3 x 4
            apart = np.array([math.copysign(math.log2(1 + 8 * abs(d)), d) / math.log2(8) for d in apart])
            hidden = np.maximum(apart @ kernel1[layer] + bias1[layer], 0)
            want = 16 / (1 + np.exp(-hidden @ kernel2[layer]))
            index = (qy - ky + grid[0] - 1) * (2 * grid[1] - 1) + qx - kx + grid[1] - 1
            np.testing.assert_allclose(bias[:, index], want, **EXACT)
        np.testing.assert_array_equal(bias[:, (2 * grid[0] - 1) * (2 * grid[1] - 1) :], np.full((HEADS, 3 * prefix), 8))


def test_cpb_of_a_window_is_that_of_a_map_of_its_size_and_neighbourhoods_count_the_other_way():
    whole = scheme("cpb(hidden=6)", grid=(3, 3)).terms((3, 3)).layer(1).bias
    window = scheme("cpb(hidden=6)", grid=(9, 8), pattern=Window((3, 3))).terms((9, 8)).layer(1).bias
    np.testing.assert_array_equal(window, whole)
    near = scheme("cpb(hidden=6)", grid=(9, 8), pattern=Neighborhood((3, 3))).terms((9, 8)).layer(1).bias
    np.testing.assert_array_equal(np.asarray(near)[:, ::-1, ::-1].reshape(HEADS, -1), whole)


def test_cpb_keeps_its_scale_when_the_map_of_creation_changes():
    position = scheme("cpb(hidden=6)")
    before = position.terms((5, 6)).layer(0).bias
    position.resize((5, 6))
    np.testing.assert_array_equal(position.terms((5, 6)).layer(0).bias, before)


# ALiBi's published slopes for 8 heads are 1/2 .. 1/256; for 12 heads those of 8 and every second one of 16.
SLOPES = {4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], 6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]}


@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("grid", [(3, 4), (4, 2)])
def test_alibi2d(heads, grid):
    at = Stage(depth=1, heads=heads, head_dim=4, channels=4 * heads, grid=(3, 4), dtype=np.dtype(float))
    bias = window_bias(create_position("alibi2d", at, rngs=nnx.Rngs(0)).terms(grid).layer(0).bias, grid)
    for (i, q), (j, k) in itertools.product(enumerate(tokens(grid)), repeat=2):
        np.testing.assert_allclose(bias[:, i, j], [-slope * math.dist(q, k) for slope in SLOPES[heads]], **EXACT)


def bucket(r, alpha=1.9, beta=3.8, gamma=15.2):
    """iRPE's equation 18, and the conversion to a whole number in its code."""
    if abs(r) <= alpha:
        return r
    return int(math.copysign(1, r)) * int(min(beta, round(alpha + math.log(abs(r) / alpha) / math.log(gamma / alpha) * (beta - alpha))))


def test_buckets_of_irpe():
    assert [bucket(r) for r in (0, 1, 2, 3, 4, 5, 13)] == [0, 1, 2, 2, 3, 3, 3]
    position = scheme("irpe", grid=(9, 9))
    got = np.asarray(position.terms((9, 12)).transform.columns)
    assert got.shape == (12, 12, 7)
    for i, j in itertools.product(range(12), repeat=2):
        assert got[i, j].argmax() == bucket(i - j) + 3
        assert got[i, j].sum() == 1


@pytest.mark.parametrize("prefix", [0, 2])
def test_irpe(prefix):
    grid = (6, 5)
    position = scheme("irpe", prefix=prefix)
    assert position.vectors.shape == (DEPTH, HEAD_DIM, 49 + (prefix > 0))
    length = prefix + grid[0] * grid[1]
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, length, HEADS, HEAD_DIM))
    own = np.random.default_rng(4).standard_normal((HEADS, length, length))
    transform = position.terms(grid).layer(1).transform

    def attend(q, k, v, bias=None):
        return attention(q, k, v, pattern=Global(), bias=jnp.asarray(own) + bias)

    got = transform(*map(jnp.asarray, (q, k, v)), attend)
    vectors, where = np.asarray(position.vectors[...])[1], [None] * prefix + tokens(grid)
    for b, n in itertools.product(range(2), range(HEADS)):
        logits = q[b, :, n] @ k[b, :, n].T / math.sqrt(HEAD_DIM) + own[n]
        for (i, one), (j, other) in itertools.product(enumerate(where), repeat=2):
            index = 49 if one is None or other is None else 7 * (bucket(one[0] - other[0]) + 3) + bucket(one[1] - other[1]) + 3
            logits[i, j] += q[b, i, n] @ vectors[:, index] / math.sqrt(HEAD_DIM)
        weights = np.exp(logits)
        np.testing.assert_allclose(got[b, :, n], weights / weights.sum(axis=1, keepdims=True) @ v[b, :, n], **EXACT)


def test_irpe_starts_as_if_it_were_not_there():
    at = Stage(depth=1, heads=2, head_dim=4, channels=8, grid=(2, 2))
    assert not create_position("irpe", at, rngs=nnx.Rngs(0)).vectors[...].any()
