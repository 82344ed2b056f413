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
from tests.kernels.attention_pairs import neighbors, pairs, places, token_coords
from tests.kernels.covering import covering

B, N, D, A, R = 2, 2, 6, 2, 2
SCALE = 0.7


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
    """By the definition: the output, and the gradients of q, k, v [B, L, N, D], bias and freqs."""
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
    """By the definition, without a rotation and with the usual scale."""
    still = np.zeros((N, A, R)), np.zeros((q.shape[1], A))
    terms = {"pattern": pattern, "grid": grid, "scale": D**-0.5}
    return definition(q, k, v, v, np.float64(bias), *still, **terms)[0]


def draw(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def places_of(pattern, grid):
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


@pytest.mark.parametrize("name", covering(CASES, FAST))
def test_values_and_gradients_are_those_of_the_definition(name):
    pattern, grid = CASES[name]
    length, place = grid[0] * grid[1], token_coords(pattern, grid)
    shape = (B, length, N, D)
    q, k, v, g, bias, freqs, coords = draw(
        0,
        shape,
        shape,
        shape,
        shape,
        pattern.bias_shape(N, places_of(pattern, grid)),
        (N, A, R),
        (pattern.rotated_tokens(places_of(pattern, grid)), A),
    )
    map_shape = shape if isinstance(pattern, Global) else (B, *grid, N, D)

    @jax.jit
    def values_and_gradients(cotangent, coords, *arrays):
        def attend(q, k, v, bias, freqs):
            q, k, v = (x.reshape(map_shape) for x in (q, k, v))
            return attention(
                q, k, v, pattern=pattern, rotation=Rotation(coords, freqs), bias=bias, scale=SCALE
            ).reshape(shape)

        out, pull_back = jax.vjp(attend, *arrays)
        return out, pull_back(cotangent)

    with jax.enable_x64(True):
        out, gradients = values_and_gradients(g, coords, q, k, v, bias, freqs)
    expected, expected_gradients = definition(
        q, k, v, g, bias, freqs, coords[place], pattern=pattern, grid=grid
    )
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-10)
    for name, gradient, wanted in zip(
        ("q", "k", "v", "bias", "freqs"), gradients, expected_gradients, strict=True
    ):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-9, err_msg=name)


TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
KINDS = ["global", "window pads, shifted", "neighborhood dilated, ragged"]
PRECISIONS = [(name, dtype) for name in KINDS for dtype in TOLERANCES]


@pytest.mark.parametrize("case", covering(PRECISIONS, PRECISIONS[::4]), ids=str)
def test_precision(case):
    name, dtype = case
    tolerance = TOLERANCES[dtype]
    pattern, grid = CASES[name]
    shape = (B, grid[0] * grid[1], N, D)
    q, k, v = (jnp.asarray(x, dtype) for x in draw(1, shape, shape, shape))
    (bias,) = draw(2, pattern.bias_shape(N, places_of(pattern, grid)), dtype=np.float32)
    map_shape = shape if isinstance(pattern, Global) else (B, *grid, N, D)
    packed = jnp.stack([x.reshape(map_shape) for x in (q, k, v)], axis=-3)
    out = jax.jit(functools.partial(attention_qkv, pattern=pattern))(packed, bias=bias)
    assert (out.dtype, out.shape) == (dtype, map_shape)
    exact = output(q, k, v, bias, pattern, grid)
    np.testing.assert_allclose(
        np.asarray(out, np.float64).reshape(shape), exact, atol=tolerance, rtol=tolerance
    )


GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "natten.json").read_text())[
    "cases"
]


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: "L{length}-K{kernel}-d{dilation}".format(**case)
)
def test_neighborhoods_are_nattens(case):
    """With v the identity the output is the attention map; a quadratic bias shows the index."""
    length, kernel, dilation = case["length"], case["kernel"], case["dilation"]
    zeros, identity = (
        jnp.zeros((1, 1, length, 1, length)),
        jnp.eye(length).reshape(1, 1, length, 1, length),
    )
    bias = 0.02 * jnp.arange(2.0 * kernel - 1) ** 2
    pattern = Neighborhood((1, kernel), (1, dilation))
    weights = jax.jit(functools.partial(attention, pattern=pattern))(
        zeros, zeros, identity, bias=bias[None, None]
    )
    weights = np.asarray(weights)[0, 0, :, 0]
    start = np.array(case["start"])
    assert np.array_equal((weights > 0).argmax(axis=1), start)
    assert np.array_equal((weights > 0).sum(axis=1), np.full(length, kernel))
    token = np.arange(length)
    first, second = weights[token, start], weights[token, start + dilation]
    np.testing.assert_allclose((np.log(second / first) / 0.02 - 1) / 2, case["rpb0"], atol=1e-3)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(length=st.integers(1, 40), kernel=st.integers(1, 13), dilation=st.integers(1, 12))
