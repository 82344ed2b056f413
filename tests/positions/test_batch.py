"""Tables that all examples of a batch share, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.positions.batch import add, insert

BATCH, LENGTH, CHANNELS = 300, 5, 4


def draw(*shape, dtype=jnp.bfloat16):
    return jax.device_put(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def gradient(function, table, d_out):
    pull_back = jax.jit(lambda table, d_out: jax.vjp(function, table)[1](d_out)[0])
    return np.asarray(pull_back(table, d_out)).astype(np.float64)


def test_gradients_of_tables_are_summed_in_their_own_dtype():
    tokens = jnp.zeros((BATCH, LENGTH, CHANNELS), jnp.bfloat16)
    d_out, table = draw(*tokens.shape), draw(LENGTH, CHANNELS, dtype=jnp.float32)
    want = np.asarray(d_out, np.float64).sum(axis=0)
    np.testing.assert_allclose(gradient(lambda x: add(tokens, x), table, d_out), want, atol=1e-4)
    rounded = gradient(lambda x: tokens + x.astype(tokens.dtype), table, d_out)
    assert abs(rounded - want).max() > 1e-2
    d_tokens = gradient(lambda x: add(x, table), tokens, d_out)
    np.testing.assert_array_equal(d_tokens, d_out)
    tokens, rows = jnp.zeros((BATCH, LENGTH - 2, CHANNELS), jnp.bfloat16), table[:2]
    inserted = gradient(lambda rows: insert(rows, tokens, 1), rows, d_out)
    np.testing.assert_allclose(inserted, want[1:3], atol=1e-4)
