"""One mesh over all devices; where batches and parameters lie on it is said here and nowhere else."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh() -> Mesh:
    """A mesh of all devices with one axis, "data"."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array: parameters, optimiser state, metrics."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """The first axis is divided over the devices: batches."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Moves a batch of host arrays onto the mesh."""
    return jax.device_put(batch, split_batch(mesh))


def like(tree: Any, sharding: NamedSharding) -> Any:
    """The shapes and dtypes of a tree, to be laid out by `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