def test_every_halo_holds_exactly_the_neighborhoods(length, kernel, dilation):
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


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data(), length=st.integers(1, 40), size=st.integers(1, 13))
def test_regions_of_an_axis_are_those_of_the_definition(data, length, size):
    window = Window((size, 1), (data.draw(st.integers(0, size - 1)), 0)).fit((length, 1))
    (size, shift), (window_of, place) = (
        (window.size[0], window.shift[0]),
        places(length, window.size[0], window.shift[0]),
    )
    region = reference.axis_regions(length, size, shift).reshape(-1, size)
    assert (region >= 0).sum() == length
    part = [(w, region[w, at]) for (w, _), at in zip(window_of, place, strict=True)]
    for i in range(length):
        assert [part[j] == part[i] for j in range(length)] == [
            window_of[j] == window_of[i] for j in range(length)
        ]


@pytest.mark.parametrize(
    "name", ["global", "window pads a whole region", "neighborhood dilated, ragged"]
)
def test_extreme_logits_stay_finite_and_pick_the_best_key(name):
    pattern, grid = CASES[name]
    shape = (B, grid[0] * grid[1]) if isinstance(pattern, Global) else (B, *grid)
    q, k, v = (jnp.asarray(x, jnp.float16) for x in draw(6, *[(*shape, N, D)] * 3))
    q, k = 300 * q, 300 * k  # products beyond float16's largest number

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradients_and_out(q, k, v):
        out = attention(q, k, v, pattern=pattern)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients, out = gradients_and_out(q, k, v)
    assert all(bool(jnp.isfinite(x).all()) for x in (out, *gradients))
    bias = np.zeros(pattern.bias_shape(N, places_of(pattern, grid)))
    exact = output(*(x.reshape(B, -1, N, D) for x in (q, k, v)), bias, pattern, grid)
    np.testing.assert_allclose(
        np.asarray(out, np.float64).reshape(exact.shape), exact, rtol=2e-2, atol=2e-2
    )


def test_neighborhoods_take_a_fifth_of_the_memory_of_gathered_keys():
    shape = (1, 56, 56, 2, 32)
    loss = lambda q, k, v: attention(q, k, v, pattern=Neighborhood((7, 7))).sum()
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 3
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    # Bytes of one copy of each query's keys; training needs it of k, v and their gradients.
    gathered = 4 * np.prod(shape) * 49
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * gathered / 5


FLAT, MAP = jnp.ones((B, 6, N, D)), jnp.ones((B, 4, 5, N, D))
NEAR, PART = Neighborhood((3, 3)), Window((2, 9))


def turned(tokens, heads=N):
    return Rotation(jnp.ones((tokens, A)), jnp.ones((heads, A, R)))


@pytest.mark.usefixtures("unchecked_annotations")
def test_sizes_are_kept_as_plain_integers():
    """So that lists, and what NumPy computes, make patterns that can be compared and hashed."""
    for pattern in (Window, Neighborhood):
        made, wanted = pattern([np.int64(7), 5], [3, np.int64(2)]), pattern((7, 5), (3, 2))
        assert (hash(made), repr(made)) == (hash(wanted), repr(wanted))
        assert pattern(np.int64(7), 3) == pattern((7, 7), (3, 3))


