"""Common parts of the Mosaic GPU kernels for rotation and attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def store(ref: Any, value: Array, *, interpret: bool) -> None:
    """`ref[...] = value` in any layout, even one that takes more instructions than the best.

    From jax 0.12 on, `ref[...] = value` refuses layouts that are not the best. `plgpu.store` is new
    in that release, and does not work in interpret mode.
    """
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def repeat(count: Any, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """carry = body(i, carry) for `count` numbers i of 32 bits.

    With a fixed count and `jax_enable_x64`, those of `fori_loop` have 64 bits, which neither the
    other arithmetic of kernels nor Mosaic GPU accepts.
    """
    return jax.lax.fori_loop(0, count, lambda i, carry: body(i.astype(np.int32), carry), carry)


def merge_mapped(size: int, operands: tuple, batched: tuple) -> tuple:
    """Merges the mapped dimension of operands, of this size, into the first one, for vmap rules."""
    wide = [
        x if b else jnp.broadcast_to(x, (size, *x.shape))
        for x, b in zip(operands, batched, strict=True)
    ]
    return tuple(x.reshape(-1, *x.shape[2:]) for x in wide)
