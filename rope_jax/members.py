"""Several seeds at once: models that differ in their seed alone, trained together by mapping the step of one over all of them.

Member k of a run with `seeds=K` is the run with the seed `seed + k` alone: its initial weights, order of the data, augmentation, mixing and
drop path. Arrays of all members have a first axis [K]; in batches, whose first axis is divided over the devices, the members are second.
Of the state's entries `step` alone is one number for all. Every device holds all members, and works on its share of the batch of each.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.config import Config

Tree = Any


def seeds(config: Config) -> range:
    """The seeds of a run, one of each member."""
    return range(config.seed, config.seed + config.seeds)


def names(config: Config) -> list[dict[str, int]]:
    """What tells numbers of one member from those of another where they are written: its seed. Nothing where there is one."""
    return [{}] if config.seeds == 1 else [{"seed": seed} for seed in seeds(config)]


def config_of(config: Config, seed: int | None = None) -> Config:
    """The config that gives a member alone.

    Args:
        config: of the run.
        seed: of the member; None for the first.

    Raises:
        ValueError: no member has this seed.
    """
    own = seeds(config)
    if seed is not None and seed not in own:
        there = f"the seed {own[0]} alone" if len(own) == 1 else f"the seeds {own[0]} to {own[-1]}"
        raise ValueError(f"seed={seed}, but the run has {there}: use one of them, or None for the first")
    return dataclasses.replace(config, seed=own[0] if seed is None else seed, seeds=1)


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree of arrays [K, ...] out of K alike."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def take(tree: Tree, member: int) -> Tree:
    """What a tree holds of one member; numbers that are of all of them (`step`) stay."""
    return jax.tree.map(lambda leaf: leaf[member] if leaf.ndim else leaf, tree)


def join(models: Sequence[nnx.Module]) -> nnx.Module:
    """One module whose variables are those of all models, stacked: to be split, not to be called."""
    graph, _ = nnx.split(models[0])
    return nnx.merge(graph, stack([nnx.state(model) for model in models]))


def part(model: nnx.Module, count: int) -> list[nnx.Module]:
    """The models of which `join` made one."""
    graph, state = nnx.split(model)
    return [nnx.merge(graph, take(state, member)) for member in range(count)]


def together(
    step: Callable[..., tuple[Tree, Tree]], rest: Tree, own: np.ndarray, state: dict[str, Tree], batch: dict[str, Tree]
) -> tuple[dict[str, Tree], Tree]:
    """One step of all members.

    Args:
        step: that of one: (rest, seed, state, batch) -> (state, metrics).
        rest: of the models, what is no parameter, stacked.
        own: their seeds, uint32 [K].
        state: stacked, but for `step`.
        batch: arrays [b, K, ...], and `set`, which is the same for all.

    Returns:
        The next state, and the metrics, each [K].
    """
    of_state = {name: None if name == "step" else 0 for name in state}
    of_batch = {name: None if name == "set" else 1 for name in batch}
    return jax.vmap(step, in_axes=(0, 0, of_state, of_batch), out_axes=(of_state, 0))(rest, own, state, batch)


class Streams(Iterator[dict[str, np.ndarray]]):
    """The batches of all members, with the members as their second axis."""

    skipped: frozenset[int] = frozenset()  # as of `rope_jax.data.on_device.Places`

    def __init__(self, streams: Sequence[Iterator[dict[str, np.ndarray]]]):
        self._streams = streams

    def __next__(self) -> dict[str, np.ndarray]:
        batches = [next(stream) for stream in self._streams]
        return {name: np.stack([batch[name] for batch in batches], axis=1) for name in batches[0]}

    def close(self) -> None:
        """There is nothing to end."""


def summary(values: dict[str, np.ndarray], config: Config) -> dict[str, float]:
    """The metrics of a step [K] as numbers: their means, the standard deviation of losses, and loss and accuracy of each seed."""
    told = {name: float(each.mean()) for name, each in values.items()} | {"loss_std": float(values["loss"].std(ddof=1))}
    for name in ("loss", "accuracy"):
        told |= {f"{name}_seed{seed}": float(value) for seed, value in zip(seeds(config), values[name], strict=True)}
    return told


def metrics_of(line: dict[str, Any], seed: int) -> dict[str, Any]:
    """A line of `metrics.jsonl` as the member would have written it alone, as far as the line tells."""
    own = {name: line[f"{name}_seed{seed}"] for name in ("loss", "accuracy") if f"{name}_seed{seed}" in line}
    return {name: value for name, value in line.items() if "_seed" not in name and name != "loss_std"} | own
