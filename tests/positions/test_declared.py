"""What every scheme says of itself, measured: what is declared holds, and what is not declared does not.

The measure is what one token gives to another in a layer whose tokens all contain the same: exp(logit) times the value, without the sum
of softmax, which depends on where a token is on the map in any scheme. All of it is float64.
"""

import dataclasses
import itertools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import positions
from rope_jax.positions import PerLayer, Stage, create_position, list_positions, rotary
from rope_jax.positions.scheme import ACTS, RESOLUTION, SCHEMES, Sum
from rope_jax_kernels import rotate
from rope_jax_kernels.attention.reference import window_bias
from tests.positions.schemes import ALL

pytestmark = pytest.mark.usefixtures("quick_compiles", "x64")

HEADS, HEAD_DIM, GRID, SQUARE = 2, 16, (3, 4), (3, 3)
STAGE = Stage(depth=3, heads=HEADS, head_dim=HEAD_DIM, channels=HEADS * HEAD_DIM, grid=GRID, dtype=np.dtype(float))
WITHOUT_PREFIX = [text for text in ALL if "prefix=True" not in text]


def scheme(text, stage=STAGE):
    """A scheme with parameters that are all different; kernels on tables see one token only, so that tokens keep their places."""
    position = create_position(text, stage, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for path, param in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        value = rng.standard_normal(param.shape) * 0.5
        if "gpe" in text and path[-1] == "kernel" and param.shape == (3, 3, stage.channels):
            value[[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 2, 0, 1, 2]] = 0
        param.set_value(jnp.asarray(value))
    return position


def fresh(shape):
    return np.random.default_rng(shape).standard_normal(shape)


CONTENT = np.tile(fresh((HEAD_DIM,)), HEADS)  # of every token and every head


def embedded(position, grid, key=None):
    tokens = jnp.broadcast_to(CONTENT, (1, grid[0] * grid[1], len(CONTENT)))
    return position.embed(tokens, grid, key)


def turned(q, k, terms):
    return (q, k) if terms.rotation is None else rotate(q, k, terms.rotation, implementation="xla")


def queries_and_keys(position, grid, layer):
    x, terms = embedded(position, grid), position.terms(grid).layer(layer)
    for before in range(layer):
        x = position.mix(x, grid, before)
    x = x if terms.add is None else x + terms.add
    heads = x.reshape(1, -1, HEADS, HEAD_DIM)
    return heads @ fresh((HEAD_DIM, HEAD_DIM)), heads @ fresh((HEAD_DIM, HEAD_DIM)) / 3, terms


def given(position, grid, layer):
    """What token m gives to token l: [N, L, M, D]."""
    q, k, terms = queries_and_keys(position, grid, layer)
    own = 0 if terms.bias is None else window_bias(terms.bias, grid)

    def attend(q, k, v, bias=0):
        q, k = turned(q, k, terms)
        return jnp.einsum("bnlm,bmnd->blnd", jnp.exp(jnp.einsum("blnd,bmnd->bnlm", q, k) / HEAD_DIM + own + bias), v)

    tokens = q.shape[1]
    v = jnp.eye(tokens)[:, :, None, None] * fresh((HEAD_DIM,)) * jnp.ones((HEADS, 1))  # one token has a value, in each example another
    q, k = (jnp.broadcast_to(x, (tokens, *x.shape[1:])) for x in (q, k))
    out = attend(q, k, v) if terms.transform is None else terms.transform(q, k, v, attend)
    return np.asarray(out.transpose(2, 1, 0, 3))


def norms(position):
    """Lengths of the queries and keys of a layer when their product is made."""
    q, k, terms = queries_and_keys(position, GRID, 1)

    def measure(q, k, v, bias=0):
        return jnp.stack([jnp.linalg.norm(x, axis=-1) for x in turned(q, k, terms)] + [0 * q[..., 0]] * (HEAD_DIM - 2), axis=-1)

    if terms.transform is None:
        return measure(q, k, q)
    # Beside attention, a transform may add something of its own.
    return terms.transform(q, k, q, measure) - terms.transform(q, k, q, lambda q, k, v, bias=0: jnp.zeros_like(q))


def close(one, other):
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-9, atol=1e-9))


def is_relative(position):
    gives, by_offset = given(position, GRID, 1), {}
    for (query, (qy, qx)), (key, (ky, kx)) in itertools.product(enumerate(np.ndindex(GRID)), repeat=2):
        by_offset.setdefault((qy - ky, qx - kx), []).append(gives[:, query, key])
    return all(close(one, same[0]) for same in by_offset.values() for one in same)


def differs_in_layers(position):
    """Whether two layers get different things; what acts between layers, at any two places where it does."""
    x = embedded(position, GRID)
    layers = [(given(position, GRID, 0), position.terms(GRID).layer(0).add), (given(position, GRID, 1), position.terms(GRID).layer(1).add)]
    if places := position.mix_after(STAGE.depth):
        layers = [(np.asarray(position.mix(x, GRID, layer) - x),) for layer in places]
        layers += [(np.asarray(x - CONTENT),)] if position.acts == "between" and not np.allclose(x, CONTENT) else []
    return not all(close(np.asarray(one), np.asarray(other)) for one, other in zip(layers[0], layers[-1], strict=True) if one is not None)


