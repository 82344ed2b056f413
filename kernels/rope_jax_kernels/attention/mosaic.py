"""Attention by Pallas kernels for Mosaic GPU on Hopper: global, and inside windows.

`mosaic_launch` has the kernels of global attention, whose backward pass serves heads whose tokens a
program can hold, and `mosaic_window` those of windows. Mosaic GPU takes a second to import, and
refusals do not need it: functions import it when they are called.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.kernel import Kernel, Needs, Operands, refusal_of_call
from rope_jax_kernels.attention.patterns import Neighborhood, Pattern, Window
from rope_jax_kernels.attention.task import Task
from rope_jax_kernels.attention.window_boxes import WindowBoxes
from rope_jax_kernels.rotation import Rotation

DTYPES = (jnp.float16, jnp.bfloat16)
HEAD_DIMS = (32, 64, 128)
AXES = 4  # most coordinates of a token: with heads of 128, more do not fit into registers
WINDOW_TILE = 64  # tokens of a tile
WINDOW_TILES = {32: 3, 64: 2}  # most tiles of a window, by head dimension


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N *lse"]]:
    """`Kernel.forward`; global attention has no bias."""
    from rope_jax_kernels.attention import mosaic_launch, mosaic_window

    if isinstance(task.pattern, Window):
        return mosaic_window.forward(task, operands)
    return mosaic_launch.forward(task, operands.data, operands.turning)


def serves_backward(task: Task) -> bool:
    """True if `backward` serves this number of tokens."""
    from rope_jax_kernels.attention import mosaic_backward

    return isinstance(task.pattern, Window) or mosaic_backward.serves(task)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`; global attention has no bias."""
    from rope_jax_kernels.attention import mosaic_launch, mosaic_window

    if isinstance(task.pattern, Window):
        return mosaic_window.backward(task, needs, operands)
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
    grid = arguments["qkv"].shape[1:3] if "qkv" in arguments else arguments["q"].shape[1:3]
    return pattern.rotated_tokens(grid) > WINDOW_TILE // 2


def refusal(
    arrays: dict[str, Any],
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "..."] | None,
    scale: Any,
) -> str | None:
    """The reason why this kernel cannot serve a call with these arguments, or None."""
    if isinstance(pattern, Neighborhood):
        return "the pattern is Neighborhood; Global and Window are served"
    if bias is not None and not isinstance(pattern, Window):
        return "there is a bias, which it reads inside windows alone"
    if reason := refusal_of_call(arrays, rotation, bias, scale, DTYPES):
        return reason
    name, array = next(iter(arrays.items()))
    head_dim, served = array.shape[-1], WINDOW_TILES if isinstance(pattern, Window) else HEAD_DIMS
    if head_dim not in served:
        return f"the head dimension is {head_dim}; {', '.join(map(str, served))} are served"
    if isinstance(pattern, Window):
        grid = array.shape[1 : -3 if name == "qkv" else -2]
        tiles = WindowBoxes(grid, pattern.fit(grid), 2 * head_dim).tiles
        if tiles > (most := WINDOW_TILES[head_dim]):
            return (
                f"the window is {pattern.size} with a shift of {pattern.shift}, which takes "
                f"{tiles} tiles of 64 tokens; in heads of {head_dim}, {most} are served"
            )
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
