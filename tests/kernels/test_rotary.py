"""The rotary operations against complex numbers in float64, and against what a rotation must do."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import Rotation, rotate, rotate_by_angles, rotate_qkv

B, L, N, D, A, R = 2, 6, 3, 16, 2, 5
PAIRINGS = ["half", "interleaved"]


def draw(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def pair_channels(pairs, pairing):
    """Channels of the first and of the second members of all pairs."""
    index = np.arange(pairs)
    return (index, pairs + index) if pairing == "half" else (2 * index, 2 * index + 1)


def turn(x, theta, pairing):
    """Multiplies pairs, as complex numbers, by exp(i theta); x [B, L, N, D], theta [N or 1, L, R], in float64."""
    first, second = pair_channels(theta.shape[-1], pairing)
    out = np.array(x, np.float64)
    z = (out[..., first] + 1j * out[..., second]) * np.exp(1j * np.asarray(theta, np.float64)).swapaxes(0, 1)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def angles(coords, freqs):
    return np.einsum("la,nar->nlr", coords.astype(np.float64), freqs.astype(np.float64))


def laid_out(x, layout):
    return x if layout == "BLND" else x.swapaxes(1, 2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["BLND", "BNLD"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_a_complex_product(pairing, layout, shared):
    q, k, coords, freqs = draw(0, (B, L, N, D), (B, L, N, D), (L, A), (1 if shared else N, A, R))
    theta = angles(coords, freqs)
    rotation = Rotation(jnp.asarray(coords), jnp.asarray(freqs), pairing)
    np.testing.assert_allclose(rotation.angles(), theta, rtol=1e-6, atol=1e-6)
    rotated = rotate(*(jnp.asarray(laid_out(x, layout)) for x in (q, k)), rotation, layout=layout)
    direct = rotate_by_angles(jnp.asarray(laid_out(q, layout)), jnp.asarray(theta, jnp.float32), pairing=pairing, layout=layout)
    for x, source in ((rotated[0], q), (rotated[1], k), (direct, q)):
        np.testing.assert_allclose(laid_out(x, layout), turn(source, theta, pairing), rtol=1e-5, atol=3e-6)
        assert np.array_equal(laid_out(x, layout)[..., 2 * R :], source[..., 2 * R :])


def test_the_two_pairings_are_one_permutation_apart():
    x, theta = draw(1, (B, L, N, D), (N, L, D // 2))
    order = np.concatenate([np.arange(0, D, 2), np.arange(1, D, 2)])
    half = rotate_by_angles(jnp.asarray(x[..., order]), jnp.asarray(theta), pairing="half")
    interleaved = rotate_by_angles(jnp.asarray(x), jnp.asarray(theta), pairing="interleaved")
    assert np.array_equal(half, interleaved[..., order])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_packed_is_separate_bit_for_bit(pairing, dtype):
    qkv, coords, freqs = draw(2, (B, L, 3, N, D), (L, A), (N, A, R))
    qkv, rotation = jnp.asarray(qkv, dtype), Rotation(jnp.asarray(coords), jnp.asarray(freqs), pairing)
    for transform in (lambda f: f, jax.jit):
        packed = transform(rotate_qkv)(qkv, rotation)
        q, k = transform(rotate)(qkv[:, :, 0], qkv[:, :, 1], rotation)
        assert packed.dtype == dtype
        assert np.array_equal(packed, jnp.stack([q, k, qkv[:, :, 2]], axis=2))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_tokens_at_the_origin_are_left_alone_bit_for_bit(pairing):
    q, k, coords, freqs = draw(3, (B, L, N, D), (B, L, N, D), (L, A), (N, A, D // 2))
    coords[:2] = 0
    rotated = jax.jit(rotate)(jnp.asarray(q), jnp.asarray(k), Rotation(jnp.asarray(coords), jnp.asarray(freqs), pairing))
    for x, source in zip(rotated, (q, k), strict=True):
        assert np.array_equal(x[:, :2], source[:, :2])
        assert not np.array_equal(x[:, 2:], source[:, 2:])


def test_heads_of_k_may_differ_when_they_share_frequencies():
    q, k, coords, freqs = draw(4, (B, L, N, D), (B, L, 1, D), (L, A), (1, A, R))
    rotation = Rotation(jnp.asarray(coords), jnp.asarray(freqs))
    np.testing.assert_allclose(rotate(jnp.asarray(q), jnp.asarray(k), rotation)[1], turn(k, angles(coords, freqs), "half"), atol=3e-6)


@functools.partial(jax.jit, static_argnames="pairing")
def scores(q, k, coords, freqs, pairing):
    q, k = rotate(q, k, Rotation(coords, freqs, pairing))
    return jnp.einsum("blnd,bmnd->bnlm", q, k, precision="highest")


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(seed=st.integers(0, 999), shift=st.tuples(*[st.floats(-8, 8, width=32)] * A), pairing=st.sampled_from(PAIRINGS))
def test_scores_depend_on_differences_of_coordinates_only(seed, shift, pairing):
    q, k, coords, freqs = draw(seed, (B, L, N, D), (B, L, N, D), (L, A), (N, A, R))
    moved = coords + np.asarray(shift, np.float32)
    np.testing.assert_allclose(scores(q, k, moved, freqs, pairing), scores(q, k, coords, freqs, pairing), atol=2e-4)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(seed=st.integers(0, 999), scale=st.floats(0, 100, width=32), pairing=st.sampled_from(PAIRINGS))
def test_rotation_keeps_norms_and_is_undone_by_the_opposite_angle(seed, scale, pairing):
    x, theta = draw(seed, (B, L, N, D), (N, L, R))
    theta *= np.float32(scale)
    turned = rotate_by_angles(jnp.asarray(x), jnp.asarray(theta), pairing=pairing)
    first, second = pair_channels(R, pairing)
    norms = lambda x: np.hypot(np.asarray(x)[..., first], np.asarray(x)[..., second])
    np.testing.assert_allclose(norms(turned), norms(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rotate_by_angles(turned, jnp.asarray(-theta), pairing=pairing), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_16_bit_results_are_float64_results_rounded(pairing, dtype):
    shape = (4, 64, 6, 64)
    x, theta = draw(5, shape, (6, 64, 32))
    x, theta = x.astype(dtype), 10 * np.pi * np.tanh(theta)
    exact = turn(x, theta, pairing)
    rounded = exact.astype(dtype).astype(np.float64)
    result = np.asarray(rotate_by_angles(jnp.asarray(x), jnp.asarray(theta, jnp.float32), pairing=pairing))
    assert result.dtype == dtype
    first, second = pair_channels(32, pairing)
    norm = np.empty(shape)
    norm[..., first] = norm[..., second] = np.hypot(exact[..., first], exact[..., second])
    unit = 2.0 ** np.floor(np.log2(norm)) * float(ml_dtypes.finfo(dtype).eps)
    units = np.abs(result.astype(np.float64) - rounded) / unit
    assert units.max() <= 2
    assert np.mean(units <= 1) >= 0.999


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients_are_the_closed_form(pairing, shared):
    q, k, gq, gk, coords, freqs = draw(6, *[(B, L, N, D)] * 4, (L, A), (1 if shared else N, A, R), dtype=np.float64)
    with jax.enable_x64(True):
        out, vjp = jax.vjp(lambda q, k, c, f: rotate(q, k, Rotation(c, f, pairing)), *map(jnp.asarray, (q, k, coords, freqs)))
        dq, dk, dcoords, dfreqs = vjp((jnp.asarray(gq), jnp.asarray(gk)))
    theta = angles(coords, freqs)
    first, second = pair_channels(R, pairing)
    # y = (a', b'): dL/dtheta = g_b' a' - g_a' b', and dL/dx is the opposite rotation of dL/dy.
    dtheta = sum(
        g[..., second] * np.asarray(y)[..., first] - g[..., first] * np.asarray(y)[..., second] for g, y in ((gq, out[0]), (gk, out[1]))
    )
    dtheta = dtheta.sum(0).swapaxes(0, 1)
    by_head = np.einsum("la,nlr->nar", coords, dtheta)
    np.testing.assert_allclose(dfreqs, by_head.sum(0, keepdims=True) if shared else by_head, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(dcoords, np.einsum("nlr,nar->la", dtheta, np.broadcast_to(freqs, (N, A, R))), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(dq, turn(gq, -theta, pairing), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(dk, turn(gk, -theta, pairing), rtol=1e-10, atol=1e-10)


def test_gradient_of_frequencies_agrees_with_finite_differences():
    x, g, coords, freqs, step = draw(7, (B, L, N, D), (B, L, N, D), (L, A), (N, A, R), (N, A, R), dtype=np.float64)
    with jax.enable_x64(True):
        loss = jax.jit(lambda f: jnp.sum(rotate(jnp.asarray(x), jnp.asarray(x), Rotation(jnp.asarray(coords), f))[0] * g))
        slope = jnp.sum(jax.grad(loss)(jnp.asarray(freqs)) * step)
        difference = (loss(jnp.asarray(freqs + 1e-5 * step)) - loss(jnp.asarray(freqs - 1e-5 * step))) / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=1e-7)


def test_float64_is_float64_throughout():
    q, coords, freqs = draw(8, (B, L, N, D), (L, A), (N, A, R), dtype=np.float64)
    with jax.enable_x64(True):
        rotated, _ = rotate(jnp.asarray(q), jnp.asarray(q), Rotation(jnp.asarray(coords), jnp.asarray(freqs)))
    assert rotated.dtype == np.float64
    np.testing.assert_allclose(rotated, turn(q, angles(coords, freqs), "half"), rtol=1e-13, atol=1e-13)


def test_rotate_composes_with_jit_vmap_and_grad():
    q, k, coords, freqs = draw(9, (4, B, L, N, D), (4, B, L, N, D), (L, A), (4, N, A, R))
    one = lambda q, k, f: rotate(q, k, Rotation(jnp.asarray(coords), f))
    mapped = jax.jit(jax.vmap(one))(q, k, freqs)
    for i in range(4):
        for x, source in zip(mapped, (q, k), strict=True):
            np.testing.assert_allclose(x[i], turn(source[i], angles(coords, freqs[i]), "half"), atol=5e-6)
    loss = lambda f: sum(jnp.sum(x**3) for x in one(jnp.asarray(q[0]), jnp.asarray(k[0]), f))
    assert jax.jit(jax.grad(loss))(jnp.asarray(freqs[0])).shape == (N, A, R)


def test_rotation_is_a_pytree_of_two_arrays():
    rotation = Rotation(jnp.ones((L, A)), jnp.ones((N, A, R)), "interleaved")
    doubled = jax.tree.map(lambda x: 2 * x, rotation)
    assert (len(jax.tree.leaves(rotation)), doubled.pairing) == (2, "interleaved")
    assert np.array_equal(doubled.angles(), 4 * rotation.angles())


ONES = jnp.ones((B, L, N, D))
FITTING = Rotation(jnp.ones((L, A)), jnp.ones((N, A, R)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotate(ONES, ONES, FITTING, implementation="cuda"), ValueError, "implementation='cuda' is not one that rotate has.*'xla'"),
        (lambda: rotate(ONES.astype(int), ONES, FITTING), TypeError, "q has dtype int32; it must be a floating-point array"),
        (lambda: rotate(ONES, ONES[:, 1:], FITTING), ValueError, "places 6 tokens, but k has 5"),
        (lambda: rotate(ONES, ONES[:, :, :1], FITTING), ValueError, "is for 3 heads, but k has 1"),
        (lambda: rotate(ONES[..., :8], ONES, FITTING), ValueError, "5 pairs = 10 channels, but a head has only 8; at most 4 pairs fit"),
        (lambda: rotate(ONES, ONES, FITTING, layout="NLBD"), ValueError, "layout='NLBD' is unknown; use one of"),
        (lambda: rotate(ONES[0], ONES, FITTING), ValueError, r"q has shape \(6, 3, 16\).*4 dimensions"),
        (lambda: rotate(ONES, ONES, Rotation(FITTING.coords[:, :1], FITTING.freqs)), ValueError, "with the same A"),
        (lambda: rotate(ONES, ONES, Rotation(FITTING.coords.astype(int), FITTING.freqs)), TypeError, "rotation.coords has dtype int32"),
        (lambda: rotate(ONES, ONES, Rotation(FITTING.coords, FITTING.freqs.astype(int))), TypeError, "rotation.freqs has dtype int32"),
        (lambda: rotate_qkv(ONES[:, :, None], FITTING), ValueError, r"qkv has shape .* must be \[B, L, 3, N, D\]"),
        (lambda: rotate_qkv(jnp.ones((B, L + 1, 3, N, D)), FITTING), ValueError, "places 6 tokens, but qkv has 7"),
        (lambda: rotate_by_angles(ONES, jnp.ones((2, L, R))), ValueError, r"theta has shape .* must be \[3 or 1, 6, R\]"),
        (lambda: rotate_by_angles(ONES, jnp.ones((N, L, 9))), ValueError, "theta describes 9 pairs = 18 channels"),
        (lambda: rotate_by_angles(ONES.astype(bool), jnp.ones((N, L, R))), TypeError, "x has dtype bool"),
    ],
)
def test_errors_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()
