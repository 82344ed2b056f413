"""Arrays that all examples of a batch share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def add(tokens: Float[Array, "B L C"], table: Float[Array, "L C"]) -> Float[Array, "B L C"]:
    """Adds a table to the tokens of each example.

    In mixed precision the gradient of the table is the product of ones with that of the tokens,
    summed in the table's dtype. For a plain sum, XLA lays the tokens of the whole model out with
    the batch innermost on a GPU, and transposes them in every block. With equal dtypes it is the
    plain sum, which `jax.jvp` supports, too.
    """
    repeated = _repeat if table.dtype != tokens.dtype else _broadcast
    return tokens + repeated(tokens.shape[0], tokens.dtype, table)


def insert(
    rows: Float[Array, "R C"], tokens: Float[Array, "B L C"], place: int
) -> Float[Array, "B R+L C"]:
    """Inserts tokens that all examples share; as a table that is added, see `add`."""
    if not len(rows):
        return tokens
    batch, length, channels = tokens.shape
    room = jnp.zeros((batch, len(rows), channels), tokens.dtype)
    tokens = jnp.concatenate([tokens[:, :place], room, tokens[:, place:]], axis=1)
    return add(tokens, jnp.pad(rows, ((place, length - place), (0, 0))))


# In an exported program the batch may be a symbol.
def _broadcast(batch: Any, dtype: np.dtype, table: Array) -> Array:
    return jnp.broadcast_to(table.astype(dtype), (batch, *table.shape))


_repeat = functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))(_broadcast)


def _forward(batch: Any, dtype: np.dtype, table: Array) -> tuple[Array, Array]:
    return _broadcast(batch, dtype, table), table


def _backward(batch: Any, dtype: np.dtype, table: Array, d_repeated: Array) -> tuple[Array]:
    ones = jnp.ones(batch, dtype)
    return (jnp.tensordot(ones, d_repeated, 1, preferred_element_type=table.dtype),)


_repeat.defvjp(_forward, _backward)
