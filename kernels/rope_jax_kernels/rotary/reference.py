"""The rotary operations in plain jax.numpy: the "xla" implementation, and the definition that
kernels are tested against.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.rotation import Pairing, Rotation


def turn_pairs(
    x: Float[Array, "... D"], theta: Float[Array, "... R"], pairing: Pairing
) -> Float[Array, "... D"]:
    """Turns the first R pairs of channels of x: (a, b) -> (a cos - b sin, b cos + a sin).

    Angles, sine, cosine and products are float32, or wider where x or theta is; the result is cast
    once, to x's dtype. theta broadcasts against x.
    """
    pairs = theta.shape[-1]
    precise = jnp.promote_types(jnp.promote_types(x.dtype, theta.dtype), jnp.float32)
    cos, sin = jnp.cos(theta.astype(precise)), jnp.sin(theta.astype(precise))
    turned = x[..., : 2 * pairs].astype(precise)
    turn = _turn_apart if device.is_gpu() else _turn_folded
    turned = turn(turned, cos, sin, pairing).astype(x.dtype)
    unturned = x[..., 2 * pairs :]
    # Outside of jit, XLA crashes on an empty operand in a `jax.shard_map`.
    return jnp.concatenate([turned, unturned], axis=-1) if unturned.shape[-1] else turned


def _turn_apart(x: Array, cos: Array, sin: Array, pairing: Pairing) -> Array:
    """Computes the members of pairs apart, then joins them, which a GPU does in one pass."""
    pairs = x.shape[-1] // 2
    if pairing == "half":
        a, b = x[..., :pairs], x[..., pairs:]
    else:
        a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = (jax.lax.broadcast_to_rank(part, a.ndim) for part in (cos, sin))
    a, b = a * cos - b * sin, b * cos + a * sin
    if pairing == "half":
        return jnp.concatenate([a, b], axis=-1)
    return jnp.stack([a, b], axis=-1).reshape(x.shape)


def _turn_folded(x: Array, cos: Array, sin: Array, pairing: Pairing) -> Array:
    """(a, b) cos + (b, a) (-sin, sin): the same products and sums.

    A CPU reverses an axis at the speed of memory, but joins arrays element by element.
    """
    pairs = x.shape[-1] // 2
    axis, shape = (-2, (2, pairs)) if pairing == "half" else (-1, (pairs, 2))
    folded = x.reshape(*x.shape[:-1], *shape)
    cos, sin = (
        jax.lax.broadcast_to_rank(jnp.stack(members, axis), folded.ndim)
        for members in ([cos, cos], [-sin, sin])
    )
    return (folded * cos + jnp.flip(folded, axis) * sin).reshape(x.shape)


def rotate_by_angles(
    x: Float[Array, "B _ _ D"], theta: Float[Array, "_ L R"], *, pairing: Pairing, layout: str
) -> Float[Array, "B _ _ D"]:
    """`rope_jax_kernels.rotate_by_angles`."""
    return turn_pairs(x, theta.swapaxes(0, 1) if layout == "BLND" else theta, pairing)


def rotate(
    q: Float[Array, "B _ _ D"], k: Float[Array, "B _ _ D"], rotation: Rotation, *, layout: str
) -> tuple[Float[Array, "B _ _ D"], Float[Array, "B _ _ D"]]:
    """`rope_jax_kernels.rotate`."""
    theta = rotation.angles()
    turned = [rotate_by_angles(x, theta, pairing=rotation.pairing, layout=layout) for x in (q, k)]
    return turned[0], turned[1]


def rotate_qkv(qkv: Float[Array, "B L 3 N D"], rotation: Rotation) -> Float[Array, "B L 3 N D"]:
    """`rope_jax_kernels.rotate_qkv`."""
    q, k = rotate(qkv[:, :, 0], qkv[:, :, 1], rotation, layout="BLND")
    return jnp.stack([q, k, qkv[:, :, 2]], axis=2)


def unpack_and_rotate(
    qkv: Float[Array, "B L 3 N D"], rotation: Rotation, padding: int = 0
) -> tuple[Float[Array, "B M N D"], Float[Array, "B M N D"], Float[Array, "B M N D"]]:
    """`rope_jax_kernels.rotary.unpack_and_rotate`."""
    q, k = rotate(qkv[:, :, 0], qkv[:, :, 1], rotation, layout="BLND")
    return pad_tokens(q, padding), pad_tokens(k, padding), pad_tokens(qkv[:, :, 2], padding)


def pad_tokens(x: Float[Array, "B L N D"], padding: int) -> Float[Array, "B M N D"]:
    """Appends `padding` tokens of zeros: M = L + padding."""
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x
