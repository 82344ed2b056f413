"""Global attention by cuDNN, through `jax.nn.dot_product_attention`, which wants q, k and v apart and rotated."""

import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels.attention.dense import turn_tokens
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.rotary import device
from rope_jax_kernels.rotary.unpack import unpack_and_rotate
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)


def attention(
    q: Array, k: Array, v: Array, *, pattern: Pattern, rotation: Rotation | None, bias: Array | None, scale: float | None
) -> Float[Array, "B L N D"]:
    """See `rope_jax_kernels.attention`."""
    q, k = turn_tokens(q, rotation), turn_tokens(k, rotation)
    bias = None if bias is None else bias[None].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, implementation="cudnn")


def attention_qkv(qkv: Array, **terms: object) -> Array:
    """See `rope_jax_kernels.attention_qkv`. q, k and v are taken apart and rotated in one launch (kernels/README.md)."""
    return attention(*unpack_and_rotate(qkv, terms["rotation"]), **terms | {"rotation": None})


def refusal(arrays: dict[str, Array], *, pattern: Pattern, rotation: Rotation | None, bias: Array | None, scale: object) -> str | None:
    """Why cuDNN cannot serve a call, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; it knows Global only"
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


def refuses_attention(q: Array, k: Array, v: Array, **terms: object) -> str | None:
    """Why `attention` cannot serve this call, or None."""
    return refusal({"q": q, "k": k, "v": v}, **terms)


def refuses_attention_qkv(qkv: Array, **terms: object) -> str | None:
    """Why `attention_qkv` cannot serve this call, or None."""
    return refusal({"qkv": qkv}, **terms)
