"""Schemes that turn q and k by matrices, against exponentials from eigenvalues in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from rope_jax.positions.matrix import expm
from rope_jax_kernels import Global, Neighborhood, Window
from tests.positions.schemes import (
    DEPTH,
    GRID,
    HEAD_DIM,
    HEADS,
    SINGLE,
    compiled_terms,
    normal,
    params,
    scheme,
    tokens,
    trained_scheme,
)

EXACT = {"rtol": 1e-11, "atol": 1e-11}  # float64; angles reach 100 radians
EYE = np.eye(HEAD_DIM)
WINDOW, NEAR = Window((2, 2), (1, 1)), Neighborhood((3, 3))


def exponential(skew):
    """Computes exp of skew-symmetric matrices [..., b, b]; i times them is Hermitian."""
    values, vectors = np.linalg.eigh(1j * np.asarray(skew))
    return np.real((vectors * np.exp(-1j * values)[..., None, :]) @ vectors.conj().swapaxes(-1, -2))


def upper_to_skew(upper, size):
    half = np.zeros((*upper.shape[:-1], size, size))
    half[..., *np.triu_indices(size, 1)] = upper
    return half - half.swapaxes(-1, -2)


def matrices(position, grid, key=None):
    """The matrices by which each layer turns vectors of tokens and heads: images of unit vectors.

    [layer, L, N, D, D].
    """
    at = position.stage
    places = (at.prefix + grid[0] * grid[1],) if isinstance(at.pattern, Global) else grid
    units = EYE.reshape(HEAD_DIM, *[1] * (len(places) + 1), HEAD_DIM)
    units = np.broadcast_to(units, (HEAD_DIM, *places, HEADS, HEAD_DIM))
    graph, state = nnx.split(position)

    @jax.jit
    def turn(state, units, key):
        terms = nnx.merge(graph, state).terms(grid, key)
        qkv = [
            terms.layer(layer).transform(units, units, units, lambda *qkv: jnp.stack(qkv))
            for layer in range(at.depth)
        ]
        return jnp.stack(qkv, axis=1)

    q, k, v = np.asarray(turn(state, jnp.asarray(units, at.dtype), key))
    np.testing.assert_array_equal(v, np.broadcast_to(units, v.shape))
    np.testing.assert_array_equal(q, k)
    return np.moveaxis(q.reshape(at.depth, HEAD_DIM, -1, HEADS, HEAD_DIM), 1, -1).copy()


def block_diagonal(blocks):
    """Blocks [..., G, b, b] as matrices [..., D, D]; remaining channels do not turn."""
    *batch, groups, size, _ = blocks.shape
    out = np.broadcast_to(EYE, (*batch, HEAD_DIM, HEAD_DIM)).copy()
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        out[..., part, part] = blocks[..., g, :, :]
    return out


def assert_turns(turned, want):
    np.testing.assert_allclose(turned, np.broadcast_to(want, turned.shape), **EXACT)


# The exponential itself


def random_skew(size, largest, count=40):
    half = np.random.default_rng(size).standard_normal((count, size, size))
    skew = half - half.swapaxes(1, 2)
    angles = np.abs(np.linalg.eigvals(skew)).max(axis=1)
    return skew * (np.linspace(0, largest, count) / angles)[:, None, None]  # the first is zero


@pytest.mark.parametrize(("size", "largest"), [(3, 0.7), (2, 30.0), (8, 30.0), (8, 300.0)])
def test_expm(size, largest):
    skew = random_skew(size, largest)
    want = exponential(skew)
    with jax.enable_x64(True):
        atol = 1e-15 * max(10, 10 * largest)
        np.testing.assert_allclose(jax.jit(expm)(skew), want, rtol=0, atol=atol)
    single = np.asarray(jax.jit(expm)(skew.astype(np.float32)))
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single[0], np.eye(size))
    # A rounding of the matrices moves an angle by 3e-8 times its size; each squaring doubles it.
    np.testing.assert_allclose(single, want, rtol=0, atol=2.5e-7 * max(2, 2 * largest))


def test_gradient_of_expm():
    with jax.enable_x64(True):
        skew = jnp.asarray(random_skew(4, 20.0, count=3))
        weights = jnp.asarray(np.random.default_rng(1).standard_normal(skew.shape))
        gradient = jax.jit(jax.grad(lambda a: jnp.sum(weights * expm(a))))(skew)
    for direction in np.random.default_rng(2).standard_normal((3, *skew.shape)):
        slopes = [
            scipy.linalg.expm_frechet(a, e, compute_expm=False)
            for a, e in zip(np.asarray(skew), direction, strict=True)
        ]
        np.testing.assert_allclose(
            np.sum(np.asarray(gradient) * direction),
            np.sum(np.asarray(weights) * slopes),
            rtol=1e-11,
        )


def test_expm_of_nan_terminates():
    run = jax.jit(expm)
    assert np.isnan(run(np.full((2, 2), np.nan, np.float32))).any()
    assert not np.isfinite(run(np.float32([[0, np.inf], [-np.inf, 0]]))).all()


# Definitions


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "block", "per_layer", "per_head"),
    [
        (Global(), 8, True, True),
        pytest.param(WINDOW, 16, True, False, marks=pytest.mark.slow),
        (NEAR, 2, False, False),
    ],
)
def test_liere(pattern, block, per_layer, per_head):
    prefix = 2 if pattern == Global() else 0
    text = f"liere(block={block},per_layer={per_layer},per_head={per_head})"
    position = trained_scheme(text, prefix=prefix, pattern=pattern)
    layers, heads, blocks = DEPTH if per_layer else 1, HEADS if per_head else 1, HEAD_DIM // block
    assert position.upper.shape == (layers, heads, 2, blocks, block * (block - 1) // 2)
    generators = upper_to_skew(np.asarray(position.upper[...]), block)
    per_row, per_column = np.moveaxis(generators[:, None], 3, 0)  # [layer, 1, N, blocks, b, b]
    for grid in (GRID, (5, 1)):
        turned = matrices(position, grid)
        assert_turns(turned[:, :prefix], EYE)
        rows, columns = (np.linspace(0, n / unit, n) for n, unit in zip(grid, GRID, strict=True))
        places = [(rows[y], columns[x]) for y, x in tokens(grid)]
        y, x = np.reshape(places, (-1, 2, 1, 1, 1, 1)).swapaxes(0, 1)
        assert_turns(turned[:, prefix:], block_diagonal(exponential(y * per_row + x * per_column)))


def test_liere_starts_uniformly_within_a_full_turn():
    upper = np.asarray(scheme("liere", heads=9, dtype=SINGLE).upper[...])
    assert upper.min() >= 0
    assert upper.max() < 2 * math.pi
    assert set(np.floor(upper.ravel() / (2 * math.pi) * 10)) == set(range(10))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "variant", "block"),
    [(Global(), "ld", 8), (WINDOW, "ap", 8), pytest.param(NEAR, "ld", 4, marks=pytest.mark.slow)],
)
def test_comrope(pattern, variant, block):
    prefix, grid = (1 if pattern == Global() else 0), (5, 2)
    text = f"comrope(variant={variant},block={block})"
    position = trained_scheme(text, std=0.3, prefix=prefix, pattern=pattern)
    learned = np.asarray(position.blocks[...])
    assert learned.shape == (DEPTH, HEADS, HEAD_DIM // block, block, block)
    skew = learned - learned.swapaxes(-1, -2)
    centre = np.concatenate([np.full((prefix, 2), 0.5), (np.array(tokens(grid)) + 0.5) / grid])
    if variant == "ld":
        scales = np.asarray(position.scales[:, 0])  # [layer, axis, block]
    else:
        scales = np.broadcast_to(np.eye(2), (DEPTH, 2, 2))  # rows turn the first block
    turns = np.einsum("la,dag->dlg", centre, scales)[:, :, None, :, None, None]
    assert_turns(matrices(position, grid), block_diagonal(exponential(turns * skew[:, None])))


@pytest.mark.parametrize(
    ("text", "name", "std"),
    [
        ("comrope(variant=ld,std=0.5)", "blocks", 0.5),
        ("comrope(variant=ap,std=0.5)", "blocks", 0.5),
        ("string(variant=cayley)", "learned", 0.02),  # near plain RoPE
        ("string(variant=circulant)", "learned", 0.02),
    ],
)
def test_initial_matrices_are_normal_draws(text, name, std):
    drawn = np.asarray(params(scheme(text, heads=24, dtype=SINGLE))[name][...])
    assert drawn.std() == pytest.approx(std, rel=0.04)


@pytest.mark.usefixtures("x64")
def test_comrope_perturbs_patches_within_their_area():
    grid, prefix, key = (20, 30), 2, jax.random.key(1)
    draw = lambda text, key: np.asarray(scheme(text, prefix=prefix)._coords(grid, key))
    still = draw("comrope", None)
    moved = (draw("comrope", key) - still) * grid  # in patches
    np.testing.assert_array_equal(moved[:prefix], 0)
    distances = np.abs(moved[prefix:])
    assert distances.max() == pytest.approx(0.5, abs=1e-12)
    # Two sigmas of a normal distribution: 0.317 of 1200 draws, give or take 0.013.
    assert 0.25 < np.isclose(distances, 0.5).mean() < 0.39
    # A normal distribution of 0.5, cut off at 0.49: 0.263.
    assert 0.23 < np.std(moved[prefix:], where=distances < 0.49) < 0.29
    np.testing.assert_array_equal(draw("comrope(perturbation=0)", key), still)
    shifted = draw("comrope(perturbation=0,offset=0.2)", key) - still
    np.testing.assert_allclose(shifted, np.broadcast_to(shifted[:1], shifted.shape), **EXACT)
    assert ((np.abs(shifted[0]) > 0) & (np.abs(shifted[0]) < 1)).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "variant"),
    [
        (Global(), "cayley"),
        (WINDOW, "circulant"),
        pytest.param(NEAR, "cayley", marks=pytest.mark.slow),
    ],
)
def test_string(pattern, variant):
    prefix, grid = (1 if pattern == Global() else 0), (5, 2)
    position = trained_scheme(f"string(variant={variant})", std=0.3, prefix=prefix, pattern=pattern)
    places = np.concatenate([np.zeros((prefix, 2)), tokens(grid)])
    learned, turned = np.asarray(position.learned[...]), matrices(position, grid)
    for layer, head in itertools.product(range(DEPTH), range(HEADS)):
        if variant == "cayley":
            skew = upper_to_skew(learned[layer, head], HEAD_DIM)
            p = (EYE - skew) @ np.linalg.inv(EYE + skew)
            generators = np.zeros((2, HEAD_DIM, HEAD_DIM))
            for axis, step in np.ndindex(2, HEAD_DIM // 4):  # 2-D RoPE, channels (r, R + r)
                r = step + (HEAD_DIM // 4 if axis == 0 else 0)  # columns first
                plane = 100 ** (-4 * step / HEAD_DIM) * np.outer(EYE[HEAD_DIM // 2 + r], EYE[r])
                generators[axis] += p @ (plane - plane.T) @ p.T
        else:
            circulant = np.array([scipy.linalg.circulant(row) for row in learned[layer, head]])
            generators = circulant - circulant.swapaxes(1, 2)
        rotations = exponential(np.einsum("la,aij->lij", places, generators))
        # q and k stay in the basis, as only their products are defined.
        got, want = (np.einsum("qji,kjl->qkil", x, x) for x in (turned[layer, :, head], rotations))
        np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("pattern", "learnable"), [(Global(), True), (NEAR, False)])
def test_spherical_rope(pattern, learnable):
    prefix, grid = (2 if pattern == Global() else 0), (5, 2)
    text = f"spherical_rope(base=50,learnable={learnable})"
    settings = {"prefix": prefix, "pattern": pattern}
    freqs = np.broadcast_to([50 ** (-i / 5) for i in range(5)], (DEPTH, HEADS, 2, 5))
    position = trained_scheme(text, **settings)
    if learnable:
        np.testing.assert_allclose(scheme(text, **settings).freqs[...], freqs, **EXACT)
        freqs = np.asarray(position.freqs[...])
    about_columns, about_rows = upper_to_skew(np.array([[-1, 0, 0], [0, 0, -1]]), 3)
    y, x = np.array(tokens(grid)).T.reshape(2, -1, 1, 1, 1, 1)
    row_freqs, column_freqs = np.moveaxis(freqs, 2, 0)[:, :, None, ..., None, None]
    want = exponential(y * row_freqs * about_rows) @ exponential(x * column_freqs * about_columns)
    turned = matrices(position, grid)
    assert_turns(turned[:, :prefix], EYE)
    assert_turns(turned[:, prefix:], block_diagonal(want))


@pytest.mark.parametrize("text", ["liere", pytest.param("string", marks=pytest.mark.slow)])
def test_bfloat16_vectors_are_rounded_once(text):
    terms = compiled_terms(trained_scheme(text, std=0.3, dtype=SINGLE), GRID)
    assert all(leaf.dtype == SINGLE for leaf in jax.tree.leaves(terms))
    turn = jax.jit(lambda *qkv: terms.layer(1).transform(*qkv, lambda *qkv: jnp.stack(qkv)))
    x = jnp.asarray(normal(2, 15, HEADS, HEAD_DIM), jnp.bfloat16)
    precise = x.astype(jnp.float32)
    turned, precise = turn(x, -x, x), turn(precise, -precise, precise)
    assert precise.dtype == jnp.float32
    np.testing.assert_array_equal(turned, precise.astype(jnp.bfloat16), strict=True)
