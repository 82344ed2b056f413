"""Initial weights: their distributions, and equal draws in all programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.initializers import (
    conv_init,
    fan_in_bias_init,
    he_init,
    linear_init,
    normal_init,
    orthogonal_init,
)

INITIALISERS = {
    "linear": linear_init,
    "normal": normal_init(0.3),
    "he": he_init,
    "orthogonal": orthogonal_init,
    "bias": fan_in_bias_init(9),
    "conv": conv_init,
}


def test_draws_are_a_function_of_the_key():
    want = [0.02235244, -0.0277425, -0.00853143, -0.01607174]
    np.testing.assert_allclose(linear_init(jax.random.key(0), (4,), jnp.float32), want, rtol=2e-6)
    assert bool((linear_init(jax.random.key(1), (4,), jnp.float32) != np.float32(want)).all())


@pytest.mark.parametrize("name", INITIALISERS)
def test_draws_are_equal_if_traced_or_rounded(name):
    def make(dtype):
        return INITIALISERS[name](jax.random.key(1), (4, 6), dtype)

    np.testing.assert_array_equal(jax.jit(lambda: make(jnp.float32))(), make(jnp.float32))
    np.testing.assert_array_equal(make(jnp.bfloat16), make(jnp.float32).astype(jnp.bfloat16))
    assert jax.eval_shape(lambda: make(jnp.float16)) == jax.ShapeDtypeStruct((4, 6), jnp.float16)


def test_orthogonal_rows_have_no_preferred_direction():
    rows = np.stack(
        [orthogonal_init(jax.random.key(seed), (3, 5), jnp.float32) for seed in range(400)]
    )
    np.testing.assert_allclose(
        rows @ rows.swapaxes(1, 2), np.broadcast_to(np.eye(3), (400, 3, 3)), rtol=0, atol=1e-5
    )
    assert np.abs(rows.mean(axis=0)).max() < 5 * (1 / 5 / 400) ** 0.5
