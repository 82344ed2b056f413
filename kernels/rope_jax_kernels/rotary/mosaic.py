"""The rotary operations by one in-place Pallas kernel for Mosaic GPU; see `kernel` and, for the
kernel, `mosaic_kernel`.
"""

import functools
from typing import Any

import jax
from jaxtyping import Array

from rope_jax_kernels import device
from rope_jax_kernels.rotary.kernel import Kernel, Rows, angle_arrays
from rope_jax_kernels.rotary.tile_sizes import LONGEST_COPY
from rope_jax_kernels.rotation import Pairing, Rotation

ALIGNMENT = 16  # bytes, of what the copy engine addresses


def launch(
    rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = True
) -> tuple[tuple, Array | None]:
    """`Kernel.launch`."""
    # Here, because Mosaic GPU takes a second to import and refusals do not need it.
    from rope_jax_kernels.mosaic import in_sets
    from rope_jax_kernels.rotary import mosaic_kernel

    run = functools.partial(mosaic_kernel.launch, rows, in_place, len(arrays))
    angles = tuple(x[None] for x in angles)
    out = in_sets(run, (*arrays, *saved), angles, apart=bool(saved))
    return out[: len(arrays)], out[-1][0] if saved else None


KERNEL = Kernel(launch)
rotate, rotate_qkv, rotate_by_angles = KERNEL.rotate, KERNEL.rotate_qkv, KERNEL.rotate_by_angles


def refusal(
    arrays: dict[str, Any],
    *,
    rotation: Rotation | None = None,
    theta: Array | None = None,
    pairing: Pairing | None = None,
    layout: str | None = None,
) -> str | None:
    """The reason why the kernel cannot serve a call with these arguments, or None.

    Mostly limits of the copy engine's addressing, and of Mosaic GPU's operations in registers.
    """
    angles = angle_arrays(rotation, theta)
    if reason := device.refusal_of_arrays(arrays | angles):
        return reason
    pairing = pairing if rotation is None else rotation.pairing
    if pairing != "half":
        return (
            f"pairing={pairing!r} needs neighbouring channels taken apart, which Mosaic GPU cannot "
            "do in registers"
        )
    name, last = list(angles.items())[-1]
    pairs, multiple = last.shape[-1], f"the copy engine needs a multiple of {ALIGNMENT} bytes"
    if pairs % 4 or pairs > LONGEST_COPY // 2:
        return (
            f"{name} describes {pairs} pairs, and its tiles need a multiple of 4, at most "
            f"{LONGEST_COPY // 2}"
        )
    if name == "theta" and pairs * last.dtype.itemsize % ALIGNMENT:
        return f"theta has rows of {pairs} {last.dtype}, and {multiple}"
    for name, x in arrays.items():
        head_dim, itemsize = x.shape[-1], x.dtype.itemsize
        if head_dim * itemsize % ALIGNMENT:
            return f"{name} has heads of {head_dim} {x.dtype}, and {multiple}"
        if head_dim == 2 * pairs and pairs * itemsize % ALIGNMENT:
            return f"{name} has halves of heads of {pairs} {x.dtype}, and {multiple}"
        if jax.typeof(x).manual_axis_type.varying:
            return (
                "Mosaic GPU cannot work in place where jax.shard_map tracks what varies; pass it "
                "check_vma=False"
            )
    return device.refusal("Hopper")
