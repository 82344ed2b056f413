"""The public rotary functions: check the arguments, choose a backend, call it."""

from jaxtyping import Array, Float

from rope_jax_kernels.backends import Backend, choose
from rope_jax_kernels.rotary import checks, device, mosaic, reference, tiling, triton
from rope_jax_kernels.rotation import Pairing, Rotation

KERNELS = {"triton": triton.KERNEL, "mosaic": mosaic.KERNEL}
ROTATE = {"xla": Backend(reference.rotate)} | {name: Backend(k.rotate, k.refuses_rotate) for name, k in KERNELS.items()}
ROTATE_QKV = {"xla": Backend(reference.rotate_qkv)} | {name: Backend(k.rotate_qkv, k.refuses_rotate_qkv) for name, k in KERNELS.items()}
ROTATE_BY_ANGLES = {"xla": Backend(reference.rotate_by_angles)} | {
    name: Backend(k.rotate_by_angles, k.refuses_rotate_by_angles) for name, k in KERNELS.items()
}


def default(arrays: tuple[Array, ...], pairs: int) -> str:
    """What `implementation=None` is for arrays that lie apart. The one place where this is decided; reasoned, not measured.

    A kernel in place wins by the channels that it leaves alone, so it is taken on a GPU where it halves the bytes that move
    (`tiling.halves_traffic`) and XLA would not have to gather arrays for it. For the packed projection `None` is always "xla": what
    comes next there usually reads q, k and v apart, and XLA turns them in the pass that takes them apart, at no cost.

    "mosaic" is never picked: it has to be measured against "triton" on a GPU first.

    Kernels have no forward-mode derivative: name "xla" for `jax.jvp` on a GPU.
    """
    pays = all(tiling.halves_traffic(pairs, x.shape[-1], x.dtype.itemsize) for x in arrays)
    return "triton" if pays and device.is_gpu() and not device.may_be_partitioned() else "xla"


def rotate(q: Array, k: Array, rotation: Rotation, *, layout: str = "BLND", implementation: str | None = None) -> tuple[Array, Array]:
    """Rotates queries and keys by their tokens' positions (RoFormer, arXiv 2104.09864, eq. 34, with per-head angles).

    Args:
        q: [B, L, N, D] or, with layout="BNLD", [B, N, L, D]; float16, bfloat16, float32 or float64.
        k: like q; it may have another number of heads when `rotation.freqs` is shared by all heads.
        rotation: the angles, as coordinates times frequencies. The first 2R channels are rotated, the others returned as they are.
        layout: order of the dimensions of q and k, "BLND" or "BNLD".
        implementation: None for the best that applies, or the name of one; see `explain`.

    Returns:
        The rotated (q, k), each in its own dtype. Angles and products are float32 whatever that dtype is.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    for name, x in (("q", q), ("k", k)):
        checks.check_floating(name, x)
        checks.check_rotation(rotation, *checks.split_shape(name, x, layout), name)
    if implementation is None and triton.KERNEL.refuses_rotate(q, k, rotation, layout=layout) is None:
        implementation = default((q, k), rotation.freqs.shape[2])
    return choose("rotate", ROTATE, implementation, (q, k, rotation), {"layout": layout})(q, k, rotation, layout=layout)


def rotate_qkv(
    qkv: Float[Array, "B L three N D"], rotation: Rotation, *, implementation: str | None = None
) -> Float[Array, "B L three N D"]:
    """Rotates q and k inside a packed projection; v passes through. Equal to `rotate` on the parts, bit for bit.

    Args:
        qkv: [B, L, 3, N, D], as one dense layer of 3 N D outputs gives it.
        rotation: see `rotate`.
        implementation: None for the best that applies, or the name of one; see `explain`.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    checks.check_packed(qkv)
    _, tokens, _, heads, head_dim = qkv.shape
    checks.check_rotation(rotation, tokens, heads, head_dim, "qkv")
    return choose("rotate_qkv", ROTATE_QKV, implementation, (qkv, rotation), {})(qkv, rotation)


def rotate_by_angles(
    x: Array, theta: Float[Array, "N L R"], *, pairing: Pairing = "half", layout: str = "BLND", implementation: str | None = None
) -> Array:
    """Rotates one array by explicit angles: for schemes that are not linear in the coordinates, and to compare with other software.

    Args:
        x: [B, L, N, D] or, with layout="BNLD", [B, N, L, D].
        theta: [N, L, R] angles in radians, or [1, L, R] shared by all heads.
        pairing: "half" turns channels (r, R + r) together, "interleaved" (2r, 2r + 1).
        layout: order of the dimensions of x, "BLND" or "BNLD".
        implementation: None for the best that applies, or the name of one; see `explain`.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    checks.check_floating("x", x)
    checks.check_floating("theta", theta)
    tokens, heads, head_dim = checks.split_shape("x", x, layout)
    if theta.ndim != 3 or theta.shape[0] not in (1, heads) or theta.shape[1] != tokens:
        raise ValueError(f"theta has shape {theta.shape}; for x {x.shape} in layout {layout!r} it must be [{heads} or 1, {tokens}, R]")
    checks.check_pairs(theta.shape[2], head_dim, pairing, "theta")
    kwargs = {"pairing": pairing, "layout": layout}
    if implementation is None and triton.KERNEL.refuses_rotate_by_angles(x, theta, **kwargs) is None:
        implementation = default((x,), theta.shape[2])
    return choose("rotate_by_angles", ROTATE_BY_ANGLES, implementation, (x, theta), kwargs)(x, theta, **kwargs)
