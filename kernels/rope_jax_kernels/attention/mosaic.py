"""Attention by Pallas kernels for Mosaic GPU on Hopper; neighbourhoods on Blackwell, too.

The backward pass of global attention serves heads whose tokens a program can hold. Mosaic GPU takes
a second to import, and refusals do not need it: functions import it when they are called.
"""

import importlib
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
# Pattern -> the modules of its forward and of its backward kernels.
MODULES = {
    Global: ("mosaic_global", "mosaic_global_backward"),
    Window: ("mosaic_window", "mosaic_window"),
    Neighborhood: ("mosaic_neighborhood", "mosaic_neighborhood_backward"),
}
WINDOW_TILES = {32: 3, 64: 2}  # most tiles of a window, by head dimension


def forward(
    task: Task, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B ..."]]:
    """`Kernel.forward`; global attention has no bias."""
    return _modules(task)[0].forward(task, operands)


def serves_backward(task: Task) -> bool:
    """True if `backward` serves this number of tokens."""
    return not isinstance(task.pattern, Global) or _modules(task)[1].serves(task)


def backward(task: Task, needs: Needs, operands: Operands) -> tuple[tuple, tuple, Array | None]:
    """The backward pass of `Kernel`; global attention has no bias."""
    return _modules(task)[1].backward(task, needs, operands)


def _modules(task: Task) -> list[Any]:
    return [importlib.import_module(f"{__package__}.{x}") for x in MODULES[type(task.pattern)]]


KERNEL = Kernel("mosaic", forward)
attention, attention_qkv = KERNEL.attention, KERNEL.attention_qkv


def is_preferred(*, pattern: Pattern, **arguments: Any) -> bool:
    """True for neighbourhoods, and for windows with fewer instructions than Triton's kernels have.

    False for global attention, which cuDNN serves.

    Args:
        pattern: of a call that is served.
        **arguments: its other arguments by name.
    """
    if not isinstance(pattern, Window):
        return isinstance(pattern, Neighborhood)
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
        pairs = rotation.freqs.shape[2]
        if pairs % 8:
            return (
                f"rotation.freqs describes {pairs} pairs, and registers are cut every 8 channels: "
                "multiples of 8 are served"
            )
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
