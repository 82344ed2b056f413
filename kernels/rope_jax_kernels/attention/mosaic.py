"""Global attention by Pallas kernels for Mosaic GPU on Hopper, launched by `mosaic_launch`.

The backward pass is that of `triton` where a program cannot hold all tokens of a head. Mosaic GPU
takes a second to import, and refusals do not need it: functions import it when they are called.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention import triton
from rope_jax_kernels.attention.kernel import Kernel, Wanted
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
AXES = 4  # most coordinates of a token: with heads of 128, more do not fit into registers


def forward(
    task: Task, operands: tuple, rotation: tuple, bias: tuple
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """`Kernel.forward`; there is no bias."""
    from rope_jax_kernels.attention import mosaic_launch

    del bias
    return mosaic_launch.forward(task, operands, rotation)


def backward(
    task: Task, wanted: Wanted, operands: tuple, turning: tuple, bias: tuple
) -> tuple[tuple, tuple, Array | None]:
    """`Kernel.backward`, by the kernels that serve this number of tokens."""
    from rope_jax_kernels.attention import mosaic_backward, mosaic_launch

    if not mosaic_backward.serves(task):
        return triton.backward(task, wanted, operands, turning, bias)
    *data, lse, out = operands
    return *mosaic_launch.backward(task, (*data, out, lse), turning[:2], turning[2:]), None


KERNEL = Kernel("mosaic", forward, backward)
attention, attention_qkv = KERNEL.attention, KERNEL.attention_qkv


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
    if reason := device.refusal_of_arrays(arrays, DTYPES):
        return reason
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
    reason = triton.refusal(
        pattern=pattern, rotation=rotation, bias=bias, scale=scale, **arrays
    ) or device.refusal("Hopper")
    if reason is None and device.is_gpu() and device.refusal("Blackwell") is None:
        return (
            "it needs the matrix instructions of Hopper (compute capability 9.0), which newer GPUs "
            "do not have"
        )
    return reason
