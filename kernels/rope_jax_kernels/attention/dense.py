"""Exact softmax attention between a block of queries and a block of keys: the step that all patterns share."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rope_jax_kernels.rotary.reference import turn_pairs
from rope_jax_kernels.rotation import Rotation


def attend(
    q: Float[Array, "*block Q D"],
    k: Float[Array, "*block S D"],
    v: Float[Array, "*block S D"],
    *,
    scale: float | Array,
    bias: Float[Array, "... Q S"] | None = None,
    allowed: Array | None = None,
) -> Float[Array, "*block Q D"]:
    """Softmax attention of Q queries over S keys: softmax(scale q k^T + bias) v, over pairs that `allowed` permits.

    Logits and softmax are float32, or wider where q and k are; the products take their inputs as they are and accumulate in that
    precision. `bias` and `allowed` broadcast against the logits [*block, Q, S]; every query needs a key that it is allowed to see.
    """
    precise = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), jnp.float32)
    logits = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=precise) * jnp.asarray(scale, precise)
    if bias is not None:
        logits += bias.astype(precise)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("...qk,...kd->...qd", weights, v, preferred_element_type=precise).astype(q.dtype)


def turn_tokens(x: Float[Array, "*batch L N D"], rotation: Rotation | None) -> Float[Array, "*batch L N D"]:
    """Rotates the heads of each token by the token's angles."""
    if rotation is None:
        return x
    return turn_pairs(x, rotation.angles().swapaxes(0, 1), rotation.pairing)


def spread_table(table: Float[Array, "N _ _"], rows: np.ndarray, columns: np.ndarray) -> Array:
    """Looks up table[n, rows[i], columns[j]] for all i and j; returns [N, *rows.shape, *columns.shape].

    One axis at a time, because the gradient then adds up whole rows. Looked up at once, it would be a scatter of single numbers.
    """
    spread = jnp.take(jnp.take(table, columns.ravel(), axis=2), rows.ravel(), axis=1)
    return spread.reshape(-1, *rows.shape, *columns.shape)
