"""Attention by Pallas kernels for Mosaic GPU on Hopper; neighbourhoods on Blackwell, too.

`mosaic_launch` has the kernels of global attention, whose backward pass serves heads whose tokens a
program can hold, `mosaic_window` and `mosaic_neighborhood` those of the other patterns. Mosaic GPU
takes a second to import, and refusals do not need it: functions import it when they are called.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention import neighborhood_boxes
from rope_jax_kernels.attention.kernel import Kernel, Needs, Operands, refusal_of_call
from rope_jax_kernels.attention.patterns import Global, Neighborhood, Pattern, Window
from rope_jax_kernels.attention.slots import padded_size
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import ROWS, make_boxes
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
NEWER = 110  # compute capability, times 10, from which GPUs are not data center Blackwell
AXES = 4  # most coordinates of a token: with heads of 128, more do not fit into registers
WINDOW_TILES = {32: 3, 64: 2}  # most tiles of a window, by head dimension


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B ..."]]:
    """`Kernel.forward`; global attention has no bias."""
    from rope_jax_kernels.attention import mosaic_launch, mosaic_neighborhood, mosaic_window

    if isinstance(task.pattern, Window):
        return mosaic_window.forward(task, operands)
    if isinstance(task.pattern, Neighborhood):
        return mosaic_neighborhood.forward(task, operands)
    return mosaic_launch.forward(task, operands.data, operands.turning)


def serves_backward(task: Task) -> bool:
    """True if `backward` serves this number of tokens."""
    from rope_jax_kernels.attention import mosaic_backward

    return not isinstance(task.pattern, Global) or mosaic_backward.serves(task)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`; global attention has no bias."""
    from rope_jax_kernels.attention import (
        mosaic_launch,
        mosaic_neighborhood_backward,
        mosaic_window_backward,
    )

    if isinstance(task.pattern, Window):
        return mosaic_window_backward.backward(task, needs, operands)
    if isinstance(task.pattern, Neighborhood):
        return mosaic_neighborhood_backward.backward(task, needs, operands)
    (*data, lse, out), turning, _ = operands
    return *mosaic_launch.backward(task, (*data, out, lse), turning[:2], turning[2:]), None


KERNEL = Kernel("mosaic", forward)
attention, attention_qkv = KERNEL.attention, KERNEL.attention_qkv


def is_preferred(*, pattern: Pattern, **arguments: Any) -> bool:
    """True if it issues fewer instructions than Triton's kernels, which have smaller tiles.

    Args:
        pattern: of a call that is served.
        **arguments: its other arguments by name.
    """
    if not isinstance(pattern, Window):
        return False
    array = arguments["qkv"] if "qkv" in arguments else arguments["q"]
    grid, head_dim = array.shape[1:3], array.shape[-1]
    tokens, slots = pattern.rotated_tokens(grid), ROWS * make_boxes(pattern, grid, head_dim).tiles
    return tokens > ROWS // 2 and slots <= padded_size(tokens)


def refusal(
    arrays: dict[str, Any],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
) -> str | None:
    """The reason why this kernel cannot serve a call with these arguments, or None."""
    if bias is not None and isinstance(pattern, Global):
        return "there is a bias, which it does not read in global attention"
    if reason := refusal_of_call(arrays, rotation, bias, scale, DTYPES):
        return reason
    name, array = next(iter(arrays.items()))
    head_dim, served = array.shape[-1], HEAD_DIMS[: 3 if isinstance(pattern, Global) else 2]
    if head_dim not in served:
        return f"the head dimension is {head_dim}; {', '.join(map(str, served))} are served"
    places = array.shape[1 : -3 if name == "qkv" else -2]
    if len(places) != (1 if isinstance(pattern, Global) else 2):
        return f"{name} has {array.ndim} dimensions, which are not those of the pattern"
    if isinstance(pattern, Window):
        boxes = make_boxes(pattern, places, head_dim)
        if boxes.tiles > (most := WINDOW_TILES[head_dim]):
            return (
                f"the window is {boxes.window.size} with a shift of {boxes.window.shift}, which "
                f"takes {boxes.tiles} tiles of {ROWS} slots; in heads of {head_dim}, {most} are "
                "served"
            )
    near = isinstance(pattern, Neighborhood)
    if near and (reason := neighborhood_boxes.refusal(pattern, places, head_dim, scale)):
        return reason
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
        if axes > AXES and isinstance(pattern, Global):
            return f"rotation.coords has {axes} axes; up to {AXES} are served"
    if reason := device.refusal("Hopper"):
        return reason
    if near and device.capability() >= NEWER:
        return "GPUs of compute capability 11.0 and newer copy slowly, or were not compiled for"
    if not near and device.is_gpu() and device.refusal("Blackwell") is None:
        return (
            "it needs the matrix instructions of Hopper (compute capability 9.0), which newer GPUs "
            "do not have"
        )
    return None
