"""Several seeds at once: models that differ only in their seed, trained by one vmapped step.

Model k of a run with `seeds=K` equals a run with the single seed `seed + k`: initial weights, data
order, augmentation, mixing and drop path. Arrays of all models have a leading axis [K]; in batches,
whose first axis is sharded over the devices, it is the second. The models share only `step` of the
training state. Every device holds all models and its part of each model's batch.

With one seed nothing is stacked: there is no axis [K], and `vmap` returns the function itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

Tree = Any


def seed_array(seeds: range) -> UInt32[np.ndarray, "*K"]:
    """The seeds of a run as an array [K], a scalar for one."""
    array = np.array(seeds, np.uint32)
    return array.reshape(()) if len(seeds) == 1 else array


def row_labels(seeds: range) -> list[dict[str, int]]:
    """Labels for each seed's rows in results and events; one empty label for a single seed."""
    return [{}] if len(seeds) == 1 else [{"seed": seed} for seed in seeds]


def stack(trees: Sequence[Tree]) -> Tree:
    """Stacks trees of arrays along a leading axis [K]; a single tree is returned unchanged."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def take(tree: Tree, count: int, number: int = 0) -> Tree:
    """The tree of one of `count` seeds; scalars (`step`) go to every seed."""
    if count == 1:
        return tree
    return jax.tree.map(lambda leaf: leaf[number] if leaf.ndim else leaf, tree)


def split(tree: Tree, count: int) -> list[Tree]:
    """The inverse of `stack`: the trees of all seeds."""
    return [take(tree, count, number) for number in range(count)]


def vmap(function: Callable, count: int, in_axes: Any, out_axes: Any = 0) -> Callable:
    """`jax.vmap` over `count` seeds; with one seed the function itself."""
    return function if count == 1 else jax.vmap(function, in_axes, out_axes)


def state_axes(state: dict[str, Tree]) -> dict[str, int | None]:
    """The seed axis of each entry of a training state."""
    return {name: None if name == "step" else 0 for name in state}


def batch_axes(batch: dict[str, Tree]) -> dict[str, int | None]:
    """The seed axis of each entry of a batch; the data set on the device (`set`) is shared."""
    return {name: None if name == "set" else 1 for name in batch}


class InterleavedBatches(Iterator[dict[str, np.ndarray]]):
    """Batches of several streams, one per seed, stacked along a second axis [b, K, ...]."""

    skipped: frozenset[int] = frozenset()  # streams of device-resident sets skip no image

    def __init__(self, streams: Sequence[Iterator[dict[str, np.ndarray]]]):
        self._streams = streams

    def __next__(self) -> dict[str, np.ndarray]:
        batches = [next(stream) for stream in self._streams]
        return {name: np.stack([batch[name] for batch in batches], 1) for name in batches[0]}

    def close(self) -> None:
        """Nothing to close; iterators of batches have this method."""


def summary(metrics: dict[str, np.ndarray], seeds: range) -> dict[str, float]:
    """The metrics of a step as numbers for `metrics.jsonl`.

    For several seeds: means, `loss_std`, and `loss_seed<seed>` and `accuracy_seed<seed>`.
    """
    numbers = {name: float(np.mean(values)) for name, values in metrics.items()}
    if len(seeds) > 1:
        numbers["loss_std"] = float(metrics["loss"].std(ddof=1))
        for name in ("loss", "accuracy"):
            for seed, value in zip(seeds, metrics[name], strict=True):
                numbers[f"{name}_seed{seed}"] = float(value)
    return numbers
