"""Properties of schemes of any formula: other maps, weight decay, sums, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions.scheme import PerLayer, _add
from tests.positions import schemes
from tests.positions.schemes import ALL, CHANNELS, SINGLE, normal, params


def scheme(text, **changes):
    settings = {"depth": 2, "grid": (4, 5), "dtype": SINGLE} | changes
    return schemes.scheme(text, **settings)


TABLES = ["ape", "rpb", "rpb(key_norm=True)", "lape(ape,join=unshare)", "gpe+lpe"]
# `liere` and `cpb` keep the scale of the map of creation; rotations do not depend on a map.
OTHERS = [
    text
    for text in ALL
    if text not in TABLES
    and not text.startswith(("liere", "cpb"))
    and ("rope" not in text or "+" in text)
]


@pytest.mark.parametrize(
    "text", [*TABLES, *(pytest.param(text, marks=pytest.mark.slow) for text in OTHERS)]
)
def test_calling_on_another_map_equals_resizing(text):
    grid = (6, 3)
    position = scheme(text, prefix=1, embed_prefix=1)
    tokens = jnp.asarray(normal(2, 19, CHANNELS), jnp.float32)
    called = position.embed(tokens, grid), position.terms(grid)
    position.resize(grid)
    assert position.stage.grid == grid
    resized = position.embed(tokens, grid), position.terms(grid)
    assert jax.tree.structure(called) == jax.tree.structure(resized)
    for value, expected in zip(jax.tree.leaves(called), jax.tree.leaves(resized), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("text", ["decomposed", "irpe", "lpe"])
def test_learned_terms_start_at_zero(text):
    assert not any(param[...].any() for param in params(scheme(text)).values())


@pytest.mark.parametrize("text", ALL)
def test_only_parameters_of_irpe_are_decayed(text):
    position = nnx.eval_shape(lambda: scheme(text, prefix=1))
    decayed = [param.shape for param in params(position).values() if param.get_metadata()["decay"]]
    assert decayed == ([(2, 16, 50)] if "irpe" in text else [])  # its authors decay it


def test_the_baseline_bias_of_lape_starts_at_zero_and_is_decayed():
    position = scheme("rpb(std=0,decay=True,key_norm=True)", prefix=1)
    assert not position.offsets[...].any()
    decay = {name: param.get_metadata()["decay"] for name, param in params(position).items()}
    assert decay == {"offsets": True, "key_scale": False, "key_bias": False}


# Sums


def test_a_sum_has_the_terms_of_its_parts_and_adds_up_those_of_one_kind():
    grid, tokens = (3, 6), jnp.zeros((1, 18, 48))
    summed = scheme("rope2d+ape+sincos2d+rpb+rpb", prefix=1)
    want = sum(part.embed(tokens, grid) for part in summed.parts[1:3])
    np.testing.assert_array_equal(summed.embed(tokens, grid), want)
    terms, parts = summed.terms(grid), [part.terms(grid) for part in summed.parts]
    jax.tree.map(np.testing.assert_array_equal, terms.rotation, parts[0].rotation)
    first, second = (part.layer(1).bias for part in parts[3:])
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(terms.layer(1).bias, first + second)
    single, double = (scheme(text).terms(grid) for text in ("alibi2d", "alibi2d+alibi2d"))
    np.testing.assert_array_equal(double.bias, 2 * single.bias)
    assert double.per_layer() == []  # all layers share it, as they do each part


def test_a_matrix_of_biases_is_not_added_to_a_table_of_offsets():
    matrix, table = jnp.zeros((1, 18, 18)), jnp.zeros((2, 1, 5 * 11))  # of a scheme of one's own
    with pytest.raises(ValueError, match="a matrix of biases to a table of offsets: use one"):
        _add(matrix, PerLayer(table))


@pytest.mark.parametrize(
    "text", ["rope2d+axial_rope", "rope_mixed+ape+rope1d", "lape(ape)+lape(sincos1d)"]
)
def test_sums_refuse_conflicting_parts(text):
    with pytest.raises(ValueError, match="at most one of a sum may do so: remove the others"):
        scheme(text)
