"""Splitting and packing the projection, against `rotate` on the parts and complex numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Rotation, rotate
from rope_jax_kernels.rotary import tile_sizes, unpack, unpack_and_rotate
from tests.kernels.rotary_cases import (
    AS_USERS,
    CASES,
    Case,
    assert_as_exact_as,
    bits,
    exact_gradients,
)
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("interpreted")

# L is 6, 6, 49, 197, 1, 3, 13 and 6 here.
CASES = [dataclasses.replace(case, layout="BLND") for case in CASES]
FAST = [CASES[i] for i in (0, 6)]


def draw_operands(case, seed=0):
    """qkv [B, L, 3, N, D], coords, freqs."""
    return np.stack(case.data(seed, 3), axis=2), *case.coords_and_freqs()


def call_unpack(case, qkv, coords, freqs, **kwargs):
    return unpack_and_rotate(
        jnp.asarray(qkv), Rotation(jnp.asarray(coords), jnp.asarray(freqs), case.pairing), **kwargs
    )


@pytest.mark.parametrize("case", some_slow(CASES, FAST), ids=str)
def test_unpacking_equals_rotating_the_parts_bit_for_bit(case):
    qkv, coords, freqs = draw_operands(case)
    compiled = functools.partial(jax.jit, compiler_options=AS_USERS)
    unpack = compiled(lambda *args: call_unpack(case, *args, implementation="triton"))
    rotate_parts = compiled(
        lambda q, k, *args: rotate(q, k, Rotation(*args, case.pairing), implementation="triton")
    )
    *unpacked_parts, v = map(bits, unpack(qkv, coords, freqs))
    parts = np.moveaxis(qkv, 2, 0)
    for x, expected in zip(unpacked_parts, rotate_parts(*parts[:2], coords, freqs), strict=True):
        assert np.array_equal(x, bits(expected))
    assert np.array_equal(v, bits(parts[2]))


@pytest.mark.parametrize("case", some_slow(CASES, [CASES[6]]), ids=str)
def test_gradients(case):
    """Gradients of data, coords and freqs, against float64 and plain jnp in the same precision."""
    qkv, coords, freqs = draw_operands(case)
    cotangents = case.data(5, 3)

    def gradients(gs, *args, **kwargs):
        return jax.vjp(lambda *args: call_unpack(case, *args, **kwargs), *args)[1](tuple(gs))

    result, plain = (
        jax.jit(functools.partial(gradients, implementation=name))(cotangents, qkv, coords, freqs)
        for name in ("triton", "xla")
    )
    dq, dk, *d_angles = exact_gradients(
        case, cotangents[:2], qkv[:, :, 0], qkv[:, :, 1], coords, freqs
    )
    exact = np.stack([dq, dk, cotangents[2].astype(np.float64)], axis=2), *d_angles
    assert_as_exact_as(result, plain, exact)


def test_second_derivatives():
    case = Case(batch=1, tokens=3, heads=2, head_dim=8, pairs=3)
    qkv, coords, freqs = draw_operands(case)

    def penalty(kind):
        def loss(x):
            q, k, v = call_unpack(case, x, coords, freqs, implementation=kind)
            return jnp.sum(jnp.sin(q) * k * v)

        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)))(qkv)

    np.testing.assert_allclose(penalty("triton"), penalty("xla"), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_vmap():
    case = Case(batch=1, tokens=5, heads=2, head_dim=8, pairs=3)
    (qkv, coords, freqs), (other, *_) = (draw_operands(case, seed) for seed in range(2))
    args, axes = (np.stack([qkv, other]), coords, np.stack([freqs, 2 * freqs])), (0, None, 0)
    result, plain = (
        jax.jit(jax.vmap(functools.partial(call_unpack, case, implementation=kind), axes))(*args)
        for kind in ("triton", "xla")
    )
    for x, expected in zip(result, plain, strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.slow
def test_programs_of_many_batch_items(monkeypatch):
    # Simulates a large problem: the second program has fewer items.
    monkeypatch.setattr(tile_sizes, "PROGRAMS", 2)
    case = Case(batch=11, heads=1)
    assert unpack.plan_tile(11, 6, 5, 16, 4, "half").batch == 8
    test_gradients(case)


def test_long_rows_move_in_sequence(monkeypatch):
    case = Case(batch=1, tokens=40, heads=1, head_dim=64, pairs=3)
    assert unpack.plan_tile(1, 40, 3, 64, 4, "half").rows == 32
    monkeypatch.setattr(unpack, "BYTES_IN_FLIGHT", 16)
    assert unpack.plan_tile(1, 40, 3, 64, 4, "half").rows == 8
    test_unpacking_equals_rotating_the_parts_bit_for_bit(case)


def test_nan_stays_where_it_is():
    case = Case(batch=3, tokens=5)
    qkv, coords, freqs = draw_operands(case)
    f = jax.jit(lambda *args: jnp.stack(call_unpack(case, *args, implementation="triton"), axis=2))
    poison = np.zeros(qkv.shape, bool)
    poison[-1], poison[:, -1, :, -1], poison[..., 2 * case.pairs :] = True, True, True
    out = f(np.where(poison, np.nan, qkv).astype(qkv.dtype), coords, freqs)
    assert np.array_equal(np.isnan(out), poison)
    assert np.array_equal(np.where(poison, 0, out), np.where(poison, 0, f(qkv, coords, freqs)))


def test_without_a_rotation_it_only_splits():
    qkv = jnp.asarray(draw_operands(Case())[0])
    for i, x in enumerate(unpack_and_rotate(qkv, None)):
        assert np.array_equal(x, qkv[:, :, i])


QKV = jnp.ones((2, 6, 3, 3, 16))
ROTATION = Rotation(jnp.ones((6, 2)), jnp.ones((3, 2, 5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unpack_and_rotate(QKV, ROTATION, implementation="cudnn"), "'cudnn' is not"),
        (
            lambda: unpack_and_rotate(QKV.astype(float), ROTATION, implementation="triton"),
            "float64; float16,",
        ),
        (
            lambda: unpack_and_rotate(QKV, Rotation(ROTATION.coords, jnp.ones((3, 2, 9)))),
            "describes 9 pairs",
        ),
    ],
)
@pytest.mark.usefixtures("x64", "unchecked_annotations")
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("learned", [True, False])
def test_padding_tokens_are_zeros_without_a_gradient(learned):
    """They come from the same launch, and any values in the gradient of padding are ignored."""
    case = Case(batch=2, tokens=5, heads=3, head_dim=24, pairs=10)
    qkv, coords, freqs = map(jnp.asarray, draw_operands(case))
    cotangents = jnp.asarray(case.data(5, 3))
    spoiled = jnp.pad(cotangents, ((0, 0), (0, 0), (0, 3), (0, 0), (0, 0)), constant_values=jnp.nan)
    differentiated = (qkv, freqs) if learned else (qkv,)

    def values_and_gradients(gs, **options):
        f = lambda qkv, freqs=freqs: call_unpack(case, qkv, coords, freqs, **options)
        out, pull_back = jax.vjp(f, *differentiated)
        return out, pull_back(tuple(gs))

    run = jax.jit(values_and_gradients, static_argnames=("implementation", "padding"))
    plain, expected = run(cotangents, implementation="xla", padding=0)
    for implementation in ("triton", "xla"):
        out, gradients = run(spoiled, implementation=implementation, padding=3)
        for x, y in zip(out, plain, strict=True):
            np.testing.assert_allclose(x[:, : case.tokens], y, rtol=1e-5, atol=5e-6)
            assert not np.any(x[:, case.tokens :])
        for x, y in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
