"""Ahead-of-time compilation for GPUs, on machines without one."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Autotuning is off, so that the program is the same on every machine.
OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}


def compile_ahead(
    f: Callable,
    shapes: Sequence[Any],
    device: jax.Device,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] = {},
) -> jax.stages.Compiled:
    """Compiles a function for one GPU.

    Args:
        f: the function.
        shapes: trees of `jax.ShapeDtypeStruct`, one per argument.
        device: of `absent_gpus`.
        donate: indices of donated arguments.
        options: of the compiler, beside `OPTIONS`.
    """
    mesh = Mesh(np.array([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(f, donate_argnums=donate).trace(*jax.tree.map(place, tuple(shapes)))
        return traced.lower().compile(compiler_options={**OPTIONS, **options})


def sizes(shape: str) -> tuple[int, ...]:
    """Bytes of each array in an HLO type, which is an array or a tuple."""
    arrays = re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", shape)
    return tuple(
        int(bits or 8) // 8 * math.prod(int(n) for n in extents.split(",") if n)
        for _, bits, extents in arrays
    )
