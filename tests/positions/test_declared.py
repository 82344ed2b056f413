"""Measures the properties that every scheme declares: exactly the declared ones hold.

The measure is the contribution of one token to another in a layer whose tokens all have the same
content: exp(logit) times the value, without the sum of softmax, which depends on the place of a
token on the map in any scheme. All computations are in float64.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.positions.schemes import (
    ALL,
    CHANNELS,
    DEFAULTS,
    HEAD_DIM,
    HEADS,
    compiled,
    params,
    rotate_by_definition,
    scheme,
    trained_scheme,
)
from tests.slow import some_slow

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


def embed_content(position, grid, key=None):
    """The tokens after the embedding, and the terms of the first two layers."""
    tokens = jnp.asarray(np.broadcast_to(CONTENT, (1, grid[0] * grid[1], CHANNELS)))
    terms = position.terms(grid, key)
    return position.embed(tokens, grid, key), [terms.layer(layer) for layer in (0, 1)]


@functools.cache
def embedded_content(position, grid):
    if position.acts == "rotation" and not params(position):  # NumPy
        return embed_content(position, grid)
    return compiled(lambda position: embed_content(position, grid), position)


def queries_and_keys(position, grid, layer):
    x, terms = embedded_content(position, grid)
    x, terms = np.asarray(x), terms[layer]
    for before in range(layer):
        x = np.asarray(position.mix(jnp.asarray(x), grid, before))
    x = x if terms.add is None else x + np.asarray(terms.add)
    heads = x.reshape(1, -1, HEADS, HEAD_DIM)
    return heads @ W_Q, heads @ W_K, terms


def spread(table, grid):
    """The biases of all pairs in a table of offsets."""
    (rows, columns), (height, width) = np.indices(grid).reshape(2, -1), grid
    y, x = rows[:, None] - rows + height - 1, columns[:, None] - columns + width - 1
    return np.asarray(table)[:, y * (2 * width - 1) + x]


@jax.jit
def contribute(transform, q, k, v, bias_of_pairs):
    def attend(q, k, v, bias=0):
        logits = jnp.einsum("blnd,bmnd->bnlm", q, k) / HEAD_DIM + bias_of_pairs + bias
        return jnp.einsum("bnlm,bmnd->blnd", jnp.exp(logits), v)

    return transform(q, k, v, attend)


@functools.cache
def contributions(position, grid, layer):
    """The contribution of token m to token l, [N, L, M, D]."""
    q, k, terms = queries_and_keys(position, grid, layer)
    bias_of_pairs = 0 if terms.bias is None else spread(terms.bias, grid)
    if terms.transform is None:  # the value is a common factor
        logits = np.einsum(
            "lnd,mnd->nlm", *(rotate_by_definition(x, terms.rotation)[0] for x in (q, k))
        )
        return np.exp(logits / HEAD_DIM + bias_of_pairs)[..., None] * VALUE
    assert terms.rotation is None
    # One token has a value, a different one in each example.
    tokens = q.shape[1]
    v = np.eye(tokens)[:, :, None, None] * VALUE * np.ones((HEADS, 1))
    q, k = (np.broadcast_to(x, (tokens, *x.shape[1:])) for x in (q, k))
    return np.asarray(contribute(terms.transform, q, k, v, bias_of_pairs)).transpose(2, 1, 0, 3)


@jax.jit
def measure_lengths(transform, q, k):
    def measure(q, k, v, bias=0):
        lengths = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
        return jnp.concatenate([*lengths, jnp.zeros_like(q)[..., 2:]], axis=-1)

    # A transform may add terms to the output of attention.
    nothing = transform(q, k, q, lambda q, k, v, bias=0: jnp.zeros_like(q))
    return (transform(q, k, q, measure) - nothing)[..., :2]


def norms(position):
    """Lengths of the queries and keys of a layer in their product."""
    q, k, terms = queries_and_keys(position, GRID, 1)
    if terms.transform is not None:
        return measure_lengths(terms.transform, q, k)
    turned = [rotate_by_definition(x, terms.rotation) for x in (q, k)]
    return np.stack([np.linalg.norm(x, axis=-1) for x in turned], axis=-1)


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
        x = np.asarray(embedded_content(position, GRID)[0])
        mixed = [np.asarray(position.mix(jnp.asarray(x), GRID, i)) - x for i in places]
        mixed += [] if are_close(x - CONTENT, 0 * x) else [x - CONTENT]
        return not are_close(mixed[0], mixed[-1])
    adds = [terms.add for terms in embedded_content(position, GRID)[1]]
    same_added = adds[0] is None or are_close(*adds)
    return not (
        same_added and are_close(contributions(position, GRID, 0), contributions(position, GRID, 1))
    )


def draws(position):
    """True if different keys give different terms."""
    keys = [*map(jax.random.key, (0, 1))]
    draw = lambda position, keys: [embed_content(position, GRID, key) for key in keys]
    first, second = map(jax.tree.leaves, compiled(draw, position, keys))
    return not all(are_close(*pair) for pair in zip(first, second, strict=True))


def acts(position):
    """The places where a scheme acts; "between" layers includes before the first one."""
    x, (terms, _) = embedded_content(position, GRID)
    if position.mix_after(position.stage.depth):
        return {"between"}
    per_layer_terms = {
        "rotation": terms.rotation,
        "logits": terms.bias,
        "layers": terms.add,
        "transform": terms.transform,
    }
    tokens = set() if are_close(x, CONTENT + np.zeros(x.shape)) else {"tokens"}
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
    (x, terms), (_, larger) = (embedded_content(position, grid) for grid in (SQUARE, (5, 3)))
    pairs = zip(*map(jax.tree.leaves, (terms, larger)), strict=True)
    if all(are_close(*pair) for pair in pairs) and are_close(x, CONTENT + np.zeros(x.shape)):
        return "unchanged"
    if has_same_contributions(position, (5, 3), [(0, 1, 2)] * 2):
        return "extrapolate"
    between = [((9, 9), (1, 4, 7)), ((5, 5), (0, 2, 4)), ((6, 6), (0, 2, 4)), ((6, 6), (1, 3, 5))]
    if any(has_same_contributions(position, after, [axis] * 2) for after, axis in between):
        return "interpolate"
    return "another"


QUICK = {
    *DEFAULTS,
    "axial_rope(coords=absolute,generator=exponential,shared=True,k_rope=1)",
    "cat_rope(mode=released)",
    "lape(sincos2d,join=share)",
    "rope2d+rpb",
} - {"comrope", "irpe", "string"}


@pytest.mark.parametrize("text", some_slow([x for x in ALL if "prefix=True" not in x], QUICK))
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


def test_sums_combine_declared_properties():
    assert (scheme("rope2d+rpb").relative, scheme("rope2d+ape").relative) == (True, False)
    assert (scheme("dinov3+rpb").augments, scheme("rope2d+rpb").augments) == (True, False)
    assert [part.acts for part in scheme("rope2d+rpb").schemes()] == ["rotation", "logits"]
    assert len(scheme("rpb").schemes()) == 1
