"""Whether a GPU kernel can run where a call is being traced."""

import os

import jax
from jax.experimental.pallas import triton

INTERPRET = "ROPE_JAX_INTERPRET"
CAPABILITIES = {"Ampere": 80, "Hopper": 90, "Blackwell": 100}  # compute capability, from which on


def interpreted() -> bool:
    """Whether kernels traced now run in Pallas' interpret mode: the environment asks for it and there is no GPU to compile for."""
    return os.environ.get(INTERPRET) == "1" and not is_gpu()


def refusal(generation: str = "Ampere") -> str | None:
    """Why a GPU kernel that needs this generation, or a newer one, cannot run here, or None.

    The target is the one for which Pallas itself will lower: the device of the abstract mesh where there is one
    (`jax.sharding.use_abstract_mesh`: how kernels are compiled ahead of time on a machine without a GPU), else jax's default device.
    It is asked for when a call is traced, and so is the environment variable.
    """
    if not is_gpu():
        return None if interpreted() else f"it needs a GPU; set {INTERPRET}=1 to interpret it on the CPU"
    try:
        capability = triton.get_gpu_info().compute_capability
    except ValueError as error:
        return f"it needs an NVIDIA GPU that jax knows ({error})"
    # AMD's architectures have no compute capability and come as 0.
    return None if capability >= CAPABILITIES[generation] else f"it needs an NVIDIA GPU of the {generation} generation or newer"


def is_gpu() -> bool:
    """Whether calls traced now are for a GPU."""
    return triton.is_gpu_device()


def may_be_partitioned() -> bool:
    """Whether XLA may have to split what is traced now over devices: there are several, and this is not inside `jax.shard_map`.

    XLA cannot split a kernel and would gather its operands first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and any(kind != jax.sharding.AxisType.Manual for kind in mesh.axis_types)
