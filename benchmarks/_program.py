"""Compiles programs for GPUs that need not be there."""

import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = pathlib.Path(__file__).parents[1] / "tests" / "data" / "h200.txtpb"
# The same program on every machine: nothing is tuned.
OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}


def absent_gpus(hosts: int = 1, gpus_per_host: int = 1) -> list:
    """H200s to compile for, on a machine with jax's CUDA plugin and no GPU.

    Raises:
        RuntimeError: the environment does not allow it.
    """
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        raise RuntimeError(
            "there is no GPU; to compile for one set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "
            "and install jax[cuda13]"
        )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        topology=f"1x{hosts}x{gpus_per_host}",
        target_config=TARGET.read_text(),
    ).devices


def compile_ahead(
    f: Callable,
    shapes: Sequence[Any],
    device: jax.Device,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] = {},
) -> jax.stages.Compiled:
    """Compiles f for a GPU.

    Args:
        f: the function.
        shapes: of its arguments, trees of `jax.ShapeDtypeStruct`.
        device: the GPU.
        donate: arguments that it may overwrite.
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
    """Bytes of each array of an HLO type: of one, or of those of a tuple."""
    arrays = re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", shape)
    return tuple(
        int(bits or 8) // 8 * math.prod(int(n) for n in extents.split(",") if n)
        for _, bits, extents in arrays
    )
