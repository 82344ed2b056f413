"""The mesh over all devices of all processes, and the layout of batches and parameters on it.

The mesh has two axes, and batches are sharded over both. Parameters and arrays of their shapes
(optimizer state, averages) are sharded over "fsdp" and replicated along "data": a step gathers
parameters where it needs them and reduces gradients to the devices that hold them (ZeRO,
arXiv 1910.02054; FSDP, arXiv 2304.11277). With fsdp=1, the default, parameters are replicated.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from rope_jax.system.cores import keep_freed_memory

DATA, FSDP = "data", "fsdp"
AnyMesh = Mesh | AbstractMesh
# Elements. Smaller arrays (biases, norms, tables) are replicated: gathering them would cost more.
SMALLEST = 2**14


def start_devices() -> None:
    """Starts jax's devices, which other functions would do at their first use.

    With JAX_PLATFORMS=cpu or without jax's plug-ins for GPUs, the process keeps the memory that it
    frees (`cores.keep_freed_memory`).

    Raises:
        ValueError: there are none of the kind that JAX_PLATFORMS names.
    """
    if jax.config.jax_platforms == "cpu" or importlib.util.find_spec("jax_plugins") is None:
        keep_freed_memory()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter without a word, of a known kind
        reason = str(error).strip().partition("\n")[0] or jax.config.jax_platforms
        raise ValueError(
            f"jax has no device ({reason}): install its support for this device, or set "
            "JAX_PLATFORMS=cpu"
        ) from error


def make_mesh(fsdp: int = 1, *, devices: Any = None) -> Mesh:
    """The mesh ("data", "fsdp") of all devices, with those of one process adjacent.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1}

    Args:
        fsdp: number of devices over which parameters are sharded, preferably in one machine.
        devices: the devices to use; None for all.

    Raises:
        ValueError: `fsdp` does not divide the number of devices.
    """
    devices = np.asarray(jax.devices() if devices is None else devices)
    if devices.size % fsdp:
        fitting = [str(n) for n in range(1, devices.size + 1) if devices.size % n == 0]
        more = f", or JAX_NUM_CPU_DEVICES={fsdp}" if devices.flat[0].platform == "cpu" else ""
        raise ValueError(
            f"parameters cannot be divided over {fsdp} of {devices.size} devices; use one of "
            f"{', '.join(fitting)}{more}"
        )
    return Mesh(devices.reshape(-1, fsdp), (DATA, FSDP), axis_types=(AxisType.Auto,) * 2)


def replicate(mesh: AnyMesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, P())


def split_batch(mesh: AnyMesh) -> NamedSharding:
    """The first axis divided over all devices."""
    return NamedSharding(mesh, P(_batch_axes(mesh)))


def split_parameter(shape: tuple[int, ...], mesh: AnyMesh) -> NamedSharding:
    """The sharding of an array of the training state.

    The longest axis divisible by "fsdp" (the last of equals) is sharded, if the array is large
    enough.
    """
    parts = dict(mesh.shape).get(FSDP, 1)
    axes = [(length, axis) for axis, length in enumerate(shape) if length % parts == 0]
    if parts == 1 or not axes or np.prod(shape) < SMALLEST:
        return replicate(mesh)
    spec = [None] * len(shape)
    spec[max(axes)[1]] = FSDP
    return NamedSharding(mesh, P(*spec))


def on_every_device(mesh: AnyMesh) -> Callable[[tuple[int, ...]], bool]:
    """Returns a check, by shape, whether every device holds all of an array of the state."""
    return lambda shape: split_parameter(shape, mesh).is_fully_replicated


def state_shardings(state: Any, mesh: AnyMesh) -> Any:
    """The shardings of a training state, or of its shapes.

    >>> mesh = make_mesh(devices=jax.devices()[:1])
    >>> state_shardings({"kernel": np.zeros((8, 4))}, mesh)["kernel"].is_fully_replicated
    True

    Args:
        state: a tree of arrays, or of their shapes (`jax.ShapeDtypeStruct`).
        mesh: see `make_mesh`.
    """
    return jax.tree.map(lambda x: split_parameter(x.shape, mesh), state)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s of a tree's arrays, with the given shardings.

    Args:
        tree: arrays, or their shapes.
        shardings: one for all arrays, or a tree of them.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def process_shard() -> tuple[int, int]:
    """(k, n): this process works on part k of n equal parts of each batch."""
    return jax.process_index(), jax.process_count()


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Moves this process's part of a batch to the mesh; returns the global arrays.

    >>> mesh = make_mesh(devices=jax.devices()[:1])
    >>> put_batch({"image": np.zeros((4, 8, 8, 3), np.float32)}, mesh)["image"].shape
    (4, 8, 8, 3)

    Args:
        batch: arrays whose first axis is the example, [B / processes, ...].
        mesh: see `make_mesh`.
    """
    if jax.process_count() == 1:
        return jax.device_put(batch, split_batch(mesh))
    return {
        name: jax.make_array_from_process_local_data(split_batch(mesh), array)
        for name, array in batch.items()
    }