def same_tokens(position, after, places):
    """Whether a larger map has, at some places of each axis, what a map of 3 x 3 has."""
    index = np.array([y * after[1] + x for y, x in itertools.product(*places)])
    return close(given(position, SQUARE, 1), given(position, after, 1)[:, index][:, :, index])


def rule_on_another_map(position):
    resized = nnx.clone(position)
    resized.resize((5, 3))
    shapes = lambda position: [param.shape for param in jax.tree.leaves(nnx.state(position, nnx.Param))]
    if shapes(resized) != shapes(position):
        return "resample"
    leaves = [jax.tree.leaves(position.terms(grid)) for grid in (SQUARE, (5, 3))]
    same = [close(*pair) for pair in zip(*leaves, strict=True)]
    tokens = embedded(position, SQUARE)
    if all(same) and close(tokens, jnp.broadcast_to(CONTENT, tokens.shape)):
        return "unchanged"
    if same_tokens(position, (5, 3), [(0, 1, 2)] * 2):
        return "extrapolate"
    between = {(5, 5): [(0, 2, 4)], (6, 6): [(0, 2, 4), (1, 3, 5)], (9, 9): [(1, 4, 7)]}
    return "interpolate" if any(same_tokens(position, after, [axis] * 2) for after in between for axis in between[after]) else "another"


def draws(position):
    """Whether different keys give different things."""
    leaves = lambda key: [embedded(position, GRID, key), *jax.tree.leaves(position.terms(GRID, key))]
    one, other = (leaves(jax.random.key(seed)) for seed in (0, 1))
    return not all(close(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("text", WITHOUT_PREFIX)
def test_a_scheme_is_what_it_says(text):
    position = scheme(text)
    found = {
        "relative": is_relative(position),
        "keeps_norms": close(norms(position), norms(scheme("none"))),
        "per_layer": differs_in_layers(position),
        "learnable": bool(jax.tree.leaves(nnx.state(position, nnx.Param))),
        "augments": draws(position),
    }
    if position.acts in ("rotation", "logits", "transform"):  # embeddings have channels of their own for every head anyway
        gives = given(position, GRID, 1)
        found["per_head"] = not close(gives[0], gives[1])
    assert found == {name: getattr(position, name) for name in found}


def acts(position):
    """Where a scheme does something; what acts between layers may also join the tokens that enter the first one."""
    terms, x = position.terms(GRID), embedded(position, GRID)
    of_layers = {"rotation": terms.rotation, "logits": terms.bias, "layers": terms.add, "transform": terms.transform}
    between = {"between"} if position.mix_after(STAGE.depth) else set() if close(x, CONTENT + jnp.zeros_like(x)) else {"tokens"}
    return {name for name, term in of_layers.items() if term is not None} | between


@pytest.mark.parametrize("text", [text for text in WITHOUT_PREFIX if "+" not in text])
def test_a_scheme_acts_where_it_says(text):
    position = scheme(text)
    assert acts(position) == {position.acts} - {"nowhere"}


@pytest.mark.parametrize("text", [text for text in WITHOUT_PREFIX if "+" not in text])
def test_a_scheme_does_on_another_map_what_it_says(text):
    position = scheme(text, dataclasses.replace(STAGE, grid=SQUARE))
    if text.startswith("liere"):
        # A map of n patches is n / n_creation long from its first to its last patch, so that the spacing changes a little.
        assert position.resolution == "extrapolate"
        np.testing.assert_allclose(position.coords((6, 9))[-1, -1], [2, 3], rtol=1e-12)
        return
    assert rule_on_another_map(position) == position.resolution


def test_the_example_of_the_packages_docstring_is_a_scheme():
    example = textwrap.dedent(positions.__doc__.split("recipe and command:")[1])
    try:
        exec(example, dict(vars(rotary)))  # it is written for the file of its family
        position = scheme("rope_log(pairing=interleaved)")
        assert (is_relative(position), acts(position)) == (position.relative, {position.acts})
        assert SCHEMES["rope_log"].__doc__ == "2-D RoPE on the logarithm of row and column."
    finally:
        SCHEMES.pop("rope_log", None)


@pytest.mark.parametrize("name", list_positions())
def test_every_scheme_is_described(name):
    cls = SCHEMES[name]
    assert cls.paper
    assert cls.equation
    assert cls.acts in ACTS
    assert cls.resolution in RESOLUTION
    assert cls is SCHEMES["none"] or (cls.paper, cls.equation) != (SCHEMES["none"].paper, SCHEMES["none"].equation)
    own = next(base.__name__ for base in cls.__mro__ if "paper" in vars(base))
    assert own == cls.__name__, f"{name} says nothing of itself, {own} does"


def test_a_sum_is_relative_if_all_parts_are_and_augments_if_any_does():
    assert (scheme("rope2d+rpb").relative, scheme("rope2d+ape").relative) == (True, False)
    assert (scheme("dinov3+rpb").augments, scheme("rope2d+rpb").augments) == (True, False)
    assert isinstance(scheme("rope2d+rpb"), Sum)
    assert isinstance(scheme("rpb").terms(GRID).bias, PerLayer)
