"""The public attention functions: check the arguments, choose a backend, call it."""

from jaxtyping import Array

from rope_jax_kernels.attention import checks, cudnn, mosaic, reference, triton
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.backends import Backend, choose
from rope_jax_kernels.rotary import device
from rope_jax_kernels.rotary.checks import check_floating
from rope_jax_kernels.rotation import Rotation

ATTENTION = {
    "xla": Backend(reference.attention),
    "triton": Backend(triton.attention, triton.refuses_attention),
    "mosaic": Backend(mosaic.attention, mosaic.refuses_attention),
    "cudnn": Backend(cudnn.attention, cudnn.refuses_attention),
}
ATTENTION_QKV = {
    "xla": Backend(reference.attention_qkv),
    "triton": Backend(triton.attention_qkv, triton.refuses_attention_qkv),
    "mosaic": Backend(mosaic.attention_qkv, mosaic.refuses_attention_qkv),
    "cudnn": Backend(cudnn.attention_qkv, cudnn.refuses_attention_qkv),
}


def default() -> str:
    """What `implementation=None` is where the kernels do not refuse. The one place where this is decided; reasoned, not measured.

    On a GPU the kernels: they move q, k, v and the output once, where XLA also writes logits, and rolls, windows and halos of keys, and
    cuDNN needs q, k and v taken apart first. Kernels have no forward-mode derivative: name "xla" for `jax.jvp` on a GPU.
    """
    return "triton" if device.is_gpu() and not device.may_be_partitioned() else "xla"


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    pattern: Pattern,
    rotation: Rotation | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Softmax attention over the pairs of tokens that `pattern` allows, with rotated queries and keys and a bias on the logits.

    out = softmax(scale * rotate(q) rotate(k)^T + bias) v, for Global (arXiv 2010.11929), Window (Swin, arXiv 2103.14030) and
    Neighborhood (NAT and DiNAT, arXiv 2204.07143 and 2209.15001). Logits and softmax are float32 whatever the dtype of q and k
    (float64 for float64); weights are cast to v's dtype before they meet v, and the sum over keys is float32 again.

    Args:
        q: [B, L, N, D] for Global, [B, H, W, N, D] for Window and Neighborhood; float16, bfloat16, float32 or float64.
        k: the shape of q.
        v: the shape of q.
        pattern: `Global()`, `Window(size=(h, w), shift=(dy, dx))` or `Neighborhood(size=(kh, kw), dilation=(qy, qx))`.
        rotation: turns q and k by their tokens' positions, or None. Its coords are [L, A] for Global, [H*W, A] in row-major order
            for Neighborhood, and for Window [h*w, A], those of one window as fitted to the map (`Window.fit`): scores depend on
            differences of coordinates only, so all windows share them.
        bias: added to the scaled logits, or None. For Global a matrix [N, L, L]; for Window a table [N, (2h-1)*(2w-1)] with index
            (qy-ky+h-1)*(2w-1) + (qx-kx+w-1), where h, w are those of the fitted window; for Neighborhood a table
            [N, 2kh-1, 2kw-1] with index (ky-qy)/dilation + kh-1, and so in x.
        scale: factor of the logits before the bias, one number; None for D**-0.5.
        implementation: None for the best that applies, or the name of one; see `explain`.

    Returns:
        An array of q's shape and dtype.

    Raises:
        ValueError: shapes do not fit each other or the pattern, the named implementation is unknown or refuses, or the kernels are asked
            for a derivative that "xla" alone has: of rotation.coords, or a second one.
        TypeError: an array is not floating-point, `pattern` is no pattern, `rotation` no rotation, or `scale` no number.
    """
    checks.check_pattern(pattern)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        checks.check_map(name, x.shape, pattern)
        if x.shape != q.shape:
            raise ValueError(f"{name} has shape {x.shape}; it must have q's shape, {q.shape}")
    checks.check_terms(q.shape, "q", pattern, rotation, bias, scale)
    kwargs = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
    if implementation is None and triton.refuses_attention(q, k, v, **kwargs) is None:
        implementation = default()
    return choose("attention", ATTENTION, implementation, (q, k, v), kwargs)(q, k, v, **kwargs)


def attention_qkv(
    qkv: Array,
    *,
    pattern: Pattern,
    rotation: Rotation | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    implementation: str | None = None,
) -> Array:
    """`attention` on a packed projection, as one dense layer of 3 N D outputs gives it.

    Args:
        qkv: [B, L, 3, N, D] for Global, [B, H, W, 3, N, D] for Window and Neighborhood, with q, k and v along the axis of 3.
        pattern: see `attention`, also for the arguments that follow.
        rotation: turns q and k, or None.
        bias: matrix or table added to the scaled logits, or None.
        scale: factor of the logits, one number; None for D**-0.5.
        implementation: None for the best that applies, or the name of one; see `explain`.

    Returns:
        [B, L, N, D] or [B, H, W, N, D], in qkv's dtype.

    Raises:
        ValueError: shapes do not fit each other or the pattern, the named implementation is unknown or refuses, or the kernels are asked
            for a derivative that "xla" alone has: of rotation.coords, or a second one.
        TypeError: an array is not floating-point, `pattern` is no pattern, `rotation` no rotation, or `scale` no number.
    """
    checks.check_pattern(pattern)
    check_floating("qkv", qkv)
    checks.check_map("qkv", qkv.shape, pattern)
    checks.check_terms((*qkv.shape[:-3], *qkv.shape[-2:]), "qkv", pattern, rotation, bias, scale)
    kwargs = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
    if implementation is None and triton.refuses_attention_qkv(qkv, **kwargs) is None:
        implementation = default()
    return choose("attention_qkv", ATTENTION_QKV, implementation, (qkv,), kwargs)(qkv, **kwargs)
