"""Attention of every pattern against its definition over pairs of tokens in float64."""

import functools
import json
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    explain,
)
from rope_jax_kernels.attention import neighborhood, reference
from rope_jax_kernels.checks import check_floating, check_rotation, check_terms
from tests.kernels.attention_pairs import neighbors, pairs, token_coords
from tests.kernels.rotary_cases import draw
from tests.slow import some_slow

B, N, D, A, R = 2, 2, 6, 2, 2
SCALE = 0.7
NAMES = ("q", "k", "v", "bias", "freqs")


def turn(x, coords, freqs):
    """Rotates heads [B, L, N, D] as complex numbers."""
    pair = (x[..., :R] + 1j * x[..., R : 2 * R]) * jnp.exp(
        1j * jnp.einsum("la,nar->lnr", coords, freqs)
    )
    return jnp.concatenate([pair.real, pair.imag, x[..., 2 * R :]], axis=-1)


def dense(q, k, v, bias, freqs, coords, scale, allowed, index):
    """Masked attention over all pairs: q, k, v [B, L, N, D], bias [N, entries], coords [L, A]."""
    q, k = (turn(x, coords, freqs) for x in (q, k))
    logits = jnp.einsum("blnd,bmnd->bnlm", q, k) * scale + bias[:, index]
    logits = jnp.where(allowed, logits, -1e30)
    # No gradient through the largest: it cancels, and logits computed anew may all differ from it.
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - largest)
    return jnp.einsum("bnlm,bmnd->blnd", weights / weights.sum(-1, keepdims=True), v)


@jax.jit
def dense_with_gradients(q, k, v, bias, freqs, cotangent, *static):
    """The output of `dense`, and gradients with respect to its first five arguments."""
    out, pull_back = jax.vjp(lambda *x: dense(*x, *static), q, k, v, bias, freqs)
    return out, pull_back(cotangent)


def pad(x, shape):
    """Appends zeros, so that `dense_with_gradients` is compiled once for all cases."""
    return np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


def definition(q, k, v, cotangent, bias, freqs, coords, *, pattern, grid, scale=SCALE):
    """The output and gradients of q, k, v [B, L, N, D], bias and freqs, by the definition."""
    length, most, entries = q.shape[1], 225, 225
    allowed, index = np.eye(most, dtype=bool), np.zeros((most, most), int)
    allowed[:length, :length] = False
    for query, key, entry in pairs(pattern, grid):
        allowed[query, key], index[query, key] = True, entry
    q, k, v, cotangent = (pad(np.float64(x), (B, most, N, D)) for x in (q, k, v, cotangent))
    table, coords = pad(bias.reshape(N, -1), (N, entries)), pad(coords, (most, A))
    with jax.enable_x64(True):
        out, (*heads, dbias, dfreqs) = dense_with_gradients(
            q, k, v, table, freqs, cotangent, coords, scale, allowed, index
        )
    dbias = dbias[:, : bias[0].size].reshape(bias.shape)
    return out[:, :length], (*(x[:, :length] for x in heads), dbias, dfreqs)


def output(q, k, v, bias, pattern, grid):
    """The output by the definition, without a rotation and with the usual scale."""
    still = np.zeros((N, A, R)), np.zeros((q.shape[1], A))
    terms = {"pattern": pattern, "grid": grid, "scale": D**-0.5}
    return definition(q, k, v, v, np.float64(bias), *still, **terms)[0]


def token_shape(pattern, grid):
    """The shape of the tokens of one example."""
    return (grid[0] * grid[1],) if isinstance(pattern, Global) else grid


