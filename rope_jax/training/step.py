"""The training step: one jitted, donating function over a plain dict of arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from rope_jax.system.sharding import on_every_device, replicate, state_shardings
from rope_jax.tasks import seeds
from rope_jax.training import optim
from rope_jax.training.setup import Setup, State

Metrics = dict[str, Array]


def make_step(setup: Setup) -> Callable[[State, dict[str, Any]], tuple[State, Metrics]]:
    """Returns the jitted step (state, batch) -> (state, metrics); it donates the old state.

    Metrics are loss, accuracy, grad_norm and learning_rate: numbers, or [K] for K seeds.
    """
    config, mesh = setup.config, setup.mesh

    def step(state: State, batch: dict[str, Any]) -> tuple[State, Metrics]:
        state_axes, batch_axes = seeds.state_axes(state), seeds.batch_axes(batch)
        step_of_seed = seeds.vmap(
            lambda *arguments: _step(setup, *arguments),
            config.seeds,
            in_axes=(0, 0, state_axes, batch_axes),
            out_axes=(state_axes, 0),
        )
        all_seeds = jnp.asarray(seeds.seed_array(config.all_seeds))
        new, metrics = step_of_seed(setup.rest, all_seeds, state, batch)
        shardings = (state_shardings(new, mesh), replicate(mesh))
        return jax.lax.with_sharding_constraint((new, metrics), shardings)

    return jax.jit(step, donate_argnums=0)


def _step(setup: Setup, rest: Any, seed: Array, state: State, batch: Any) -> tuple[State, Metrics]:
    config, mesh, task = setup.config, setup.mesh, setup.task

    def loss(params: Any, stats: Any, batch: Any, key: Array) -> tuple[Array, tuple[Array, Any]]:
        model_loss = functools.partial(task.loss, batch=batch, config=config, key=key)
        (value, accuracy), stats = setup.apply(model_loss, params, stats, rest)
        return value, (accuracy, stats)

    # Code that needs separate draws folds the CRC of its name into this key: small numbers would
    # collide with the results of `split` for the parts of a batch and the blocks of a model.
    key = jax.random.fold_in(jax.random.key(seed), state["step"])
    batch = task.prepare_batch(batch, config, seed=seed, key=key)
    gradient = jax.value_and_grad(loss, has_aux=True)
    if config.accumulate > 1:
        gradient = _accumulate(gradient, config.accumulate)
    (value, (accuracy, stats)), grads = gradient(
        state["params"], state.get("stats", {}), batch, key
    )
    grads = jax.lax.with_sharding_constraint(grads, state_shardings(grads, mesh))
    with jax.named_scope("optimizer"):
        updates, opt = setup.optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"step": state["step"] + 1, "params": params, "opt": opt}
        if stats:
            new["stats"] = stats
        if config.ema_decay is not None:
            new["ema"] = optax.incremental_update(params, state["ema"], 1 - config.ema_decay)
    metrics = {
        "loss": value,
        "accuracy": accuracy,
        "grad_norm": optim.global_norm(grads, on_every_device(mesh)),
        "learning_rate": jnp.asarray(setup.schedule(state["step"]), jnp.float32),
    }
    if config.non_finite == "skip":
        finite = jnp.isfinite(value) & jnp.isfinite(metrics["grad_norm"])
        kept = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        new = kept | {"step": new["step"]}
    return new, metrics


def _accumulate(gradient: Callable, count: int) -> Callable:
    """The gradient as a mean over `count` parts of the batch, computed one after the other.

    Batch statistics are computed for each part in turn.
    """

    def split_parts(x: Array) -> Array:
        # Part i has every count-th example from i on, so that each device holds its examples of
        # every part.
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    def mean_gradient(params: Any, stats: Any, batch: Any, key: Array) -> Any:
        def add(carry: Any, part: Any) -> tuple[Any, None]:
            stats, totals = carry
            (loss, (accuracy, stats)), grads = gradient(params, stats, *part)
            return (stats, jax.tree.map(jnp.add, totals, (loss, accuracy, grads))), None

        parts = (jax.tree.map(split_parts, batch), jax.random.split(key, count))
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), jnp.float32(0), params))
        (stats, totals), _ = jax.lax.scan(add, (stats, zeros), parts)
        loss, accuracy, grads = jax.tree.map(lambda total: total / count, totals)
        return (loss, (accuracy, stats)), grads

    return mean_gradient
