"""Optimal one-to-one matching of targets with predictions, inside jit.

Source: Carion et al., arXiv 2005.12872, section 3.1.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from rope_jax.system.sharding import gather


def match(costs: Float[Array, "M Q"], real: Bool[Array, " M"]) -> Int[Array, " M"]:
    """Assigns a different query to every target so that the sum of costs is least.

    A row of zeros costs the same with every query: padding changes neither the sum of the others
    nor their best assignment. Use `jax.vmap` for a batch.

    >>> costs = jnp.array([[3.0, 1.0, 2.0], [4.0, 1.0, 9.0], [0.0, 0.0, 0.0]])
    >>> match(costs, jnp.array([True, True, False]))[:2].tolist()
    [2, 1]

    Args:
        costs: of each target with each query. Values that are not finite count as 0, so that the
            search ends; the loss of such predictions is not finite either.
        real: False for rows that are padding, whose costs do not count.

    Returns:
        int32 indices of queries; those of padding are queries that no other target has.

    Raises:
        ValueError: there are more targets than queries.
    """
    targets, queries = costs.shape
    if targets > queries:
        raise ValueError(
            f"{targets} targets cannot be matched with {queries} queries: use at least as many "
            "queries, or fewer targets"
        )
    costs = jnp.where(real[:, None] & jnp.isfinite(costs), costs, 0)
    rows, columns = optax.assignment.hungarian_algorithm(costs)
    return jnp.zeros(targets, jnp.int32).at[rows].set(columns.astype(jnp.int32))


def match_layers(costs: Float[Array, "R B M Q"], real: Bool[Array, "B M"]) -> Int[Array, "R B M"]:
    """Calls `match` for each of R layers and each image.

    All problems are solved at once, because the search takes many short sequential steps; and on
    every device, because divided devices would wait for each other at each step.
    """
    match_batch = jax.vmap(jax.vmap(match), (0, None))
    return gather(match_batch(gather(costs), gather(real)))
