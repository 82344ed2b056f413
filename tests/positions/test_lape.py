"""LaPE and its baselines, written out layer by layer in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.positions.schemes import (
    CHANNELS,
    DEPTH,
    compiled_terms,
    normal,
    params,
    scheme,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # divisions by small deviations add up
GRID = (4, 3)


@pytest.mark.parametrize("embed_prefix", [0, 1])
@pytest.mark.parametrize(
    "text", ["lape(ape)", "lape(sincos1d)", "lape(sincos2d(order=lape),join=shared_norm)"]
)
def test_lape_is_a_chain_of_layer_norms(text, embed_prefix):
    fresh = scheme(text)
    assert (fresh.scale[...] == 1).all()
    assert (fresh.bias[...] == 0).all()
    position = trained_scheme(text, prefix=1, embed_prefix=embed_prefix)
    start = jnp.asarray(normal(1, embed_prefix + 12, CHANNELS))
    assert position.embed(start, GRID) is start  # nothing joins the tokens themselves
    p = np.asarray(position.inner.table(GRID))
    if not embed_prefix:
        p = np.concatenate([np.zeros((1, CHANNELS)), p])
    terms = compiled_terms(position, GRID)
    for layer in range(DEPTH):
        scale, bias = (
            np.broadcast_to(x, (DEPTH, CHANNELS))[layer] for x in (position.scale, position.bias)
        )
        mean, variance = p.mean(axis=1, keepdims=True), p.var(axis=1, keepdims=True)
        p = (p - mean) / np.sqrt(variance + 1e-6) * scale + bias
        np.testing.assert_allclose(terms.layer(layer).add, p, **EXACT)
    registers = trained_scheme(text, prefix=3, embed_prefix=embed_prefix)
    registers = compiled_terms(registers, GRID).layer(1).add
    np.testing.assert_array_equal(np.delete(registers, (1, 2), axis=0), terms.layer(1).add)


@pytest.mark.parametrize("join", ["share", "unshare"])
def test_joined_embeddings_are_added_before_every_layer(join):
    position = trained_scheme(f"lape(ape,join={join})", prefix=1)
    grid = position.stage.grid
    x = normal(1, 16, CHANNELS)
    tables = [np.asarray(position.inner.table(grid))] * DEPTH
    if join == "unshare":
        tables[1:] = [np.asarray(later.table(grid)) for later in position.later]
        assert not np.allclose(tables[1], tables[2])
    embedded = position.embed(jnp.asarray(x[:, 1:]), grid)
    np.testing.assert_allclose(embedded, x[:, 1:] + tables[0], **EXACT)
    for layer, table in enumerate([*tables[1:], 0]):
        want = x.copy()
        want[:, 1:] += table
        np.testing.assert_allclose(position.mix(jnp.asarray(x), grid, layer), want, **EXACT)
    assert jax.tree.leaves(position.terms(grid)) == []
    position.resize((2, 5))
    assert {param.shape for param in params(position).values()} == {(10, CHANNELS)}
    assert position.mix(jnp.asarray(x[:, :11]), (2, 5), 0).shape == (1, 11, CHANNELS)
