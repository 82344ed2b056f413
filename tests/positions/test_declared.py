"""Measures the properties that every scheme declares: exactly the declared ones hold.

The measure is the contribution of one token to another in a layer whose tokens all have the same
content: exp(logit) times the value, without the sum of softmax, which depends on the place of a
token on the map in any scheme. All computations are in float64.
"""

import doctest
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import positions
from rope_jax.positions import list_positions
from rope_jax.positions.scheme import ACTS, RESOLUTION, SCHEMES
from rope_jax_kernels import window_bias
from tests.positions.schemes import (
    CHANNELS,
    HEAD_DIM,
    HEADS,
    covering,
    params,
    rotate_by_definition,
    scheme,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")

GRID, SQUARE = (3, 4), (3, 3)


def fresh(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


CONTENT = np.tile(fresh(HEAD_DIM), HEADS)  # of every token and every head
W_Q, W_K, VALUE = fresh(HEAD_DIM, HEAD_DIM), fresh(HEAD_DIM, HEAD_DIM) / 3, fresh(HEAD_DIM)


def make_different(text, grid=GRID):
    """A scheme with parameters that are all different.

    Kernels on tables see one token only, so that tokens keep their places.
    """
    position = trained_scheme(text, std=0.5, grid=grid)
    if "gpe" in text:
        gpe = next(module for _, module in nnx.iter_modules(position) if hasattr(module, "kernel"))
        centre = jnp.zeros((3, 3, 1)).at[1, 1].set(1)
        gpe.kernel.set_value(gpe.kernel[...] * centre)
    return position


@functools.cache
def cached_terms(position, grid):
    return position.terms(grid)


def embed_content(position, grid, key=None):
    tokens = np.broadcast_to(CONTENT, (1, grid[0] * grid[1], CHANNELS))
    return np.asarray(position.embed(jnp.asarray(tokens), grid, key))


def queries_and_keys(position, grid, layer):
    x, terms = embed_content(position, grid), cached_terms(position, grid).layer(layer)
    for before in range(layer):
        x = np.asarray(position.mix(jnp.asarray(x), grid, before))
    x = x if terms.add is None else x + np.asarray(terms.add)
    heads = x.reshape(1, -1, HEADS, HEAD_DIM)
    return heads @ W_Q, heads @ W_K, terms


@functools.cache
def contributions(position, grid, layer):
    """The contribution of token m to token l, [N, L, M, D]."""
    q, k, terms = queries_and_keys(position, grid, layer)
    bias_of_pairs = 0 if terms.bias is None else np.asarray(window_bias(terms.bias, grid))

    def attend(q, k, v, bias=0):
        xp = jnp if isinstance(q, jax.core.Tracer) else np  # some transforms map over examples
        if terms.rotation is not None:
            q, k = (
                rotate_by_definition(np.asarray(q), terms.rotation),
                rotate_by_definition(np.asarray(k), terms.rotation),
            )
        logits = xp.einsum("blnd,bmnd->bnlm", q, k) / HEAD_DIM + bias_of_pairs + bias
        return jnp.asarray(xp.einsum("bnlm,bmnd->blnd", xp.exp(logits), v, optimize=True))

    if terms.transform is None:  # the value is a common factor
        logits = np.einsum(
            "lnd,mnd->nlm", *(rotate_by_definition(x, terms.rotation)[0] for x in (q, k))
        )
        return np.exp(logits / HEAD_DIM + bias_of_pairs)[..., None] * VALUE
    # One token has a value, a different one in each example.
    tokens = q.shape[1]
    v = np.eye(tokens)[:, :, None, None] * VALUE * np.ones((HEADS, 1))
    q, k = (np.broadcast_to(x, (tokens, *x.shape[1:])) for x in (q, k))
    return np.asarray(terms.transform(*map(jnp.asarray, (q, k, v)), attend)).transpose(2, 1, 0, 3)


def norms(position):
    """Lengths of the queries and keys of a layer in their product."""
    q, k, terms = queries_and_keys(position, GRID, 1)

    def measure(q, k, v, bias=0):
        if terms.rotation is not None:
            q, k = (
                jnp.asarray(rotate_by_definition(np.asarray(x), terms.rotation)) for x in (q, k)
            )
        lengths = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
        return jnp.concatenate([*lengths, jnp.zeros_like(q)[..., 2:]], axis=-1)

    if terms.transform is None:
        return measure(q, k, q)
    # A transform may add terms to the output of attention.
    q, k = jnp.asarray(q), jnp.asarray(k)
    nothing = terms.transform(q, k, q, lambda q, k, v, bias=0: jnp.zeros_like(q))
    return terms.transform(q, k, q, measure) - nothing


def are_close(x, y):
    return np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-9, atol=1e-9)


def is_relative(position):
    pairs, by_offset = contributions(position, GRID, 1), {}
    for (i, query), (j, key) in itertools.product(enumerate(np.ndindex(GRID)), repeat=2):
        offset = (query[0] - key[0], query[1] - key[1])
        by_offset.setdefault(offset, []).append(pairs[:, i, j])
    return all(
        are_close(contribution, group[0]) for group in by_offset.values() for contribution in group
    )


def differs_in_layers(position):
    """True if the terms of two layers, or of two places between layers, differ."""
    if places := position.mix_after(position.stage.depth):
        x = embed_content(position, GRID)
        mixed = [np.asarray(position.mix(jnp.asarray(x), GRID, i)) - x for i in places]
        mixed += [] if are_close(x - CONTENT, 0 * x) else [x - CONTENT]
        return not are_close(mixed[0], mixed[-1])
    terms = cached_terms(position, GRID)
    adds = [terms.layer(layer).add for layer in (0, 1)]
    same_added = adds[0] is None or are_close(*adds)
    return not (
        same_added and are_close(contributions(position, GRID, 0), contributions(position, GRID, 1))
    )


def draws(position):
    """True if different keys give different terms."""
    first, second = (
        [embed_content(position, GRID, key), *jax.tree.leaves(position.terms(GRID, key))]
        for key in map(jax.random.key, (0, 1))
    )
    return not all(are_close(*pair) for pair in zip(first, second, strict=True))


def acts(position):
    """The places where a scheme acts; "between" layers includes before the first one."""
    terms, x = cached_terms(position, GRID), embed_content(position, GRID)
    if position.mix_after(position.stage.depth):
        return {"between"}
    per_layer_terms = {
        "rotation": terms.rotation,
        "logits": terms.bias,
        "layers": terms.add,
        "transform": terms.transform,
    }
    tokens = set() if are_close(x, CONTENT + 0 * x) else {"tokens"}
    return {name for name, term in per_layer_terms.items() if term is not None} | tokens


def has_same_contributions(position, after, places):
    """True if a larger map has, at some places of each axis, the contributions of a 3 x 3 map."""
    index = np.array([y * after[1] + x for y, x in itertools.product(*places)])
    return are_close(
        contributions(position, SQUARE, 1), contributions(position, after, 1)[:, index][:, :, index]
    )


def rule_on_another_map(position):
    resized = nnx.clone(position)
    resized.resize((5, 3))
    shapes = [[param.shape for param in params(p).values()] for p in (position, resized)]
    if shapes[0] != shapes[1]:
        return "resample"
    leaves = [jax.tree.leaves(cached_terms(position, grid)) for grid in (SQUARE, (5, 3))]
    tokens = embed_content(position, SQUARE)
    if all(are_close(*pair) for pair in zip(*leaves, strict=True)) and are_close(
        tokens, CONTENT + 0 * tokens
    ):
        return "unchanged"
    if has_same_contributions(position, (5, 3), [(0, 1, 2)] * 2):
        return "extrapolate"
    between = [((9, 9), (1, 4, 7)), ((5, 5), (0, 2, 4)), ((6, 6), (0, 2, 4)), ((6, 6), (1, 3, 5))]
    if any(has_same_contributions(position, after, [axis] * 2) for after, axis in between):
        return "interpolate"
    return "another"


@pytest.mark.parametrize(
    "text",
    covering(
        "axial_rope(coords=absolute,generator=exponential,shared=True,k_rope=1)",
        "cat_rope(mode=released)",
        "lape(sincos2d,join=share)",
        "rope2d+rpb",
        leave_out=["prefix=True"],
        slow=["comrope", "irpe", "string"],
    ),
)
def test_schemes_have_the_declared_properties(text):
    position = make_different(text)
    measured = {
        "relative": is_relative(position),
        "keeps_norms": are_close(norms(position), norms(scheme("none"))),
        "per_layer": differs_in_layers(position),
        "learnable": bool(params(position)),
        "augments": draws(position),
    }
    if position.acts in ("rotation", "logits", "transform"):
        # Embeddings have separate channels for every head anyway.
        per_head = contributions(position, GRID, 1)
        measured["per_head"] = not are_close(per_head[0], per_head[1])
    if "+" not in text:
        measured["acts"] = next(iter(acts(position) or {"nowhere"}))
        assert len(acts(position)) <= 1
        if not text.startswith("liere"):
            measured["resolution"] = rule_on_another_map(make_different(text, SQUARE))
    assert measured == {name: getattr(position, name) for name in measured}


def test_liere_extrapolates_nearly():
    """A map of n patches is n / n_creation long from its first to its last patch."""
    position = scheme("liere", grid=SQUARE)
    assert position.resolution == "extrapolate"
    np.testing.assert_allclose(position.coords((6, 9))[-1, -1], [2, 3], rtol=1e-12)


def test_the_docstrings_example_is_a_scheme(rope_log):
    position = scheme(f"{rope_log}(pairing=interleaved)")
    assert (is_relative(position), acts(position)) == (position.relative, {position.acts})
    assert SCHEMES[rope_log].__doc__ == "2-D RoPE on the logarithm of row and column."


@pytest.mark.parametrize("name", positions.__all__)
def test_examples_in_docstrings(name):
    examples = doctest.DocTestFinder().find(getattr(positions, name), name, False, vars(positions))
    results = [doctest.DocTestRunner().run(example) for example in examples]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


@pytest.mark.parametrize("name", list_positions())
def test_every_scheme_is_described(name):
    cls = SCHEMES[name]
    assert cls.acts in ACTS
    assert cls.resolution in RESOLUTION
    assert {"paper", "equation"} <= {key for key, value in vars(cls).items() if value}


def test_sums_combine_declared_properties():
    assert (scheme("rope2d+rpb").relative, scheme("rope2d+ape").relative) == (True, False)
    assert (scheme("dinov3+rpb").augments, scheme("rope2d+rpb").augments) == (True, False)
    assert [part.acts for part in scheme("rope2d+rpb").schemes()] == ["rotation", "logits"]
    assert len(scheme("rpb").schemes()) == 1
