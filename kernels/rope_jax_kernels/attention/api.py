"""The public attention functions: check the arguments, then dispatch."""

from jaxtyping import Array, Float

from rope_jax_kernels import checks
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.calls import call
from rope_jax_kernels.rotation import Rotation


def attention(
    q: Float[Array, "B *places N D"],
    k: Float[Array, "B *places N D"],
    v: Float[Array, "B *places N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None = None,
    bias: Float[Array, "#N ..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B *places N D"]:
    """Softmax attention over the pairs of tokens that `pattern` allows.

    Computes `softmax(scale * rotate(q) rotate(k)^T + bias) v` for `Global` (ViT, arXiv 2010.11929),
    `Window` (Swin, arXiv 2103.14030) and `Neighborhood` (NAT and DiNAT, arXiv 2204.07143 and
    2209.15001). Logits and softmax are float32 whatever the dtype of q and k (float64 for float64);
    weights are cast to v's dtype before the product with v, and the sum over keys is float32 again.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Window, attention
        >>> x = jnp.ones((1, 8, 8, 2, 16))
        >>> table = jnp.zeros((2, 49))  # [N, (2h-1) * (2w-1)]
        >>> attention(x, x, x, pattern=Window(size=(4, 4), shift=(2, 2)), bias=table).shape
        (1, 8, 8, 2, 16)

    Args:
        q: [B, L, N, D] for `Global`, [B, H, W, N, D] for `Window` and `Neighborhood`; float16,
            bfloat16, float32 or float64.
        k: like q.
        v: like q.
        pattern: `Global()`, `Window(size=(h, w), shift=(dy, dx))` or
            `Neighborhood(size=(kh, kw), dilation=(qy, qx))`, in tokens.
        rotation: of q and k by their tokens' positions, or None. Its coords are [L, A] for
            `Global`, [H*W, A] in row-major order for `Neighborhood`, and [h*w, A] for `Window`:
            scores depend on differences of coordinates only, so all windows share those of one
            window, as fitted to the map (`Window.fit`).
        bias: added to the scaled logits, or None. For `Global` a matrix [N, L, L]; for `Window` a
            table [N, (2h-1)*(2w-1)] with index (qy-ky+h-1)*(2w-1) + (qx-kx+w-1), where h, w are
            those of the fitted window; for `Neighborhood` a table [N, 2kh-1, 2kw-1] with index
            (ky-qy)/dilation + kh-1, and so in x. A first dimension of 1 is shared by all heads.
            Where it is -inf or the smallest number for all keys of a query, that query's output
            depends on the implementation.
        scale: factor of the logits before the bias, one number; None for D**-0.5.
        implementation: None for the best that applies, or a name; see `explain`.

    Returns:
        An array of q's shape and dtype.

    Raises:
        ValueError: shapes do not fit each other or the pattern; the named implementation is
            unknown or refuses; or a kernel is differentiated in a way that only "xla" supports
            (with respect to `rotation.coords`, or twice).
        TypeError: an array is not floating-point, `pattern` is not a pattern, `rotation` not a
            `Rotation`, or `scale` not a number.
    """
    checks.check_pattern(pattern)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_operand(name, x, pattern)
        if x.shape != q.shape:
            raise ValueError(f"{name} has shape {x.shape}; it must have q's shape, {q.shape}")
    bias = checks.check_terms(q.shape, "q", pattern, rotation, bias, scale)
    terms = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
    return call("attention", {"q": q, "k": k, "v": v} | terms, implementation=implementation)


def attention_qkv(
    qkv: Float[Array, "B *places three N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None = None,
    bias: Float[Array, "#N ..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B *places N D"]:
    """`attention` on a packed projection, as one dense layer of 3 N D outputs returns it.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Global, attention_qkv
        >>> attention_qkv(jnp.ones((1, 5, 3, 2, 16)), pattern=Global()).shape
        (1, 5, 2, 16)

    Args:
        qkv: [B, L, 3, N, D] for `Global`, [B, H, W, 3, N, D] for `Window` and `Neighborhood`, with
            q, k and v along the axis of 3.
        pattern: as in `attention`, like the arguments that follow.
        rotation: of q and k, or None.
        bias: matrix or table added to the scaled logits, or None.
        scale: factor of the logits, one number; None for D**-0.5.
        implementation: None for the best that applies, or a name; see `explain`.

    Returns:
        [B, L, N, D] or [B, H, W, N, D], in qkv's dtype.

    Raises:
        ValueError: as `attention`.
        TypeError: as `attention`.
    """
    checks.check_pattern(pattern)
    checks.check_operand("qkv", qkv, pattern)
    shape = (*qkv.shape[:-3], *qkv.shape[-2:])
    bias = checks.check_terms(shape, "qkv", pattern, rotation, bias, scale)
    terms = {"pattern": pattern, "rotation": rotation, "bias": bias, "scale": scale}
    return call("attention_qkv", {"qkv": qkv} | terms, implementation=implementation)
