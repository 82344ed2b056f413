"""Tables that all examples of a batch share, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.batch import add, insert

BATCH, LENGTH, CHANNELS = 300, 5, 4


def draw(*shape, dtype=jnp.bfloat16):
    return jax.device_put(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def gradient(function, table, d_out):
    pull_back = jax.jit(lambda table, d_out: jax.vjp(function, table)[1](d_out)[0])
    return np.asarray(pull_back(table, d_out)).astype(np.float64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_table_is_added_to_each_example(dtype):
    tokens, table = (
        draw(3, LENGTH, CHANNELS, dtype=dtype),
        draw(LENGTH, CHANNELS, dtype=jnp.float32),
    )
    np.testing.assert_array_equal(add(tokens, table), tokens + np.asarray(table).astype(dtype))


def test_gradients_of_tables_are_summed_in_their_own_dtype():
    tokens = jnp.zeros((BATCH, LENGTH, CHANNELS), jnp.bfloat16)
    d_out, table = draw(*tokens.shape), draw(LENGTH, CHANNELS, dtype=jnp.float32)
    want = np.asarray(d_out, np.float64).sum(axis=0)
    np.testing.assert_allclose(gradient(lambda x: add(tokens, x), table, d_out), want, atol=1e-4)
    rounded = gradient(lambda x: tokens + x.astype(tokens.dtype), table, d_out)
    assert abs(rounded - want).max() > 1e-2
    d_tokens = gradient(lambda x: add(x, table), tokens, d_out)
    np.testing.assert_array_equal(d_tokens, d_out)


@pytest.mark.parametrize("place", [0, 2, LENGTH])
def test_rows_are_inserted_into_each_example(place):
    tokens, rows = draw(BATCH, LENGTH, CHANNELS), draw(2, CHANNELS, dtype=jnp.float32)
    out = jax.jit(insert, static_argnums=2)(rows, tokens, place)
    want = np.insert(np.asarray(tokens), [place], np.asarray(rows).astype(tokens.dtype), axis=1)
    np.testing.assert_array_equal(out, want)
    d_out = draw(*out.shape)
    want = np.asarray(d_out, np.float64)[:, place : place + 2].sum(axis=0)
    got = gradient(lambda rows: insert(rows, tokens, place), rows, d_out)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_no_rows_leave_the_tokens_alone():
    tokens = draw(2, LENGTH, CHANNELS)
    assert insert(jnp.zeros((0, CHANNELS)), tokens, 0) is tokens