CASES = {
    "global": (Global(), (3, 5)),
    "window divides": (Window((2, 3)), (4, 9)),
    "window shifted": (Window((4, 4), (2, 2)), (8, 8)),
    "window pads": (Window((4, 3)), (5, 7)),
    "window pads, shifted": (Window((4, 3), (2, 1)), (7, 8)),
    "window pads a whole region": (Window((4, 4), (3, 2)), (5, 9)),
    "window shifts rows only": (Window((3, 3), (1, 0)), (6, 4)),
    "window above one axis": (Window((7, 3), (3, 1)), (5, 7)),
    "window above both axes": (Window((7, 7), (3, 3)), (5, 6)),
    "neighborhood": (Neighborhood((3, 3)), (6, 5)),
    "neighborhood in several tiles": (Neighborhood((3, 5)), (17, 13)),
    "neighborhood even": (Neighborhood((2, 4)), (7, 12)),
    "neighborhood dilated, ragged": (Neighborhood((3, 3), (2, 3)), (7, 11)),
    "neighborhood dilated in several tiles": (Neighborhood((3, 2), (2, 1)), (23, 5)),
    "neighborhood of small classes": (Neighborhood((5, 3), (3, 2)), (7, 5)),
    "neighborhood dilated beyond the map": (Neighborhood((3, 3), (9, 2)), (4, 7)),
    "neighborhood above the map": (Neighborhood((7, 9)), (5, 6)),
}


FAST = [
    "global",
    "window pads, shifted",
    "window above one axis",
    "neighborhood dilated, ragged",
    "neighborhood above the map",
]


