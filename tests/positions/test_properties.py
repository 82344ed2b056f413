"""What holds for positional schemes whatever their formula: relativity, untouched tokens, other maps, sums, decay."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions import Stage, create_position, list_positions
from rope_jax_kernels import Global, Neighborhood, Window, rotate
from tests.positions.schemes import ALL, DEFAULTS

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROTARY = [
    "rope1d",
    "rope2d(pairing=interleaved)",
    "rope2d(k_rope=2,shared=False)",
    "rope_mixed",
    "axial_rope",
    "axial_rope(coords=endpoints,pairing=interleaved)",
    "axial_rope(coords=absolute,generator=exponential,shared=True,k_rope=1)",
]
LEARNABLE = ["rope_mixed", "ape", "rpb", "lape(ape)", "lape(sincos1d)", "rope_mixed+ape", "rope2d+rpb", "cpb(hidden=8)", "gpe"]


def stage(**changes):
    return Stage(**{"depth": 2, "heads": 3, "head_dim": 16, "channels": 48, "grid": (4, 5)} | changes)


def scheme(text, at):
    return create_position(text, at, rngs=nnx.Rngs(0))


def scores(rotation, tokens):
    """q . k of one query vector and one key vector of each head, placed at every pair of tokens: [N, L, L]."""
    vectors = np.random.default_rng(0).standard_normal((2, 1, 1, 3, 16)).astype(rotation.coords.dtype)
    q, k = (jnp.broadcast_to(vector, (1, tokens, 3, 16)) for vector in vectors)
    q, k = rotate(q, k, rotation)
    return np.asarray(jnp.einsum("blnd,bmnd->nlm", q, k, precision="highest"))


def test_the_list_of_the_tests_has_every_scheme():
    assert {text.split("(")[0] for text in DEFAULTS} == set(list_positions())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("text", ROTARY)
def test_scores_depend_on_differences_of_coordinates_only(text):
    height, width = 4, 5
    rotation = scheme(text, stage(dtype=np.dtype(float))).terms((height, width)).layer(1).rotation
    matrix = scores(rotation, height * width).reshape(3, height, width, height, width)
    by_offset = {}
    for qy, qx, ky, kx in itertools.product(range(height), range(width), range(height), range(width)):
        # In reading order, (1, -4) is the same difference as (0, 1) on a map 5 wide; in two dimensions it is not.
        offset = (ky - qy) * width + kx - qx if text == "rope1d" else (ky - qy, kx - qx)
        by_offset.setdefault(offset, []).append(matrix[:, qy, qx, ky, kx])
    for same in by_offset.values():
        np.testing.assert_allclose(same, np.broadcast_to(same[0], np.shape(same)), rtol=0, atol=1e-12)  # float64, norms of about 4
    distinct = np.array([same[0] for same in by_offset.values()])
    difference = np.abs(distinct[:, None] - distinct[None]).max(axis=2) + np.eye(len(distinct))
    assert difference.min() > 1e-4, "different offsets have different scores"


@pytest.mark.parametrize("text", ROTARY)
def test_rotation_keeps_scores_of_float32_to_float32(text):
    rotation = scheme(text, stage()).terms((4, 5)).layer(0).rotation
    with jax.enable_x64(True):
        precise = scheme(text, stage(dtype=np.dtype(float)))
        if text == "rope_mixed":  # random draws differ between precisions
            precise.mixed.set_value(jnp.asarray(scheme(text, stage()).mixed[...], float))
        want = scores(precise.terms((4, 5)).layer(0).rotation, 20)
    assert rotation.coords.dtype == rotation.freqs.dtype == jnp.float32
    # Angles reach 28 radians here and are exact to half a unit in the last place, 1e-6; scores are products of norms of about 4.
    np.testing.assert_allclose(scores(rotation, 20), want, rtol=0, atol=4 * 4 * 1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("text", ROTARY)
@pytest.mark.parametrize("shift", [(0, 0), (1, 2)])
def test_one_window_stands_for_all_of_a_map(text, shift):
    height, width, h, w = 6, 8, 3, 4
    options = {"grid": (height, width), "dtype": np.dtype(float)}
    local = scheme(text, stage(pattern=Window((h, w), shift), **options)).terms((height, width)).layer(0).rotation
    whole = scheme(text, stage(**options)).terms((height, width)).layer(0).rotation
    assert local.coords.shape[0] == h * w
    of_one, of_map = scores(local, h * w), scores(whole, height * width)
    for top, left in itertools.product(range(0, height - h + 1), range(0, width - w + 1)):  # every place a window can have
        inside = [(top + i) * width + left + j for i in range(h) for j in range(w)]
        np.testing.assert_allclose(of_one, of_map[:, inside][:, :, inside], rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ROTARY)
def test_windows_larger_than_the_map_are_the_map_and_neighbourhoods_have_all_of_it(text):
    whole = scheme(text, stage()).terms((3, 5)).layer(0).rotation
    for pattern in (Window((7, 7), (3, 3)), Neighborhood((3, 3))):
        rotation = scheme(text, stage(pattern=pattern)).terms((3, 5)).layer(0).rotation
        np.testing.assert_array_equal(rotation.coords, whole.coords)
        np.testing.assert_array_equal(rotation.freqs, whole.freqs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("text", ROTARY)
def test_prefix_tokens_and_channels_that_do_not_turn_stay_bit_for_bit(text, dtype):
    rotation = scheme(text, stage(prefix=2)).terms((4, 5)).layer(1).rotation
    assert rotation.coords.shape[0] == 2 + 4 * 5
    turning = 2 * rotation.freqs.shape[-1]
    # Interleaved or not, the channels that turn come first.
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 22, 3, 16)), dtype)
    for before, after in zip((q, -q), rotate(q, -q, rotation), strict=True):
        assert after.dtype == dtype
        assert jnp.array_equal(after[:, :2], before[:, :2])
        assert jnp.array_equal(after[..., turning:], before[..., turning:])
        # The first token of the map may be at the origin; the others are not.
        assert bool((after[:, 3:, :, :turning] != before[:, 3:, :, :turning]).any(axis=(0, 2, 3)).all())


@pytest.mark.parametrize("text", [text for text in ALL if not text.startswith(("liere", "cpb")) and ("rope" not in text or "+" in text)])
@pytest.mark.parametrize("grid", [(6, 3)])
def test_resizing_to_a_map_and_calling_there_are_the_same(text, grid):
    position = scheme(text, stage(prefix=1, embed_prefix=1))
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1 + grid[0] * grid[1], 48)), jnp.float32)
    called = position.embed(tokens, grid), position.terms(grid)
    position.resize(grid)
    assert position.stage.grid == grid
    resized = position.embed(tokens, grid), position.terms(grid)
    assert jax.tree.structure(called) == jax.tree.structure(resized)
    for before, after in zip(*map(jax.tree.leaves, (called, resized)), strict=True):
        np.testing.assert_array_equal(before, after)


def shapes(position):
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(position, nnx.Param))]


def test_resizing_changes_the_tables_themselves():
    position = scheme("lape(ape)+rpb+rope_mixed", stage(grid=(4, 5), prefix=1, embed_prefix=1))
    before = shapes(position)
    position.resize((4, 5))
    assert shapes(position) == before
    position.resize((2, 3))
    changed = {old: new for old, new in zip(before, shapes(position), strict=True) if old != new}
    assert changed == {(21, 48): (7, 48), (2, 3, 7, 9): (2, 3, 3, 5)}  # the embedding and the bias; frequencies know no map


@pytest.mark.parametrize("text", ALL)
def test_no_parameter_of_a_scheme_is_decayed_but_those_of_irpe(text):
    params = jax.tree.leaves(nnx.state(scheme(text, stage(prefix=1)), nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable))
    decayed = [param.shape for param in params if param.get_metadata()["decay"]]
    assert decayed == ([(2, 16, 50)] if "irpe" in text else [])  # its authors decay it


def test_the_bias_that_lape_is_compared_with_starts_with_zeros_and_is_decayed():
    position = scheme("rpb(std=0,decay=True,key_norm=True)", stage(prefix=1))
    assert not position.offsets[...].any()
    decay = {path[-1]: param.get_metadata()["decay"] for path, param in nnx.to_flat_state(nnx.state(position, nnx.Param))}
    assert decay == {"offsets": True, "key_scale": False, "key_bias": False}


# Sums


def test_a_sum_has_the_terms_of_its_parts():
    at, grid = stage(prefix=1), (3, 6)
    summed = scheme("rope2d+ape+rpb", at)
    ape, rpb = summed.parts[1], summed.parts[2]
    tokens = jnp.ones((1, 18, 48))
    np.testing.assert_array_equal(summed.embed(tokens, grid), ape.embed(tokens, grid))
    terms, rotation = summed.terms(grid), scheme("rope2d", at).terms(grid).rotation
    np.testing.assert_array_equal(terms.rotation.coords, rotation.coords)
    np.testing.assert_array_equal(terms.rotation.freqs, rotation.freqs)
    np.testing.assert_array_equal(terms.layer(1).bias, rpb.terms(grid).layer(1).bias)
    assert terms.add is None


def test_embeddings_and_biases_of_a_sum_add_up():
    tokens = jnp.zeros((1, 20, 48))
    summed = scheme("ape+sincos2d", stage())
    want = summed.parts[0].table((4, 5)) + summed.parts[1].table((4, 5))
    np.testing.assert_array_equal(summed.embed(tokens, (4, 5))[0], want)
    biases = scheme("rpb+rpb", stage())
    parts = [part.terms((4, 5)).layer(1).bias for part in biases.parts]
    assert not np.array_equal(*parts)
    np.testing.assert_array_equal(biases.terms((4, 5)).layer(1).bias, parts[0] + parts[1])
    one, two = (scheme(text, stage()).terms((4, 5)) for text in ("alibi2d", "alibi2d+alibi2d"))
    np.testing.assert_array_equal(two.bias, 2 * one.bias)  # all layers share it, as they do each part
    assert two.per_layer() == []


@pytest.mark.parametrize("text", ["rope2d+axial_rope", "rope_mixed+ape+rope1d", "lape(ape)+lape(sincos1d)"])
def test_what_can_be_there_only_once_is_refused_twice(text):
    with pytest.raises(ValueError, match="at most one of a sum may do so: remove the others"):
        scheme(text, stage())


def test_none_adds_nothing():
    position = scheme("none", stage(prefix=1))
    tokens = jnp.ones((1, 20, 48))
    assert position.embed(tokens, (4, 5)) is tokens
    assert jax.tree.leaves(position.terms((4, 5))) == []


@pytest.mark.parametrize("pattern", [Global(), Window((2, 5)), Neighborhood((3, 3))])
@pytest.mark.parametrize("text", LEARNABLE)
def test_learnable_parts_get_a_gradient_from_what_attention_receives(text, pattern):
    position = scheme(text, stage(pattern=pattern))
    graph, params = nnx.split(position)

    def loss(params):
        weights = np.random.default_rng(0)
        position = nnx.merge(graph, params)
        terms = position.terms((4, 5))
        theta = [terms.layer(i).rotation.angles() for i in range(2)] if terms.rotation is not None else []
        leaves = [position.embed(jnp.zeros((1, 20, 48)), (4, 5)), *theta, *jax.tree.leaves((terms.bias, terms.add))]
        return sum(jnp.sum(leaf * weights.standard_normal(leaf.shape).astype(np.float32)) for leaf in leaves)

    for gradient in jax.tree.leaves(jax.grad(loss)(params)):
        assert bool(jnp.isfinite(gradient).all())
        assert bool((gradient != 0).any())
