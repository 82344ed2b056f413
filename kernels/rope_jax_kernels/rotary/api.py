"""The public rotary functions: check the arguments, then dispatch."""

from jax import export
from jaxtyping import Array, Float

from rope_jax_kernels import checks, device
from rope_jax_kernels.calls import call
from rope_jax_kernels.rotary import reference
from rope_jax_kernels.rotary.tile_sizes import halves_traffic
from rope_jax_kernels.rotation import Pairing, Rotation

# Seconds of memory traffic from which an in-place kernel pays. A launch takes a few microseconds
# whatever it moves, and XLA often saves one by fusing the rotation with its neighbours, so a
# shorter kernel gains nothing by moving half the bytes.
LEAST_SECONDS = 10e-6


def in_place_pays(pairs: int, *arrays: Float[Array, "B _ _ D"]) -> bool:
    """True if one launch that turns `pairs` pairs of these arrays in place is worth it."""
    if any(export.is_symbolic_dim(x.size) for x in arrays):
        return False  # kernels need sizes that are numbers
    moved = sum(4 * pairs * x.size // max(1, x.shape[-1]) * x.dtype.itemsize for x in arrays)
    return moved >= LEAST_SECONDS * device.bandwidth() and all(
        halves_traffic(pairs, x) for x in arrays
    )


def rotate(
    q: Float[Array, "B _ _ D"],
    k: Float[Array, "B _ _ D"],
    rotation: Rotation,
    *,
    layout: str = "BLND",
    implementation: str | None = None,
) -> tuple[Float[Array, "B _ _ D"], Float[Array, "B _ _ D"]]:
    """Rotates queries and keys by their tokens' positions (RoFormer, arXiv 2104.09864, eq. 34).

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Rotation, rotate
        >>> q = k = jnp.ones((1, 4, 2, 8))
        >>> rotation = Rotation(jnp.arange(4.0)[:, None], jnp.ones((2, 1, 3)))  # 6 of 8 channels
        >>> q, k = rotate(q, k, rotation)
        >>> q.shape
        (1, 4, 2, 8)
        >>> [f"{x:.2f}" for x in q[0, :2, 0, 0]]  # cos(angle) - sin(angle) at tokens 0 and 1
        ['1.00', '-0.30']

    Args:
        q: [B, L, N, D] or, with layout="BNLD", [B, N, L, D]; float16, bfloat16, float32 or float64.
        k: like q; it may have another number of heads if all heads share `rotation.freqs`.
        rotation: the angles, as coordinates times frequencies. The first 2R channels are rotated,
            the others are returned unchanged.
        layout: order of the dimensions of q and k, "BLND" or "BNLD".
        implementation: None for the best that applies, or a name; see `explain`.

    Returns:
        The rotated (q, k), each in its own dtype. Angles and products are float32 (float64 for
        float64 data; angles only if those of `rotation` are, too).

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    for name, x in (("q", q), ("k", k)):
        checks.check_rotation(rotation, *checks.check_layout(name, x, layout), name)
    return call(
        "rotate",
        {"q": q, "k": k, "rotation": rotation, "layout": layout},
        implementation=implementation,
        kernels_pay=in_place_pays(rotation.freqs.shape[2], q, k),
    )


def rotate_qkv(
    qkv: Float[Array, "B L three N D"], rotation: Rotation, *, implementation: str | None = None
) -> Float[Array, "B L three N D"]:
    """Rotates q and k inside a packed projection; v is unchanged.

    Equal to `rotate` on the parts: bit for bit by the kernels, and by "xla" outside of `jax.jit`.
    Inside, XLA may fuse a product and a sum into one operation, which rounds once, in one of the
    two programs only: results are then equal up to the rounding of products.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Rotation, rotate_qkv
        >>> rotation = Rotation(jnp.arange(4.0)[:, None], jnp.ones((2, 1, 3)))
        >>> rotate_qkv(jnp.ones((1, 4, 3, 2, 8)), rotation).shape
        (1, 4, 3, 2, 8)

    Args:
        qkv: [B, L, 3, N, D], as one dense layer of 3 N D outputs gives it.
        rotation: as in `rotate`.
        implementation: None for the best that applies, or a name; see `explain`.

    Returns:
        An array of qkv's shape and dtype.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    checks.check_rotation(rotation, *checks.check_packed(qkv), "qkv")
    arguments = {"qkv": qkv, "rotation": rotation}
    return call("rotate_qkv", arguments, implementation=implementation)


def rotate_by_angles(
    x: Float[Array, "B _ _ D"],
    theta: Float[Array, "_ _ R"],
    *,
    pairing: Pairing = "half",
    layout: str = "BLND",
    implementation: str | None = None,
) -> Float[Array, "B _ _ D"]:
    """Rotates one array by explicit angles.

    For schemes that are not linear in the coordinates, and for comparisons with other software.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import rotate_by_angles
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> theta = jnp.full((1, 4, 4), jnp.pi)  # half a turn of all channels
        >>> rotate_by_angles(x, theta).round(3)[0, 0, 0, 0].item()
        -1.0

    Args:
        x: [B, L, N, D] or, with layout="BNLD", [B, N, L, D].
        theta: [N, L, R] angles in radians, or [1, L, R] for all heads. The kernels' sines and
            cosines are within 2e-7 up to 10^4 radians, 1e-6 up to 10^5, and wrong far beyond.
        pairing: "half" turns channels (r, R + r) together, "interleaved" (2r, 2r + 1).
        layout: order of the dimensions of x, "BLND" or "BNLD".
        implementation: None for the best that applies, or a name; see `explain`.

    Returns:
        An array of x's shape and dtype.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    checks.check_floating("theta", theta)
    tokens, heads, head_dim = checks.check_layout("x", x, layout)
    if theta.ndim != 3 or theta.shape[0] not in (1, heads) or theta.shape[1] != tokens:
        raise ValueError(
            f"theta has shape {theta.shape}; for x {x.shape} in layout {layout!r} it must be "
            f"[{heads} or 1, {tokens}, R]"
        )
    checks.check_pairs(theta.shape[2], head_dim, pairing, "theta")
    return call(
        "rotate_by_angles",
        {"x": x, "theta": theta, "pairing": pairing, "layout": layout},
        implementation=implementation,
        kernels_pay=in_place_pays(theta.shape[2], x),
    )


def unpack_and_rotate(
    qkv: Float[Array, "B L three N D"],
    rotation: Rotation | None,
    *,
    implementation: str | None = None,
    padding: int = 0,
) -> tuple[Float[Array, "B M N D"], Float[Array, "B M N D"], Float[Array, "B M N D"]]:
    """Splits a packed projection into q, k and v, and rotates q and k.

    Equal to `rotate` on the parts, as `rotate_qkv` is, followed by tokens of zeros. For attention
    that needs q, k and v as separate arrays, such as cuDNN's. XLA computes the gradient of the
    data, in the pass that sums that of the projection's bias, unless coords or freqs are
    differentiated.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Rotation
        >>> from rope_jax_kernels.rotary import unpack_and_rotate
        >>> rotation = Rotation(jnp.arange(4.0)[:, None], jnp.ones((2, 1, 3)))
        >>> q, k, v = unpack_and_rotate(jnp.ones((1, 4, 3, 2, 8)), rotation)
        >>> q.shape
        (1, 4, 2, 8)

    Args:
        qkv: [B, L, 3, N, D], as one dense layer of 3 N D outputs gives it.
        rotation: as in `rotate`; None only splits, which XLA does in one pass.
        implementation: "xla", "triton", or None for the kernel on a GPU if XLA need not partition
            the call over devices.
        padding: tokens of zeros to append in the same pass; M = L + padding. They have no gradient.

    Returns:
        (q, k, v) in qkv's dtype.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    tokens, heads, head_dim = checks.check_packed(qkv)
    if rotation is None:
        return tuple(reference.pad_tokens(qkv[:, :, part], padding) for part in range(3))
    checks.check_rotation(rotation, tokens, heads, head_dim, "qkv")
    arguments = {"qkv": qkv, "rotation": rotation, "padding": padding}
    return call("unpack_and_rotate", arguments, implementation=implementation)
