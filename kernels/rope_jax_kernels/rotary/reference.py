"""The rotary operations in plain jax.numpy: what every kernel is compared with, and what runs where there is no kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels.rotation import Pairing, Rotation


def turn_pairs(x: Float[Array, "... D"], theta: Float[Array, "... R"], pairing: Pairing) -> Float[Array, "... D"]:
    """Turns the first R pairs of the last axis of x by theta (broadcast against x): (a, b) -> (a cos - b sin, b cos + a sin).

    Angles, sine, cosine and products are float32, or wider where x or theta is; the result is cast once, to x's dtype.
    """
    pairs = theta.shape[-1]
    precise = jnp.promote_types(jnp.promote_types(x.dtype, theta.dtype), jnp.float32)
    cos, sin = jnp.cos(theta.astype(precise)), jnp.sin(theta.astype(precise))
    turned = x[..., : 2 * pairs].astype(precise)
    if pairing == "half":
        a, b = turned[..., :pairs], turned[..., pairs:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = jnp.concatenate([a, b], axis=-1) if pairing == "half" else jnp.stack([a, b], axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * pairs :]], axis=-1)


def rotate_by_angles(x: Float[Array, "B _ _ D"], theta: Float[Array, "_ L R"], *, pairing: Pairing, layout: str) -> Float[Array, "B _ _ D"]:
    """See `rope_jax_kernels.rotate_by_angles`."""
    return turn_pairs(x, theta.swapaxes(0, 1) if layout == "BLND" else theta, pairing)


def rotate(q: Array, k: Array, rotation: Rotation, *, layout: str) -> tuple[Array, Array]:
    """See `rope_jax_kernels.rotate`."""
    theta = rotation.angles()
    return tuple(rotate_by_angles(x, theta, pairing=rotation.pairing, layout=layout) for x in (q, k))


def rotate_qkv(qkv: Float[Array, "B L 3 N D"], rotation: Rotation) -> Float[Array, "B L 3 N D"]:
    """See `rope_jax_kernels.rotate_qkv`."""
    q, k = rotate(qkv[:, :, 0], qkv[:, :, 1], rotation, layout="BLND")
    return jnp.stack([q, k, qkv[:, :, 2]], axis=2)
