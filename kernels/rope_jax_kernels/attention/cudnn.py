"""Global attention by cuDNN (`jax.nn.dot_product_attention`) of rotated q, k and v.

jax 0.11.2 trains it on even numbers of tokens only: its check of lengths counts a bias even where
there is none. An odd number, as with a class token, gets one more token of zeros in the pass that
unpacks and rotates, or in the one that rotates. The output is cut to the tokens, so that whatever
cuDNN writes for the padding neither reaches the result nor receives a gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device, dispatch
from rope_jax_kernels.attention.dense import turn_tokens
from rope_jax_kernels.attention.kernel import refusal_of_call
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.rotary import unpack_and_rotate
from rope_jax_kernels.rotary.reference import pad_tokens
from rope_jax_kernels.rotation import Rotation

# Bias of a key that takes no part, by dtype: what jax adds where a mask excludes a pair. Larger
# ones meet a bug in cuDNN's subtraction.
EXCLUDED = {jnp.dtype(jnp.float16): -(2.0**15), jnp.dtype(jnp.bfloat16): -(2.0**41)}


def attend(
    q: Float[Array, "B M N D"],
    k: Float[Array, "B M N D"],
    v: Float[Array, "B M N D"],
    *,
    tokens: int,
    bias: Float[Array, "N L L"] | None,
    scale: float | None,
) -> Float[Array, "B L N D"]:
    """Attention between the first L = `tokens` of M tokens; the others are padding."""
    (q, k, v), bias = device.vary_alike((q, k, v), bias)
    padding, lengths = q.shape[1] - tokens, None
    if bias is not None:
        # cuDNN has no gradient of a bias combined with lengths, so here the bias excludes the
        # padding as keys. As queries it gets a row of zeros, whose softmax is finite.
        bias = jnp.pad(bias[None].astype(q.dtype), ((0, 0), (0, 0), (0, padding), (0, 0)))
        excluded = EXCLUDED.get(q.dtype, -jnp.inf)
        bias = jnp.pad(bias, ((0, 0),) * 3 + ((0, padding),), constant_values=excluded)
    elif padding:
        lengths = jnp.full(q.shape[:1], tokens, jnp.int32)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=scale,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, :tokens]


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N L L"] | None,
    scale: float | None,
) -> Float[Array, "B L N D"]:
    """`rope_jax_kernels.attention`."""
    tokens = q.shape[1]
    q, k = turn_tokens(q, rotation), turn_tokens(k, rotation)
    q, k, v = (pad_tokens(x, tokens % 2) for x in (q, k, v))
    return attend(q, k, v, tokens=tokens, bias=bias, scale=scale)


def attention_qkv(
    qkv: Float[Array, "B L 3 N D"],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N L L"] | None,
    scale: float | None,
) -> Float[Array, "B L N D"]:
    """`rope_jax_kernels.attention_qkv`; q, k and v are split, rotated and padded in one launch."""
    tokens = qkv.shape[1]
    by = {"padding": tokens % 2}
    if rotation is not None:
        # By name, because this program is already one for a GPU.
        arguments = {"qkv": qkv, "rotation": rotation} | by
        by["implementation"] = dispatch.resolve("unpack_and_rotate", arguments)
    q, k, v = unpack_and_rotate(qkv, rotation, **by)
    return attend(q, k, v, tokens=tokens, bias=bias, scale=scale)


@functools.cache
def missing() -> str | None:
    """The reason why this installation of jax has no usable cuDNN, or None."""
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jax.eval_shape(attend, x, x, x)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def refusal(
    arrays: dict[str, Any],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: object,
) -> str | None:
    """The reason why cuDNN cannot serve a call with these arguments, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; only Global is served"
    if reason := refusal_of_call(arrays, None, None, scale, tuple(EXCLUDED)):
        return reason
    x = next(iter(arrays.values()))
    if x.shape[-1] % 8:
        return f"the head dimension is {x.shape[-1]}; multiples of 8 are served"
    if not device.is_gpu():
        return "it needs a GPU"
    largest = 256 if device.refusal("Hopper") is None else 128
    if x.shape[-1] > largest:
        return f"the head dimension is {x.shape[-1]}; up to {largest} are served on this GPU"
    return device.refusal() or missing()
