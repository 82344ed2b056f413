"""Global attention by a Pallas kernel for Mosaic GPU that is made for Hopper; see `mosaic_kernel`. What it saves for the backward pass
is what `triton` saves, and the backward pass is that of `triton`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rope_jax_kernels.attention import triton
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.rotary import device
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
AXES = 4  # most coordinates of a token: more of them, of heads of 128, do not fit into registers


def attention(q: Array, k: Array, v: Array, **terms: Any) -> Array:
    """See `rope_jax_kernels.attention`."""
    return triton.attend_all((q, k, v), implementation="mosaic", **terms)


def attention_qkv(qkv: Array, **terms: Any) -> Array:
    """See `rope_jax_kernels.attention_qkv`. Reads q, k and v where they lie."""
    return triton.attend_all((qkv,), implementation="mosaic", **terms)


def refusal(arrays: dict[str, Array], *, pattern: Pattern, rotation: Rotation | None, bias: Array | None, scale: Any) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; it knows Global only"
    if bias is not None:
        return "there is a bias, which it does not read"
    for name, x in arrays.items():
        if x.dtype not in DTYPES:
            return f"{name} has dtype {x.dtype}; float16 and bfloat16 are served"
    head_dim = next(iter(arrays.values())).shape[-1]
    if head_dim not in HEAD_DIMS:
        return f"the head dimension is {head_dim}; {', '.join(map(str, HEAD_DIMS))} are served"
    if rotation is not None:
        if rotation.pairing != "half":
            return f"pairing={rotation.pairing!r} needs neighbouring channels taken apart, which Mosaic GPU cannot do in registers"
        _, axes, pairs = rotation.freqs.shape
        if pairs % 8:
            return f"rotation.freqs describes {pairs} pairs, and registers are cut every 8 channels: multiples of 8 are served"
        if axes > AXES:
            return f"rotation.coords has {axes} axes; up to {AXES} are served"
    refused = triton.refusal(arrays, pattern=pattern, rotation=rotation, bias=bias, scale=scale) or device.refusal("Hopper")
    if refused is None and device.is_gpu() and device.refusal("Blackwell") is None:
        return "it needs the matrix instructions of Hopper (compute capability 9.0), which newer GPUs do not have"
    return refused


def refuses_attention(q: Array, k: Array, v: Array, **terms: Any) -> str | None:
    """Why `attention` cannot serve this call, or None."""
    return refusal({"q": q, "k": k, "v": v}, **terms)


def refuses_attention_qkv(qkv: Array, **terms: Any) -> str | None:
    """Why `attention_qkv` cannot serve this call, or None."""
    return refusal({"qkv": qkv}, **terms)