class MaximumOverProcesses:
    """Maximum of a number over all processes, without waiting: a call returns the previous one's.

    All processes must make the same calls; the first returns 0. With a single process a call
    returns its own number.
    """

    def __init__(self) -> None:
        self._pending: Array | None = None

    def __call__(self, number: int) -> int:
        if jax.process_count() == 1:
            return number
        mesh = make_mesh()
        local = np.full(jax.local_device_count(), number, np.int32)
        numbers = jax.make_array_from_process_local_data(split_batch(mesh), local)
        previous, self._pending = self._pending, _maximum(numbers, replicate(mesh))
        return 0 if previous is None else int(previous)


@functools.partial(jax.jit, static_argnums=1)
def _maximum(numbers: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(numbers.max(), sharding)


def over_batch(f: Callable[[Any, Any], Any], batched: Any, shared: Any) -> Any:
    """f(batched, shared), computed on each device for its own examples.

    XLA cannot partition a GPU kernel and would gather its operands; inside `shard_map` it need
    not. f is called directly outside `use_mesh`, if the mesh does not divide the batch, and inside
    another `jax.shard_map`.

    Args:
        f: a function that treats examples independently; the batch is the first axis of its result.
        batched: a tree of arrays whose first axis is the batch.
        shared: a tree of arrays shared by all examples; their gradients are summed over devices
            once.
    """
    mesh = _mesh_for(jax.tree.leaves(batched))
    if mesh is None:
        return f(batched, shared)
    return jax.shard_map(
        f, in_specs=(split_batch(mesh).spec, P()), out_specs=split_batch(mesh).spec
    )(batched, shared)


def explicit_mesh(x: Array) -> AbstractMesh | None:
    """The mesh in force, or that of an array, if it has Explicit axes; otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(x).sharding.mesh if mesh.empty else mesh
    return mesh if mesh.explicit_axes else None


def by_example(x: Array) -> Array:
    """Constrains an array [B, ...] and its gradient to be sharded by example.

    On the activations around a layer this makes XLA gather sharded parameters, not activations.
    """
    mesh = _mesh_for([x])
    return x if mesh is None else jax.lax.with_sharding_constraint(x, split_batch(mesh))


def gather(x: Array) -> Array:
    """Constrains an array to be on every device, for computations that all of them repeat.

    Otherwise a loop whose number of steps differs by example would wait for all devices each step.
    """
    mesh = _mesh_for([])
    return x if mesh is None else jax.lax.with_sharding_constraint(x, replicate(mesh))


def _mesh_for(batched: list[Array]) -> AbstractMesh | None:
    """The mesh of `use_mesh`, if it divides these arrays; otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    usable = (
        mesh.size > 1
        and mesh.axis_names == _batch_axes(mesh)
        and all(kind == AxisType.Auto for kind in mesh.axis_types)
    )
    return mesh if usable and all(x.shape[0] % mesh.size == 0 for x in batched) else None


def use_mesh(mesh: AnyMesh) -> Any:
    """Context manager in which models are traced for a mesh (see `over_batch`).

    >>> with use_mesh(make_mesh(devices=jax.devices()[:1])):
    ...     print(jax.sharding.get_abstract_mesh().axis_names)
    ('data', 'fsdp')
    """
    return jax.sharding.use_abstract_mesh(
        mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    )


def _batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis in (DATA, FSDP))
