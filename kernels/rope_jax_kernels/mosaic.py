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


def in_sets(
    launch: Callable[[tuple, tuple, int], tuple],
    arrays: tuple,
    tables: tuple,
    *,
    apart: bool = False,
    sets: int = 1,
) -> tuple:
    """launch(arrays, tables, sets) with a rule for vmap; sets are equal parts of the examples.

    Tables are [sets, ...], or [1, ...] where all sets share one. Examples that share all tables
    become one set, unless something is summed over those of a set: then sets stay `apart`.
    """

    @jax.custom_batching.custom_vmap
    def run(arrays: tuple, tables: tuple) -> tuple:
        return launch(arrays, tables, sets)

    @run.def_vmap
    def _run_batched(
        size: int, is_batched: Any, arrays: tuple, tables: tuple
    ) -> tuple[tuple, tuple]:
        arrays_batched, tables_batched = is_batched
        tables = tuple(
            # What is mapped here may be shared by the sets of an inner vmap.
            jnp.broadcast_to(x, (size, sets, *x.shape[1 + b :])).reshape(-1, *x.shape[1 + b :])
            if b or len(x) > 1
            else x
            for x, b in zip(tables, tables_batched, strict=True)
        )
        arrays = merge_mapped(size, arrays, arrays_batched)
        out = in_sets(
            launch,
            arrays,
            tables,
            apart=apart,
            sets=sets * size if apart or sets > 1 or any(tables_batched) else 1,
        )
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True,) * len(out)

    return run(arrays, tables)


def select_shared(index: Array | int, size: int) -> Array | int:
    """The index along an axis of this size, which is 1 where all share one element."""
    return index if size > 1 else 0


def merge_mapped(size: int, operands: tuple, batched: tuple) -> tuple:
    """Merges the mapped dimension of operands, of this size, into the first one, for vmap rules."""
    return tuple(
        (x if b else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[1 + b :])
        for x, b in zip(operands, batched, strict=True)
    )
