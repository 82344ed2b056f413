"""The target device of a traced call, and the requirements of GPU kernels on it and on operands.

The target is the device of the abstract mesh if there is one (`jax.sharding.use_abstract_mesh`, for
compiling ahead of time on a machine without a GPU), otherwise jax's default device. It is
determined when a call is traced, as is the environment variable `ROPE_JAX_INTERPRET`.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

INTERPRET = "ROPE_JAX_INTERPRET"
GENERATIONS = {"Ampere": 80, "Hopper": 90, "Blackwell": 100}  # lowest compute capability
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def is_gpu() -> bool:
    """Whether the target is a GPU."""
    target = _target()
    return getattr(target, "platform", target) in ("gpu", "cuda", "rocm")


def kind() -> str:
    """The kind of the target as jax names it: "NVIDIA H200", "cpu"."""
    target = _target()
    return (
        jax.local_devices(backend=target)[0].device_kind
        if isinstance(target, str)
        else target.device_kind
    )


def _target() -> Any:
    """A device, an abstract device, or the name of a platform."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is None:
        target = jax.config.jax_default_device or jax.local_devices()[0]
    return target


def say(message: str) -> None:
    """Prints one line to standard error."""
    print(f"rope_jax_kernels: {message}", file=sys.stderr, flush=True)


def interpreted() -> bool:
    """Whether kernels run in Pallas' interpret mode: requested, and the target is not a GPU."""
    return os.environ.get(INTERPRET) == "1" and not is_gpu()


def may_be_partitioned() -> bool:
    """Whether XLA may split the traced call over several devices.

    This is the case with several devices outside `jax.shard_map`. XLA cannot partition a kernel and
    would gather its operands first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and any(kind != jax.sharding.AxisType.Manual for kind in mesh.axis_types)


def refusal(generation: str = "Ampere") -> str | None:
    """Why the target cannot run a kernel that needs this generation of GPU or a newer one.

    Returns:
        The reason, or None if it can.
    """
    if not is_gpu():
        if interpreted():
            return None
        return f"it needs a GPU; set {INTERPRET}=1 to interpret it on the CPU"
    from jax.experimental.pallas import triton

    try:
        capability = triton.get_gpu_info().compute_capability
    except ValueError as error:
        return f"it needs an NVIDIA GPU that jax knows ({error})"
    # AMD's architectures have no compute capability and are reported as 0.
    if capability < GENERATIONS[generation]:
        return f"it needs an NVIDIA GPU of the {generation} generation or newer"
    return None


def refusal_of_arrays(arrays: Mapping[str, Array]) -> str | None:
    """Why a float32 kernel cannot take these named arrays, or None if it can."""
    for name, x in arrays.items():
        if x.dtype not in DTYPES:
            return (
                f"{name} has dtype {x.dtype}, and it computes in float32 "
                "(float16, bfloat16 and float32 are served)"
            )
        if x.size == 0:
            return f"{name} has shape {x.shape}, so there is nothing to compute"
    return None


def vary_alike(*trees: Any) -> tuple:
    """Marks all arrays as varying over the union of the mesh axes over which any of them varies.

    Inside `jax.shard_map` a kernel needs operands of one type. The transpose of this step is the
    sum over devices that the gradient of shared frequencies needs.
    """

    def varying(x: Array) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(trees)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - varying(x)), to="varying"), trees)


def without_symbolic_zeros(gradients: Any) -> Any:
    """Replaces the symbolic zeros of a custom derivative rule with arrays of zeros."""

    def make(g: Any) -> Any:
        return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g

    return jax.tree.map(make, gradients, is_leaf=lambda g: isinstance(g, SymbolicZero))
