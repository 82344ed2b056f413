"""Biases against their definitions, written out pair by pair in float64.

Those of windows and neighbourhoods are in the definitions of models, tests/models.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.attention import SelfAttention
from rope_jax.positions.resample import resample
from rope_jax_kernels import Global, Window, attention, window_bias
from tests.models.definition import softmax
from tests.positions.schemes import (
    DEPTH,
    EXACT,
    HEAD_DIM,
    HEADS,
    compiled,
    compiled_terms,
    normal,
    scheme,
    tokens,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")


def content_free_weights(terms, grid, prefix):
    """Weights [L, L] of attention with no content, in one head."""
    length = prefix + grid[0] * grid[1]
    dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    layer = SelfAttention(length, 1, qkv_bias=False, rngs=nnx.Rngs(0), dtypes=dtypes)
    eye = np.eye(length)
    # No queries and keys; the value is the token's number, one-hot.
    layer.qkv.kernel.set_value(jax.device_put(np.concatenate([0 * eye, 0 * eye, eye], axis=1)))
    layer.proj.kernel.set_value(jax.device_put(eye))
    run = jax.jit(lambda terms: layer(jnp.asarray(eye[None]), grid, Global(), terms))
    return np.asarray(run(terms))[0]


# rpb


# rows of the map grow, columns shrink; a window has the same rules as the map
@pytest.mark.parametrize(
    ("grow", "shrink", "windows"),
    [("bicubic", "crop", True), ("pad", "bicubic", False), ("antialias", "bilinear", False)],
)
def test_rpb_on_another_map(grow, shrink, windows):
    pattern = Window((5, 4)) if windows else Global()
    text = f"rpb(grow={grow},shrink={shrink})"
    position = trained_scheme(text, grid=(3, 4), pattern=pattern)
    assert position.shrink == shrink
    resize = jax.jit(lambda x: resample(resample(x, (9, 7), grow), (9, 3), shrink))
    want = np.asarray(resize(position.offsets[...]))[1]
    bias = np.asarray(compiled_terms(position, (5, 2)).layer(1).bias).reshape(HEADS, 9, 3)
    np.testing.assert_allclose(bias if windows else bias[:, ::-1, ::-1], want, **EXACT)


def test_prefix_tokens_have_three_biases():
    grid, prefix = (2, 3), 2
    settings = {"heads": 1, "grid": grid, "prefix": prefix}
    position = trained_scheme("rpb(prefix=True)", **settings)
    offsets, three = (np.asarray(x[1]) for x in (position.offsets, position.prefix_offsets))
    want = np.zeros((8, 8))
    for (i, q), (j, k) in itertools.product(enumerate([None, None, *tokens(grid)]), repeat=2):
        if q is None or k is None:
            # BEiT's index: class token to map, map to class token, class token to itself
            want[i, j] = three[0, 2 if q is k else 0 if q is None else 1]
        else:
            want[i, j] = offsets[0, k[0] - q[0] + 1, k[1] - q[1] + 2]
    got = content_free_weights(compiled_terms(position, grid).layer(1), grid, prefix)
    np.testing.assert_allclose(got, softmax(want), **EXACT)
    # A sum with a bias that lacks such entries keeps them.
    summed = scheme("rpb(prefix=True)+alibi2d", **settings)
    entries = compiled_terms(summed, grid).layer(0).bias
    np.testing.assert_array_equal(entries[:, -3:], summed.parts[0].prefix_offsets[0])
    assert entries.shape == (1, 3 * 5 + 3)


def test_biases_through_a_norm_over_the_keys():
    grid, prefix = (3, 4), 1
    settings = {"heads": 1, "grid": grid, "prefix": prefix}
    fresh = scheme("rpb(key_norm=True)", **settings)
    assert (fresh.key_scale[...] == 1).all()
    assert (fresh.key_bias[...] == 0).all()
    position = trained_scheme("rpb(key_norm=True)", **settings)
    values = (position.offsets, position.key_scale, position.key_bias)
    offsets, scale, shift = (np.asarray(x[1]) for x in values)
    want = np.zeros((prefix + 12, prefix + 12))
    for i, q in enumerate(tokens(grid)):
        row = np.array([offsets[0, k[0] - q[0] + 2, k[1] - q[1] + 3] for k in tokens(grid)])
        row = (row - row.mean()) / np.sqrt(row.var() + 1e-5)
        want[prefix + i, prefix:] = row * scale.ravel() + shift.ravel()
    got = content_free_weights(compiled_terms(position, grid).layer(1), grid, prefix)
    np.testing.assert_allclose(got, softmax(want), **EXACT)


# cpb


@pytest.mark.parametrize(
    ("option", "grid", "border", "prefix"),
    [
        ("creation", (3, 4), (2, 3), 0),
        ("creation", (5, 2), (2, 3), 1),
        ("current", (5, 2), (4, 1), 0),
    ],
)
def test_cpb(option, grid, border, prefix):
    text = f"cpb(hidden=6,normalise={option})"
    position = trained_scheme(text, grid=(3, 4), prefix=prefix)
    values = (position.kernel1, position.bias1, position.kernel2)
    kernel1, bias1, kernel2 = (np.asarray(x[...]) for x in values)
    rows, columns = 2 * grid[0] - 1, 2 * grid[1] - 1
    terms = compiled_terms(position, grid)
    for layer in range(DEPTH):
        bias = np.asarray(terms.layer(layer).bias)
        table = bias[:, : rows * columns].reshape(HEADS, rows, columns)
        for y, x in tokens((rows, columns)):
            # 1 at the border
            apart = (y - grid[0] + 1) / border[0], (x - grid[1] + 1) / border[1]
            o = [math.copysign(math.log2(1 + 8 * abs(d)), d) / math.log2(8) for d in apart]
            hidden = np.maximum(o @ kernel1[layer] + bias1[layer], 0)
            want = 16 / (1 + np.exp(-hidden @ kernel2[layer]))
            np.testing.assert_allclose(table[:, y, x], want, **EXACT)
        assert (bias[:, rows * columns :] == np.full((HEADS, 3 * prefix), 8)).all()
    before = compiled_terms(position, (5, 6)).layer(0).bias
    position.resize((5, 6))  # keeps the scale
    np.testing.assert_array_equal(compiled_terms(position, (5, 6)).layer(0).bias, before)


# alibi2d

# ALiBi's published slopes for 8 heads are 1/2 .. 1/256; for 12 heads those of 8 and every second
# one of 16.
SLOPES = {
    4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
    6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
}


@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("grid", [(3, 4), (4, 2)])
def test_alibi2d(heads, grid):
    bias = compiled(
        lambda position: window_bias(position.terms(grid).layer(0).bias, grid),
        scheme("alibi2d", heads=heads),
    )
    distance = [[math.dist(q, k) for k in tokens(grid)] for q in tokens(grid)]
    want = -np.array(SLOPES[heads])[:, None, None] * distance
    np.testing.assert_allclose(bias, want, **EXACT)


# irpe


def bucket(r, alpha=1.9, beta=3.8, gamma=15.2):
    """Equation 18 of iRPE, and the conversion to a whole number in its code."""
    if abs(r) <= alpha:
        return r
    steps = math.log(abs(r) / alpha) / math.log(gamma / alpha)
    return int(math.copysign(int(min(beta, round(alpha + steps * (beta - alpha)))), r))


@pytest.mark.parametrize("prefix", [0, 2])
def test_irpe(prefix):
    assert [bucket(r) for r in (0, 1, 2, 3, 4, 5, 13, -3)] == [0, 1, 2, 2, 3, 3, 3, -2]
    grid = (2, 14)
    position = trained_scheme("irpe", prefix=prefix)
    assert position.vectors.shape == (DEPTH, HEAD_DIM, 49 + (prefix > 0))
    where = [None] * prefix + tokens(grid)
    q, k, v = normal(3, 2, len(where), HEADS, HEAD_DIM)
    extra_bias = normal(HEADS, len(where), len(where))

    def attend(q, k, v, bias):
        def attend_example(q, k, v, bias):
            return attention(q[None], k[None], v[None], pattern=Global(), bias=bias)[0]

        return jax.vmap(attend_example)(q, k, v, jnp.asarray(extra_bias) + bias)

    transform = position.terms(grid).layer(1).transform
    got = jax.jit(lambda transform, *qkv: transform(*qkv, attend))(transform, q, k, v)
    vectors = np.asarray(position.vectors[1])

    def index(query, key):
        if query is None or key is None:
            return 49
        return 7 * (bucket(query[0] - key[0]) + 3) + bucket(query[1] - key[1]) + 3

    picked = vectors[:, [[index(query, key) for key in where] for query in where]]
    logits = np.einsum("blnd,bmnd->bnlm", q, k) + np.einsum("blnd,dlm->bnlm", q, picked)
    want = np.einsum("bnlm,bmnd->blnd", softmax(logits / math.sqrt(HEAD_DIM) + extra_bias), v)
    np.testing.assert_allclose(got, want, **EXACT)
