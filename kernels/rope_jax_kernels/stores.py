"""Stores of kernels for `mosaic`."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def store(ref: Any, value: Array, *, interpret: bool) -> None:
    """`ref[...] = value` in any layout, also one that takes more instructions than the best.

    From jax 0.12 on, `ref[...] = value` refuses layouts that are not the best. `plgpu.store` is of
    that release, and not for interpret mode.
    """
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)