@pytest.mark.parametrize("name", some_slow(CASES, FAST))
def test_values_and_gradients_match_the_definition(name):
    pattern, grid = CASES[name]
    places = token_shape(pattern, grid)
    shape, shape_of_map = (B, grid[0] * grid[1], N, D), (B, *places, N, D)
    tables = pattern.bias_shape(N, places), (N, A, R), (pattern.rotated_tokens(places), A)
    q, k, v, g, bias, freqs, coords = draw(0, *[shape] * 4, *tables, dtype=np.float64)

    @jax.jit
    def values_and_gradients(cotangent, coords, *arrays):
        def attend(q, k, v, bias, freqs):
            heads = [x.reshape(shape_of_map) for x in (q, k, v)]
            terms = {"rotation": Rotation(coords, freqs), "bias": bias, "scale": SCALE}
            return attention(*heads, pattern=pattern, **terms).reshape(shape)

        out, pull_back = jax.vjp(attend, *arrays)
        return out, pull_back(cotangent)

    with jax.enable_x64(True):
        out, gradients = values_and_gradients(g, coords, q, k, v, bias, freqs)
    coords = coords[token_coords(pattern, grid)]
    expected, expected_gradients = definition(
        q, k, v, g, bias, freqs, coords, pattern=pattern, grid=grid
    )
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-10)
    for name, *gradient_pair in zip(NAMES, gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(*gradient_pair, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("size", [4, 16])
def test_blocks_of_queries_match_the_definition(size, monkeypatch):
    monkeypatch.setattr(reference, "MOST_TOKENS", 14)  # one less than there are
    monkeypatch.setattr(reference, "BLOCK", size)
    test_values_and_gradients_match_the_definition("global")


TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
KINDS = ["global", "window pads, shifted", "neighborhood dilated, ragged"]
PRECISIONS = [(name, dtype) for name in KINDS for dtype in TOLERANCES]


@pytest.mark.parametrize(("name", "dtype"), some_slow(PRECISIONS, PRECISIONS[::4]))
def test_precision(name, dtype):
    tolerance = TOLERANCES[dtype]
    pattern, grid = CASES[name]
    places = token_shape(pattern, grid)
    qkv, bias = draw(1, (B, *places, 3, N, D), pattern.bias_shape(N, places))
    qkv = qkv.astype(jnp.dtype(dtype))
    out = jax.jit(functools.partial(attention_qkv, pattern=pattern))(qkv, bias=bias)
    assert (out.dtype, out.shape) == (dtype, (B, *places, N, D))
    parts = (qkv[..., i, :, :].reshape(B, -1, N, D) for i in range(3))
    exact = output(*parts, bias, pattern, grid)
    out = np.asarray(out, np.float64).reshape(exact.shape)
    np.testing.assert_allclose(out, exact, atol=tolerance, rtol=tolerance)


GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "natten.json").read_text())[
    "cases"
]


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: "L{length}-K{kernel}-d{dilation}".format(**case)
)
def test_neighborhoods_match_natten(case):
    """Tests the loops of the definition, with which the tests below compare."""
    length, kernel = case["length"], case["kernel"]
    attending = pairs(Neighborhood((1, kernel), (1, case["dilation"])), (1, length))
    by_query = [[pair for pair in attending if pair[0] == query] for query in range(length)]
    assert [len(x) for x in by_query] == [kernel] * length
    assert [x[0][1] for x in by_query] == case["start"]
    assert [x[0][2] for x in by_query] == case["rpb0"]


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(length=st.integers(1, 40), kernel=st.integers(1, 13), dilation=st.integers(1, 12))
def test_halos_hold_exactly_the_neighborhoods(length, kernel, dilation):
    axis = neighborhood.plan_axis(length, kernel, dilation)
    for i in range(length):
        r, member = i % axis.classes, i // axis.classes
        tile, place = divmod(member, axis.tile)
        start = tile * axis.tile - axis.before
        keys = [
            r + axis.classes * (start + u) for u in np.flatnonzero(axis.allowed[r, tile, place])
        ]
        assert keys == neighbors(length, kernel, dilation, i)
        offsets = axis.offsets[tile, place][axis.allowed[r, tile, place]]
        assert [(key - i) // axis.classes for key in keys] == offsets.tolist()
    assert axis.allowed.any(axis=-1).all()


@pytest.mark.parametrize(
    "name", ["global", "window pads a whole region", "neighborhood dilated, ragged"]
)
def test_extreme_logits_stay_finite(name):
    pattern, grid = CASES[name]
    places = token_shape(pattern, grid)
    q, k, v = np.float16(draw(6, *[(B, *places, N, D)] * 3))
    q, k = 300 * q, 300 * k  # products beyond float16's largest number

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradients_and_out(q, k, v):
        out = attention(q, k, v, pattern=pattern)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients, out = gradients_and_out(q, k, v)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    bias = np.zeros(pattern.bias_shape(N, places))
    exact = output(*(x.reshape(B, -1, N, D) for x in (q, k, v)), bias, pattern, grid)
    out = np.asarray(out, np.float64).reshape(exact.shape)
    np.testing.assert_allclose(out, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pattern", [Global(), Window((7, 7)), Neighborhood((7, 7))], ids=str)
def test_memory_grows_with_the_number_of_tokens(pattern):
    """Not with its square; neighbourhoods need a fifth of the memory of gathered keys."""

    def memory(side):
        shape = (1, side**2, 2, 16) if pattern == Global() else (1, side, side, 2, 16)
        loss = lambda q, k, v: attention(q, k, v, pattern=pattern).sum()
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 3
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(112) < 1.2 * 4 * memory(56)
    if isinstance(pattern, Neighborhood):
        # Bytes of one copy of each query's keys; training needs it of k, v and their gradients.
        gathered = 4 * (56**2 * 2 * 16) * 49
        assert memory(56) < 4 * gathered / 5


ones = functools.partial(np.ones, dtype=np.float32)
FLAT, MAP = ones((B, 6, N, D)), ones((B, 4, 5, N, D))
NEAR, PART = Neighborhood((3, 3)), Window((2, 9))


class Ours(Neighborhood):
    """A pattern that another package derives."""


def make_rotation(tokens, heads=N):
    return Rotation(ones((tokens, A)), ones((heads, A, R)))


@pytest.mark.usefixtures("unchecked_annotations")
def test_sizes_become_plain_integers():
    """Patterns made from lists and NumPy's integers can therefore be compared and hashed."""
    for pattern in (Window, Neighborhood):
        converted, expected = pattern([np.int64(7), 5], [3, np.int64(2)]), pattern((7, 5), (3, 2))
        assert (hash(converted), repr(converted)) == (hash(expected), repr(expected))
        assert pattern(np.int64(7), 3) == pattern((7, 7), (3, 3))


@pytest.mark.parametrize("name", KINDS)
def test_heads_may_share_a_bias(name):
    pattern, grid = CASES[name]
    places = token_shape(pattern, grid)
    qkv, bias = draw(3, (B, *places, 3, N, D), (1, *pattern.bias_shape(1, places)[1:]))

    @jax.jit
    def out_and_gradient(qkv, bias):
        out, pull_back = jax.vjp(lambda x: attention_qkv(qkv, pattern=pattern, bias=x), bias)
        return out, pull_back(jnp.ones_like(out))[0]

    shared, alone = (out_and_gradient(qkv, x) for x in (bias, bias.repeat(N, 0)))
    np.testing.assert_allclose(shared[0], alone[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shared[1], alone[1].sum(0, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_may_be_empty(name):
    pattern, grid = CASES[name]
    places = token_shape(pattern, grid)
    tables = pattern.bias_shape(N, places), (N, A, R), (pattern.rotated_tokens(places), A)
    qkv, bias, freqs, coords = draw(3, (0, *places, 3, N, D), *tables)

    def attend(qkv, bias, freqs):
        rotation = Rotation(jnp.asarray(coords), freqs)
        out = attention_qkv(qkv, pattern=pattern, rotation=rotation, bias=bias)
        assert out.shape == (0, *places, N, D)
        return out.sum()

    d_qkv, *others = jax.jit(jax.grad(attend, (0, 1, 2)))(qkv, bias, freqs)
    assert d_qkv.shape == qkv.shape
    assert not any(np.any(x) for x in others)


def test_a_batch_of_many_tokens_may_be_empty():
    x = jax.ShapeDtypeStruct((0, 1100, N, D), "float32")  # attended to in blocks of queries
    assert jax.eval_shape(lambda x: attention(x, x, x, pattern=Global()), x).shape == x.shape


@pytest.mark.parametrize(
    ("arrays", "terms", "error", "words"),
    [
        ([FLAT] * 3, {"pattern": Global}, TypeError, "pattern"),
        ([MAP] * 3, {}, ValueError, r"\[B, L, N, D\]: flatten its rows"),
        ([FLAT] * 3, {"pattern": NEAR}, ValueError, r"\[B, H, W, N, D\]: restore its rows"),
        ([FLAT, FLAT[:, 1:], FLAT], {}, ValueError, r"k has shape \(2, 5, 2, 6\).* q's shape"),
        ([FLAT, FLAT, FLAT[..., 1:]], {}, ValueError, "v has shape"),
        ([FLAT, FLAT, FLAT.astype(np.int32)], {}, TypeError, "v has dtype int32"),
        ([FLAT.astype("float8_e4m3fn")] * 3, {}, TypeError, "q has dtype float8_e4m3fn"),
        ([MAP[:, :0]] * 3, {"pattern": NEAR}, ValueError, "no dimension but the batch"),
        ([FLAT] * 3, {"bias": ones((N, 6, 5))}, ValueError, r"bias .*\(2, 6, 6\)"),
        (
            [MAP] * 3,
            {"pattern": NEAR, "bias": ones((N, 25))},
            ValueError,
            r"\(2, 5, 5\).*\[N, 2kh-1, 2kw-1\]",
        ),
        (
            [MAP] * 3,
            {"pattern": Ours((3, 3)), "bias": ones((N, 25))},
            ValueError,
            r"\(2, 5, 5\).*\[N, 2kh-1, 2kw-1\]",
        ),
        (
            [MAP] * 3,
            {"pattern": PART, "bias": ones((N, 51))},
            ValueError,
            r"\(2, 27\).*a window of \(2, 5\)",
        ),
        ([FLAT] * 3, {"bias": np.ones((N, 6, 6), np.int32)}, TypeError, "bias has dtype int32"),
        (
            [MAP] * 3,
            {"pattern": PART, "rotation": make_rotation(20)},
            ValueError,
            r"20 tokens, but a window of \(2, 5\) in q has 10",
        ),
        (
            [MAP] * 3,
            {"pattern": NEAR, "rotation": make_rotation(9)},
            ValueError,
            "9 tokens, but q has 20",
        ),
        ([FLAT] * 3, {"rotation": make_rotation(6, 3)}, ValueError, "3 heads, but q has 2"),
        ([FLAT] * 3, {"scale": ones((N, 1, 1))}, ValueError, "scale has shape .*must be one"),
        ([FLAT], {}, ValueError, r"qkv has shape .*\[B, L, 3, N, D\]"),
        ([MAP], {}, ValueError, "along the third dimension from the end"),
        ([MAP], {"pattern": NEAR}, ValueError, r"\[B, H, W, 3, N, D\]"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_unfitting_arguments_are_refused(arrays, terms, error, words):
    with pytest.raises(error, match=words):
        (attention if len(arrays) == 3 else attention_qkv)(*arrays, **{"pattern": Global()} | terms)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: check_terms((1, 6, N, D), "q", Global(), None, None, "1"),
            TypeError,
            "scale='1' is a str",
        ),
        (lambda: check_floating("q", [[1.0]]), TypeError, "q is a list"),
        (lambda: check_rotation((1, 2), 6, N, D, "q"), TypeError, "rotation is a tuple"),
        (lambda: Window((0, 7)), ValueError, r"size=\(0, 7\)"),
        (lambda: Window((7, 7), (3, 7)), ValueError, r"shift=\(3, 7\).*size=\(7, 7\)"),
        (lambda: Neighborhood((7, 7), (1, 0)), ValueError, r"dilation=\(1, 0\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_types_and_values_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


HEADS = np.ones((1, 8, 2, 64), jnp.bfloat16)
MIXED = [HEADS, HEADS, HEADS.astype("float16")]
MANY = np.ones((1, 24, 24, 1, 64), jnp.bfloat16)


def on_map(rows, head_dim=64):
    return np.ones((1, rows, 22, 1, head_dim), jnp.bfloat16)


def token_rotation(pairs=16, pairing="half"):
    return Rotation(ones((8, 2)), ones((1, 2, pairs)), pairing)


@pytest.mark.parametrize(
    ("kernel", "arrays", "terms", "reason"),
    [
        ("triton", [HEADS] * 3, {"scale": np.float32(0.5)}, "ok"),
        ("triton", [HEADS[..., :8]] * 3, {}, "head dimension is 8; 16 to 128"),
        ("triton", MIXED, {}, "different dtypes"),
        ("triton", [HEADS] * 3, {"scale": ones(())}, "scale is an array"),
        ("triton", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 17))}, "up to (16, 16)"),
        ("cudnn", [HEADS] * 3, {}, "needs a GPU"),
        ("cudnn", [HEADS.astype("float32")] * 3, {}, "float16 and bfloat16"),
        ("cudnn", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 3))}, "only Global"),
        ("mosaic", [HEADS] * 3, {"rotation": token_rotation(), "scale": 0.1}, "ok"),
        ("mosaic", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 15))}, "up to (13, 13)"),
        ("mosaic", [HEADS[:, None]] * 3, {"pattern": Window((1, 4)), "bias": ones((2, 7))}, "ok"),
        ("mosaic", [MANY] * 3, {"pattern": Window((12, 12), (6, 6))}, "3 tiles of 64 slots; in"),
        ("mosaic", [MANY[..., :32]] * 3, {"pattern": Window((12, 12), (6, 6))}, "ok"),
        ("mosaic", [HEADS] * 3, {"bias": ones((2, 8, 8))}, "a bias, which it does not read"),
        ("mosaic", [HEADS.astype("float32")] * 3, {}, "float32; float16 and bfloat16"),
        ("mosaic", [HEADS[..., :48]] * 3, {}, "head dimension is 48; 32, 64, 128"),
        (
            "mosaic",
            [HEADS] * 3,
            {"rotation": token_rotation(pairing="interleaved")},
            "neighbouring channels",
        ),
        ("mosaic", [HEADS] * 3, {"rotation": token_rotation(pairs=12)}, "12 pairs"),
        ("mosaic", MIXED, {}, "different dtypes"),
        ("mosaic", [HEADS] * 3, {"scale": ones(())}, "scale is an array"),
        ("mosaic", [on_map(8)] * 3, {"pattern": Neighborhood((3, 3), (3, 1))}, "map (8, 22)"),
        ("mosaic", [on_map(8)] * 3, {"pattern": NEAR, "scale": -1.0}, "scale is -1.0"),
        ("mosaic", [on_map(28)] * 3, {"pattern": Neighborhood((13, 13))}, "more shared memory"),
        ("mosaic", [on_map(8, 128)] * 3, {"pattern": NEAR}, "is 128; 32, 64 are served"),
    ],
)
@pytest.mark.usefixtures("interpreted", "unchecked_annotations")
def test_kernels_say_why_they_refuse(kernel, arrays, terms, reason):
    assert reason in explain(attention, *arrays, **{"pattern": Global()} | terms)[kernel]
