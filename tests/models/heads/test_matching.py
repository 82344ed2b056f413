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


def test_matching_costs_as_much_as_scipys_for_any_padding():
    costs, real = problems()
    matches = np.asarray(matched(costs, real))
    for cost, rows, queries in zip(costs, real, matches, strict=True):
        assert len(set(queries.tolist())) == TARGETS  # padding takes none of the others' queries
        expected = cost[rows][scipy.optimize.linear_sum_assignment(cost[rows])]
        np.testing.assert_allclose(cost[rows, queries[rows]].sum(), expected.sum(), atol=1e-5)
        if cost[0, 0] % 1:  # the least sum is that of one matching alone
            np.testing.assert_array_equal(
                queries[rows], scipy.optimize.linear_sum_assignment(cost[rows])[1]
            )


def test_costs_of_padding_are_ignored():
    costs, real = problems()
    other = np.where(real[..., None], costs, np.nan).astype(np.float32)
    np.testing.assert_array_equal(matched(costs, real), matched(other, real))


def test_non_finite_costs_still_end_the_search():
    costs, real = problems()
    costs[:, ::2] = np.nan
    costs[:, 1::2, ::3] = np.inf
    matches = np.asarray(matched(costs, np.ones_like(real)))
    assert (np.sort(matches)[:, 1:] > np.sort(matches)[:, :-1]).all()


def test_more_targets_than_queries_are_refused():
    with pytest.raises(ValueError, match="5 targets cannot be matched with 4 queries"):
        match(jnp.zeros((5, 4)), jnp.ones(5, bool))
