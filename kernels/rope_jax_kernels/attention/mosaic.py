"""Global attention by Pallas kernels for Mosaic GPU on Hopper, launched by `mosaic_launch`.

Residuals are those of `triton`, and so is the backward pass where a program cannot hold all tokens
of a head: `mosaic_backward.serves`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention import triton
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
AXES = 4  # most coordinates of a token: with heads of 128, more do not fit into registers


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    **terms: Any,
) -> Float[Array, "B L N D"]:
    """`rope_jax_kernels.attention`."""
    return triton.attend_all((q, k, v), implementation="mosaic", **terms)


def attention_qkv(qkv: Float[Array, "B L 3 N D"], **terms: Any) -> Float[Array, "B L N D"]:
    """`rope_jax_kernels.attention_qkv`, read from the packed array."""
    return triton.attend_all((qkv,), implementation="mosaic", **terms)


def refusal(
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
    **arrays: Float[Array, "..."],
) -> str | None:
    """Why this kernel cannot serve a call with these arguments, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; only Global is served"
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
            return (
                f"pairing={rotation.pairing!r} needs neighbouring channels taken apart, which "
                "Mosaic GPU cannot do in registers"
            )
        _, axes, pairs = rotation.freqs.shape
        if pairs % 8:
            return (
                f"rotation.freqs describes {pairs} pairs, and registers are cut every 8 channels: "
                "multiples of 8 are served"
            )
        if axes > AXES:
            return f"rotation.coords has {axes} axes; up to {AXES} are served"
    reason = triton.refusal(pattern=pattern, rotation=rotation, bias=bias, scale=scale, **arrays)
    reason = reason or device.refusal("Hopper")
    if reason is None and device.is_gpu() and device.refusal("Blackwell") is None:
        return (
            "it needs the matrix instructions of Hopper (compute capability 9.0), which newer GPUs "
            "do not have"
        )
    return reason
