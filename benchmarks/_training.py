"""A training step without input pipeline and metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def training_step(
    graph: nnx.GraphDef, rest: Any, optimizer: optax.GradientTransformation
) -> Callable:
    """Returns a function step(state, images) -> (state, loss), with class 0 as every label.

    Args:
        graph: the model's graph definition.
        rest: the model's variables that are not trained.
        optimizer: optimizer of the parameters; the state is {"params", "opt"}.
    """

    def step(state: dict[str, Any], images: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, rest)(images, train=True, key=jax.random.key(1))
            return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step
