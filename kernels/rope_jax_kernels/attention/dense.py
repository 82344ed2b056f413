"""Softmax attention between a block of queries and a block of keys, shared by all patterns."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.rotary.reference import turn_pairs
from rope_jax_kernels.rotation import Rotation


def attend(
    q: Float[Array, "*block Q D"],
    k: Float[Array, "*block S D"],
    v: Float[Array, "*block S D"],
    *,
    scale: float | Float[Array, ""],
    bias: Float[Array, "... Q S"] | None = None,
    allowed: Bool[Array, "... Q S"] | None = None,
) -> Float[Array, "*block Q D"]:
    """Computes softmax(scale q k^T + bias) v for Q queries and S keys, over the allowed pairs.

    Logits and softmax are float32, or wider if q and k are; the products take their inputs uncast
    and accumulate in that precision. `bias` and `allowed` broadcast against the logits
    [*block, Q, S]; every query needs at least one allowed key.
    """
    precise = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), jnp.float32)
    logits = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=precise)
    logits *= jnp.asarray(scale, precise)
    if bias is not None:
        logits += lax.broadcast_to_rank(bias.astype(precise), logits.ndim)
    if allowed is not None:
        logits = jnp.where(lax.broadcast_to_rank(allowed, logits.ndim), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("...qk,...kd->...qd", weights, v, preferred_element_type=precise)
    return out.astype(q.dtype)


def attend_in_blocks(
    q: Float[Array, "B N L D"],
    k: Float[Array, "B N L D"],
    v: Float[Array, "B N L D"],
    *,
    scale: float | Float[Array, ""],
    bias: Float[Array, "N L L"] | None,
    size: int,
) -> Float[Array, "B N L D"]:
    """`attend` for `size` queries at a time, recomputed in the backward pass.

    So memory grows with L, and not with its square (but for a bias, which has L^2 numbers a head).
    """
    length = q.shape[2]

    def split(x: Array) -> Float[Array, "blocks ..."]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -length % size), (0, 0)])
        x = x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    @jax.checkpoint
    def attend_block(block: tuple[Array, Array | None]) -> Float[Array, "B N size D"]:
        return attend(block[0], k, v, scale=scale, bias=block[1])

    out = lax.map(attend_block, (split(q), None if bias is None else split(bias)))
    out = jnp.moveaxis(out, 0, -3).reshape(*q.shape[:2], -(-length // size) * size, q.shape[-1])
    return out[:, :, :length]


def turn_tokens(
    x: Float[Array, "*batch L N D"], rotation: Rotation | None
) -> Float[Array, "*batch L N D"]:
    """Rotates the heads of each token by the token's angles."""
    if rotation is None:
        return x
    return turn_pairs(x, rotation.angles().swapaxes(0, 1), rotation.pairing)


def spread_table(
    table: Float[Array, "N _ _"], rows: Int[np.ndarray, "*I"], columns: Int[np.ndarray, "*J"]
) -> Float[Array, "N ..."]:
    """Looks up table[n, rows[i], columns[j]] for all i and j.

    One axis at a time, so that the gradient adds whole rows; with a single lookup, it would be a
    scatter of single elements.

    Returns:
        [N, *I, *J].
    """
    spread = jnp.take(jnp.take(table, columns.ravel(), axis=2), rows.ravel(), axis=1)
    return spread.reshape(-1, *rows.shape, *columns.shape)