@pytest.mark.parametrize("name", FAST)
def test_heads_may_share_a_bias(name):
    pattern, grid = CASES[name]
    places = places_of(pattern, grid)
    shapes = (B, *places, 3, N, D), pattern.bias_shape(N, places)
    qkv, bias = map(jnp.asarray, draw(3, *shapes, dtype=np.float32))

    def out_and_gradient(bias):
        attend = functools.partial(attention_qkv, qkv, pattern=pattern)
        out, pull_back = jax.vjp(lambda bias: attend(bias=bias), bias)
        return out, pull_back(jnp.ones(out.shape, out.dtype))[0]

    shared, alone = jax.jit(
        lambda bias: [out_and_gradient(x) for x in (bias[:1], jnp.stack([bias[0]] * N))]
    )(bias)
    np.testing.assert_allclose(shared[0], alone[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shared[1], alone[1].sum(0, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAST)
def test_a_batch_may_be_empty(name):
    pattern, grid = CASES[name]
    places = places_of(pattern, grid)
    qkv, bias, freqs = draw(
        3, (0, *places, 3, N, D), pattern.bias_shape(N, places), (N, A, R), dtype=np.float32
    )
    coords = np.zeros((pattern.rotated_tokens(places), A), np.float32)

    @jax.jit
    def out_and_gradients(*arguments):
        def attend(qkv, bias, freqs):
            rotation = Rotation(jnp.asarray(coords), freqs)
            return attention_qkv(qkv, pattern=pattern, rotation=rotation, bias=bias)

        out, pull_back = jax.vjp(attend, *arguments)
        return out, pull_back(out)

    out, (of_qkv, *others) = out_and_gradients(qkv, bias, freqs)
    assert (out.shape, of_qkv.shape) == ((0, *places, N, D), qkv.shape)
    assert not any(np.any(x) for x in others)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention(FLAT, FLAT, FLAT, pattern=Global), TypeError, "pattern"),
        (
            lambda: attention(MAP, MAP, MAP, pattern=Global()),
            ValueError,
            r"q has shape .*must be \[B, L, N, D\]: flatten its rows",
        ),
        (
            lambda: attention(FLAT, FLAT, FLAT, pattern=NEAR),
            ValueError,
            r"it must be \[B, H, W, N, D\]: restore its rows and columns",
        ),
        (
            lambda: attention(FLAT, FLAT[:, 1:], FLAT, pattern=Global()),
            ValueError,
            r"k has shape \(2, 5, 2, 6\); it must have q's shape",
        ),
        (lambda: attention(FLAT, FLAT, FLAT[..., 1:], pattern=Global()), ValueError, "v has shape"),
        (
            lambda: attention(FLAT, FLAT, FLAT.astype(int), pattern=Global()),
            TypeError,
            "v has dtype int32",
        ),
        (
            lambda: attention(MAP[:, :0], MAP[:, :0], MAP[:, :0], pattern=NEAR),
            ValueError,
            "no dimension but the batch may be empty",
        ),
        (
            lambda: attention(FLAT, FLAT, FLAT, pattern=Global(), implementation="cuda"),
            ValueError,
            "is not one that attention has",
        ),
        (
            lambda: attention(FLAT, FLAT, FLAT, pattern=Global(), bias=jnp.ones((N, 6, 5))),
            ValueError,
            r"bias has shape .*\(2, 6, 6\)",
        ),
        (
            lambda: attention(MAP, MAP, MAP, pattern=NEAR, bias=jnp.ones((N, 25))),
            ValueError,
            r"must be \(2, 5, 5\).*\[N, 2kh-1, 2kw-1\]",
        ),
        (
            lambda: attention(MAP, MAP, MAP, pattern=PART, bias=jnp.ones((N, 51))),
            ValueError,
            r"must be \(2, 27\).*a window of \(2, 5\)",
        ),
        (
            lambda: attention(MAP, MAP, MAP, pattern=NEAR, bias=jnp.ones((N, 5, 5), int)),
            TypeError,
            "bias has dtype int32",
        ),
        (
            lambda: attention(MAP, MAP, MAP, pattern=PART, rotation=turned(20)),
            ValueError,
            r"20 tokens, but a window of \(2, 5\) in q has 10",
        ),
        (
            lambda: attention(MAP, MAP, MAP, pattern=NEAR, rotation=turned(9)),
            ValueError,
            "places 9 tokens, but q has 20",
        ),
        (
            lambda: attention(FLAT, FLAT, FLAT, pattern=Global(), rotation=turned(6, 3)),
            ValueError,
            "is for 3 heads, but q has 2",
        ),
        (
            lambda: attention(*[FLAT.astype("float8_e4m3fn")] * 3, pattern=Global()),
            TypeError,
            "q has dtype float8_e4m3fn; it must be",
        ),
        (
            lambda: attention(FLAT, FLAT, FLAT, pattern=Global(), scale=jnp.ones((N, 1, 1))),
            ValueError,
            "scale has shape .*must be one",
        ),
        (
            lambda: check_terms((1, 6, N, D), "q", Global(), None, None, "1"),
            TypeError,
            "scale='1' is a str; it must be a number, an array",
        ),
        (
            lambda: check_floating("q", [[1.0]]),
            TypeError,
            "q is a list; it must be a floating-point array",
        ),
        (
            lambda: check_rotation((1, 2), 6, N, D, "q"),
            TypeError,
            "rotation is a tuple; it must be a Rotation",
        ),
        (
            lambda: attention_qkv(FLAT, pattern=Global()),
            ValueError,
            r"qkv has shape .*\[B, L, 3, N, D\]",
        ),
        (
            lambda: attention_qkv(MAP, pattern=Global()),
            ValueError,
            "with q, k and v along the third dimension from the end",
        ),
        (lambda: attention_qkv(MAP, pattern=NEAR), ValueError, r"\[B, H, W, 3, N, D\]"),
        (lambda: Window((0, 7)), ValueError, r"size=\(0, 7\) must be one integer or two"),
        (
            lambda: Window((7, 7), (3, 7)),
            ValueError,
            r"shift=\(3, 7\) must be smaller than size=\(7, 7\)",
        ),
        (
            lambda: Neighborhood((7, 7), (1, 0)),
            ValueError,
            r"dilation=\(1, 0\) must be one integer or two",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_errors_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()


HEADS = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
MIXED = [HEADS, HEADS, HEADS.astype("float16")]


def of_tokens(pairs=16, axes=2, pairing="half"):
    return Rotation(jnp.ones((8, axes)), jnp.ones((1, axes, pairs)), pairing)


@pytest.mark.parametrize(
    ("kernel", "arrays", "terms", "reason"),
    [
        ("triton", [HEADS] * 3, {"scale": np.float32(0.5)}, "ok"),
        ("triton", [HEADS[..., :8]] * 3, {}, "head dimension is 8; 16 to 128"),
        ("triton", MIXED, {}, "different dtypes"),
        ("triton", [HEADS] * 3, {"scale": jnp.ones(())}, "scale is an array"),
        ("triton", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 17))}, "up to (16, 16)"),
        ("cudnn", [HEADS] * 3, {}, "needs a GPU"),
        ("cudnn", [HEADS.astype("float32")] * 3, {}, "float16 and bfloat16"),
        ("cudnn", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 3))}, "only Global"),
        ("mosaic", [HEADS] * 3, {"rotation": of_tokens(), "scale": 0.1}, "ok"),
        ("mosaic", [HEADS[:, None]] * 3, {"pattern": Neighborhood((3, 3))}, "only Global"),
        ("mosaic", [HEADS] * 3, {"bias": jnp.ones((2, 8, 8))}, "a bias, which it does not read"),
        ("mosaic", [HEADS.astype("float32")] * 3, {}, "float32; float16 and bfloat16"),
        ("mosaic", [HEADS[..., :48]] * 3, {}, "head dimension is 48; 32, 64, 128"),
        (
            "mosaic",
            [HEADS] * 3,
            {"rotation": of_tokens(pairing="interleaved")},
            "neighbouring channels",
        ),
        ("mosaic", [HEADS] * 3, {"rotation": of_tokens(pairs=12)}, "12 pairs"),
        ("mosaic", [HEADS] * 3, {"rotation": of_tokens(axes=5)}, "5 axes; up to 4"),
        ("mosaic", MIXED, {}, "different dtypes"),
        ("mosaic", [HEADS] * 3, {"scale": jnp.ones(())}, "scale is an array"),
    ],
)
def test_kernels_say_why_they_refuse(kernel, arrays, terms, reason, interpreted):
    assert reason in explain(attention, *arrays, **{"pattern": Global()} | terms)[kernel]
