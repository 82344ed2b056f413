"""One mesh over all devices of all processes; where batches, parameters and heads lie on it is said here and nowhere else.

The mesh has two axes. A batch is divided over both. Parameters, with whatever has their shapes (optimiser state, averages), are divided
over "fsdp" and copied along "data": a step gathers them where it needs them and adds up gradients where they are kept (ZeRO, arXiv
1910.02054; FSDP, arXiv 2304.11277). With fsdp=1, the default, every device holds all of them.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

DATA, FSDP = "data", "fsdp"
AnyMesh = Mesh | AbstractMesh
SMALLEST = 2**14  # elements; arrays below (biases, norms, tables of offsets) are on every device: gathering them costs more than they do


def make_mesh(fsdp: int = 1, *, devices: Any = None) -> Mesh:
    """A mesh ("data", "fsdp") of all devices, those of one process beside each other.

    Args:
        fsdp: over how many devices parameters are divided; they should be of one machine.
        devices: those to use, None for all.

    Raises:
        ValueError: `fsdp` does not divide the number of devices.
    """
    devices = np.asarray(jax.devices() if devices is None else devices)
    if devices.size % fsdp:
        fitting = [str(n) for n in range(1, devices.size + 1) if devices.size % n == 0]
        raise ValueError(f"parameters cannot be divided over {fsdp} of {devices.size} devices; use one of {', '.join(fitting)}")
    return Mesh(devices.reshape(-1, fsdp), (DATA, FSDP), axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Every device holds the whole array: metrics, small parameters."""
    return NamedSharding(mesh, P())


def split_batch(mesh: AnyMesh) -> NamedSharding:
    """The first axis is divided over the devices: batches."""
    return NamedSharding(mesh, P(_batch_axes(mesh)))


def split_parameter(shape: tuple[int, ...], mesh: AnyMesh) -> NamedSharding:
    """Where an array of the training state lies: its longest axis that "fsdp" divides (the last of equals) is, where it is large enough."""
    parts = dict(mesh.shape).get(FSDP, 1)
    axes = [(length, axis) for axis, length in enumerate(shape) if length % parts == 0]
    if parts == 1 or not axes or np.prod(shape) < SMALLEST:
        return replicated(mesh)
    spec = [None] * len(shape)
    spec[max(axes)[1]] = FSDP
    return NamedSharding(mesh, P(*spec))


def state_shardings(state: Any, mesh: AnyMesh) -> Any:
    """The tree of shardings of a training state, or of its shapes."""
    return jax.tree.map(lambda x: split_parameter(x.shape, mesh), state)


def like(tree: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a tree, to be laid out by one sharding or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def share() -> tuple[int, int]:
    """(k, of): this process works on the k-th of `of` equal parts of every batch."""
    return jax.process_index(), jax.process_count()


def share_of(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This process's part of a batch that every process has as a whole."""
    part, parts = share()
    rows = lambda x: slice(part * len(x) // parts, (part + 1) * len(x) // parts)
    return {name: array[rows(array)] for name, array in batch.items()}


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Moves this process's part of a batch onto the mesh; returns arrays of the whole batch, of which each device holds its rows."""
    if jax.process_count() == 1:
        return jax.device_put(batch, split_batch(mesh))
    return {name: jax.make_array_from_process_local_data(split_batch(mesh), array) for name, array in batch.items()}


def join(heartbeat: int) -> None:
    """Makes this process one of a run of several (`jax.distributed`); before anything else is asked of jax.

    Who the others are SLURM, Kubernetes and Open MPI tell. Elsewhere the environment does: JAX_COORDINATOR_ADDRESS (host:port of the first
    process), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        heartbeat: seconds without a sign of life after which a process counts as dead, and the others end.

    Raises:
        ValueError: nothing tells who the others are.
    """
    names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ}
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat, **given)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"this is no job of SLURM, Kubernetes or Open MPI ({error}): set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID, or leave --distributed out"
        ) from error


def of_first(value: bool) -> bool:
    """What the first process has."""
    return value if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


class Loudest:
    """Agreement of all processes on the largest of their numbers, without waiting: an answer is that of the call before.

    All processes must make the same calls. A process alone gets its own number back at once.
    """

    def __init__(self) -> None:
        self._asked: Array | None = None

    def __call__(self, number: int) -> int:
        if jax.process_count() == 1:
            return number
        mesh = make_mesh()
        own = np.full(jax.local_device_count(), number, np.int32)
        asked = _largest(jax.make_array_from_process_local_data(split_batch(mesh), own), replicated(mesh))
        before, self._asked = self._asked, asked
        return 0 if before is None else int(before)


@functools.partial(jax.jit, static_argnums=1)
def _largest(numbers: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(numbers.max(), sharding)


def over_batch(f: Callable[[Any, Any], Any], batched: Any, shared: Any) -> Any:
    """f(batched, shared), computed on each device for its own examples, where a mesh of this module is in force (see `in_force`).

    XLA cannot divide a GPU kernel over devices, and would gather its operands; in here it need not. Without a mesh f is simply called. So
    it is where the mesh does not divide the batch, has axes of other names, or is taken by a `jax.shard_map` around this.

    Args:
        f: independent from example to example, whatever the devices.
        batched: a tree of arrays whose first axis is the batch, as it is in what f returns.
        shared: a tree of arrays that are the same for all examples; their gradients are added up over devices, once.
    """
    mesh = _mesh_for(jax.tree.leaves(batched))
    if mesh is None:
        return f(batched, shared)
    return jax.shard_map(f, in_specs=(split_batch(mesh).spec, P()), out_specs=split_batch(mesh).spec)(batched, shared)


def by_example(x: Array) -> Array:
    """The same array [B, ...], of which each device keeps its own examples, and of its gradient, where a mesh is in force.

    Said of the activations around a layer it leaves XLA one way to meet parameters that are divided: to gather them.
    """
    mesh = _mesh_for([x])
    return x if mesh is None else jax.lax.with_sharding_constraint(x, split_batch(mesh))


def _mesh_for(batched: list[Array]) -> AbstractMesh | None:
    """The mesh in force, if it is one of this module with several devices, and free to divide these arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = mesh.size > 1 and mesh.axis_names == _batch_axes(mesh) and all(kind == AxisType.Auto for kind in mesh.axis_types)
    return mesh if ours and all(x.shape[0] % mesh.size == 0 for x in batched) else None


def in_force(mesh: AnyMesh) -> Any:
    """A context in which what is traced is for this mesh: kernels run on every device's own examples."""
    return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


def _batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis in (DATA, FSDP))
