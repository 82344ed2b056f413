"""Splitting and packing the projection on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Rotation, rotate
from rope_jax_kernels.rotary import unpack_and_rotate
from tests.kernels.rotary_cases import CASES, MODEL_CASES, bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES + MODEL_CASES, ids=str)
def test_unpacking_equals_rotating_the_parts(case):
    """Bit for bit."""
    q, k, v = map(jnp.asarray, case.data(0, 3))
    rotation = Rotation(*map(jnp.asarray, case.coords_and_freqs()), case.pairing)
    unpack = jax.jit(lambda qkv: unpack_and_rotate(qkv, rotation, implementation="triton"))
    turned = jax.jit(lambda q, k: rotate(q, k, rotation, implementation="triton"))(q, k)
    for x, expected in zip(unpack(jnp.stack([q, k, v], axis=2)), (*turned, v), strict=True):
        assert np.array_equal(bits(x), bits(expected))


@pytest.mark.parametrize("case", CASES + MODEL_CASES[:2], ids=str)
def test_gradients_agree_with_xla(case):
    """Gradients of data, coords and freqs; two runs are equal bit for bit."""
    qkv, coords, freqs = (
        jnp.stack(list(map(jnp.asarray, case.data(1, 3))), axis=2),
        *map(jnp.asarray, case.coords_and_freqs()),
    )
    cotangents = tuple(map(jnp.asarray, case.data(2, 3)))

    def gradients(kind):
        f = lambda *args: unpack_and_rotate(
            args[0], Rotation(*args[1:], case.pairing), implementation=kind
        )
        return jax.jit(lambda *args: jax.vjp(f, *args)[1](cotangents))(qkv, coords, freqs)

    for x, again, expected in zip(
        gradients("triton"), gradients("triton"), gradients("xla"), strict=True
    ):
        assert np.array_equal(bits(x), bits(again))
        x, expected = np.float64(x), np.float64(expected)
        assert np.abs(x - expected).max() <= 2e-2 * np.abs(expected).max()
