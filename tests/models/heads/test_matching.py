import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from rope_jax.models.heads.matching import match

PROBLEMS, TARGETS, QUERIES = 1000, 9, 14
matched = jax.jit(jax.vmap(match))


def problems():
    """Costs with few values (ties) and with many, of either sign, and targets of any number."""
    rng = np.random.default_rng(0)
    shape = (PROBLEMS, TARGETS, QUERIES)
    costs = rng.normal(size=shape) * 3
    costs[::2] = rng.integers(-2, 3, size=shape)[::2]
    real = rng.random((PROBLEMS, TARGETS)) < rng.random((PROBLEMS, 1))
    real[:3], real[3:6] = False, True
    return costs.astype(np.float32), real


def test_the_cost_is_that_of_scipy_for_any_padding():
    costs, real = problems()
    found = np.asarray(matched(costs, real))
    for cost, rows, queries in zip(costs, real, found, strict=True):
        assert len(set(queries.tolist())) == TARGETS  # padding takes none of the others' queries
        wanted = cost[rows][scipy.optimize.linear_sum_assignment(cost[rows])]
        np.testing.assert_allclose(cost[rows, queries[rows]].sum(), wanted.sum(), atol=1e-5)
        if cost[0, 0] % 1:  # the least sum is that of one matching alone
            np.testing.assert_array_equal(
                queries[rows], scipy.optimize.linear_sum_assignment(cost[rows])[1]
            )


def test_costs_of_padding_do_not_count():
    costs, real = problems()
    other = np.where(real[..., None], costs, np.nan).astype(np.float32)
    np.testing.assert_array_equal(matched(costs, real), matched(other, real))


def test_costs_that_are_not_finite_end_the_search_all_the_same():
    costs, real = problems()
    costs[:, ::2] = np.nan
    costs[:, 1::2, ::3] = np.inf
    found = np.asarray(matched(costs, np.ones_like(real)))
    assert (np.sort(found)[:, 1:] > np.sort(found)[:, :-1]).all()


def test_more_targets_than_queries_are_refused():
    with pytest.raises(ValueError, match="5 targets cannot be matched with 4 queries"):
        match(jnp.zeros((5, 4)), jnp.ones(5, bool))
