"""Global attention by Pallas kernels for Mosaic GPU on Hopper, launched by `mosaic_launch`.

The backward pass serves heads whose tokens a program can hold. Mosaic GPU takes a second to import,
and refusals do not need it: functions import it when they are called.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.kernel import Kernel, Needs, Operands, refusal_of_call
from rope_jax_kernels.attention.patterns import Global, Pattern
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
AXES = 4  # most coordinates of a token: with heads of 128, more do not fit into registers


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B L N D"], Float[Array, "B N _"]]:
    """`Kernel.forward`; there is no bias."""
    from rope_jax_kernels.attention import mosaic_launch

    return mosaic_launch.forward(task, operands.data, operands.turning)


def serves_backward(task: Task) -> bool:
    """True if `backward` serves this number of tokens."""
    from rope_jax_kernels.attention import mosaic_backward

    return mosaic_backward.serves(task)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`; there is no bias."""
    from rope_jax_kernels.attention import mosaic_launch

    (*data, lse, out), turning, _ = operands
    return *mosaic_launch.backward(task, (*data, out, lse), turning[:2], turning[2:]), None


KERNEL = Kernel("mosaic", forward)
attention, attention_qkv = KERNEL.attention, KERNEL.attention_qkv


def refusal(
    arrays: dict[str, Any],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
) -> str | None:
    """The reason why this kernel cannot serve a call with these arguments, or None."""
    if not isinstance(pattern, Global):
        return f"the pattern is {type(pattern).__name__}; only Global is served"
    if bias is not None:
        return "there is a bias, which it does not read"
    if reason := refusal_of_call(arrays, rotation, bias, scale, DTYPES):
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
    reason = device.refusal("Hopper")
    if reason is None and device.is_gpu() and device.refusal("Blackwell") is None:
        return (
            "it needs the matrix instructions of Hopper (compute capability 9.0), which newer GPUs "
            "do not have"
        )
    return reason
