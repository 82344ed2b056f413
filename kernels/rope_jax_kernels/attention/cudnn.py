"""Global attention by cuDNN (`jax.nn.dot_product_attention`) of rotated q, k and v."""

import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.dense import turn_tokens
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.rotary import unpack_and_rotate
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)


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
    q, k = turn_tokens(q, rotation), turn_tokens(k, rotation)
    bias = None if bias is None else bias[None].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, implementation="cudnn")


def attention_qkv(qkv: Float[Array, "B L 3 N D"], **terms: object) -> Float[Array, "B L N D"]:
    """`rope_jax_kernels.attention_qkv`; q, k and v are split and rotated in one launch."""
    return attention(*unpack_and_rotate(qkv, terms["rotation"]), **terms | {"rotation": None})


def refusal(
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: object,
    **arrays: Float[Array, "..."],
) -> str | None:
    """Why cuDNN cannot serve a call with these arguments, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; only Global is served"
    for name, x in arrays.items():
        if x.dtype not in DTYPES:
            return f"{name} has dtype {x.dtype}; float16 and bfloat16 are served"
        if x.size == 0:
            return f"{name} has shape {x.shape}, so there is nothing to compute"
    x = next(iter(arrays.values()))
    if x.shape[-1] % 8:
        return f"the head dimension is {x.shape[-1]}; multiples of 8 are served"
    if bias is not None and x.shape[1] % 2:
        return f"there are {x.shape[1]} tokens; with a bias it is trained on even numbers only"
    if not isinstance(scale, numbers.Real | None):
        return "scale is an array; numbers are served"
    if not device.is_gpu():
        return "it needs a GPU"
    largest = 256 if device.refusal("Hopper") is None else 128
    if x.shape[-1] > largest:
        return f"the head dimension is {x.shape[-1]}; up to {largest} are served on this GPU"
    return device.refusal()
