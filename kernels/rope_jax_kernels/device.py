"""The target device of a traced call, and the requirements of GPU kernels on it and on operands.

The target is the device of the abstract mesh if there is one (`jax.sharding.use_abstract_mesh`, for
compiling ahead of time on a machine without a GPU), otherwise jax's default device. It is
determined when a call is traced, as is the environment variable `ROPE_JAX_INTERPRET`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

INTERPRET = "ROPE_JAX_INTERPRET"
GENERATIONS = {"Ampere": 80, "Hopper": 90, "Blackwell": 100}  # lowest compute capability
MULTIPROCESSORS = 132  # of an H100 or H200
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# Word of a device's kind -> compute capability (times 10) and memory bandwidth in GB/s, from
# NVIDIA's data sheets; of several variants, the slowest.
KINDS = {
    "V100": (70, 900),
    "T4": (75, 320),
    "A100": (80, 1555),
    "A30": (80, 933),
    "A10": (86, 600),
    "A40": (86, 696),
    "A6000": (86, 768),
    "3090": (86, 936),
    "L4": (89, 300),
    "L40": (89, 864),
    "L40S": (89, 864),
    "4090": (89, 1008),
    "H100": (90, 2000),
    "H200": (90, 4800),
    "GH200": (90, 4000),
    "B200": (100, 7700),
    "GB200": (100, 7700),
    "B300": (103, 7700),
    "GB300": (103, 7700),
    "5080": (120, 960),
    "5090": (120, 1792),
}
BANDWIDTH = 1000  # GB/s, of other GPUs


def target() -> Any:
    """The device for which a call is traced."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device or jax.config.jax_default_device or jax.local_devices()[0]


def is_gpu() -> bool:
    """True if the target is a GPU."""
    device = target()
    return getattr(device, "platform", device) in ("gpu", "cuda", "rocm")


def capability() -> int:
    """Compute capability of the target, times 10: 90 for Hopper.

    It is 0 without an NVIDIA GPU.

    Raises:
        ValueError: an abstract GPU that `KINDS` does not list.
    """
    if not is_gpu():
        return 0
    version = getattr(target(), "compute_capability", "")  # abstract devices have none
    if str(version).replace(".", "").isdigit():  # AMD's is the name of an architecture
        major, _, minor = str(version).partition(".")
        return 10 * int(major) + int(minor or 0)
    listed, _ = data_sheet(kind())
    if not (version or listed or kind().startswith(("gfx", "AMD"))):
        raise ValueError(
            f"the compute capability of {kind()!r} is not known without the device: compile for "
            f"one of {', '.join(KINDS)}, add it to rope_jax_kernels.device.KINDS, or use "
            "implementation='xla'"
        )
    return listed


def bandwidth() -> float:
    """Bytes per second between the target, a GPU, and its memory, from its data sheet."""
    return 1e9 * data_sheet(kind())[1]


def data_sheet(kind: str) -> tuple[int, int]:
    """The entry of a kind of GPU in `KINDS`, or 0 and `BANDWIDTH`."""
    words = kind.replace("-", " ").split()
    return next((KINDS[word] for word in words if word in KINDS), (0, BANDWIDTH))


def kind() -> str:
    """The kind of the target as jax names it: "NVIDIA H200", "cpu"."""
    device = target()
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device.device_kind


def say(message: str) -> None:
    """Prints one line to standard error."""
    print(f"rope_jax_kernels: {message}", file=sys.stderr, flush=True)


def is_interpreted() -> bool:
    """True if kernels run in Pallas' interpret mode: if requested, and the target is not a GPU."""
    return os.environ.get(INTERPRET) == "1" and not is_gpu()


def may_be_partitioned() -> bool:
    """True if XLA may split the traced call over several devices.

    This is the case with several devices outside `jax.shard_map`. XLA cannot partition a kernel and
    would gather its operands first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and any(kind != jax.sharding.AxisType.Manual for kind in mesh.axis_types)


def refusal(generation: str = "Ampere") -> str | None:
    """Checks that the target runs kernels that need this generation of GPU or a newer one.

    Returns:
        The reason if it cannot, else None.
    """
    if not is_gpu():
        if is_interpreted():
            return None
        return f"it needs a GPU; set {INTERPRET}=1 to interpret it on the CPU"
    if capability() == 0:
        kind = getattr(target(), "device_kind", target())
        return f"it needs an NVIDIA GPU of a known compute capability, and this is {kind}"
    if capability() < GENERATIONS[generation]:
        return f"it needs an NVIDIA GPU of the {generation} generation or newer"
    return None


def refusal_of_arrays(arrays: Mapping[str, Array], dtypes: Sequence = DTYPES) -> str | None:
    """The reason why a kernel for these dtypes cannot take these named arrays, or None."""
    for name, x in arrays.items():
        if x.dtype not in dtypes:
            *others, last = (jnp.dtype(dtype).name for dtype in dtypes)
            return f"{name} has dtype {x.dtype}; {', '.join(others)} and {last} are served"
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


def shapes_like(x: Array, *shapes: tuple[tuple[int, ...], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Outputs of a kernel, from (shape, dtype), that vary over the same mesh axes as x."""
    varying = jax.typeof(x).manual_axis_type
    return tuple(jax.ShapeDtypeStruct(*shape, manual_axis_type=varying) for shape in shapes)


def without_symbolic_zeros(gradients: Any) -> Any:
    """Replaces the symbolic zeros of a custom derivative rule with arrays of zeros."""

    def make(g: Any) -> Any:
        return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g

    return jax.tree.map(make, gradients, is_leaf=lambda g: isinstance(g, SymbolicZero))
