"""The rotary operations as one Pallas kernel for Mosaic GPU that works in place; see `in_place`, and `mosaic_kernel` for the kernel."""

import jax
from jaxtyping import Array

from rope_jax_kernels.rotary import device, tiling
from rope_jax_kernels.rotary.in_place import Kernel, Rows
from rope_jax_kernels.rotation import Pairing


def launch(rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = True) -> tuple[tuple, Array | None]:
    """See `Kernel.launch`."""
    from rope_jax_kernels.rotary import mosaic_kernel  # Mosaic GPU is a quarter of this package's import time

    one_set = lambda some: tuple(x[None] for x in some)
    turned, sums = mosaic_kernel.launch_sets(rows, in_place, one_set(arrays), one_set(angles), one_set(saved))
    return tuple(x[0] for x in turned), sums[0][0] if saved else None


def refuses(arrays: dict[str, Array], angles: dict[str, Array], pairing: Pairing) -> str | None:
    """See `Kernel.refuses`: what the copy engine and the layouts of Mosaic GPU cannot do."""
    if pairing != "half":
        return f"pairing={pairing!r} needs neighbouring channels taken apart, which Mosaic GPU cannot do in registers"
    name, last = list(angles.items())[-1]
    pairs = last.shape[-1]
    if pairs % 4 or pairs > tiling.LONGEST_COPY // 2:
        return f"{name} describes {pairs} pairs, and its tiles need a multiple of 4, at most {tiling.LONGEST_COPY // 2}"
    if name == "theta" and pairs * last.dtype.itemsize % 16:
        return f"theta has rows of {pairs} {last.dtype}, and the copy engine needs a multiple of 16 bytes"
    for name, x in arrays.items():
        if x.shape[-1] * x.dtype.itemsize % 16:
            return f"{name} has heads of {x.shape[-1]} {x.dtype}, and the copy engine needs a multiple of 16 bytes"
        if x.shape[-1] == 2 * pairs and pairs * x.dtype.itemsize % 16:
            return f"{name} has halves of heads of {pairs} {x.dtype}, and the copy engine needs a multiple of 16 bytes"
        if jax.typeof(x).manual_axis_type.varying:
            return "Mosaic GPU cannot work in place where jax.shard_map tracks what varies; pass it check_vma=False"
    return device.refusal("Hopper")


KERNEL = Kernel(launch, refuses)
