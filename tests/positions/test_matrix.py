"""Schemes that turn q and k by matrices, against exponentials from eigenvalues in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from rope_jax.positions import PerLayer, Stage, create_position
from rope_jax.positions.matrix import expm
from rope_jax_kernels import Global, Neighborhood, Window

pytestmark = pytest.mark.usefixtures("quick_compiles")

DEPTH, HEADS, HEAD_DIM = 2, 3, 16
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # float64; angles reach 100 radians
ALL = [
    "liere",
    "liere(block=16,per_head=False)",
    "liere(block=2,per_layer=False)",
    "comrope",
    "comrope(variant=ap,block=4)",
    "string",
    "string(variant=circulant)",
    "spherical_rope",
    "spherical_rope(learnable=True)",
]
COMMUTING = [text for text in ALL if text.startswith(("comrope", "string"))] + ["liere(block=2)"]


def stage(**changes):
    options = {"depth": DEPTH, "heads": HEADS, "head_dim": HEAD_DIM, "channels": 48, "grid": (3, 4), "dtype": np.dtype(float)}
    return Stage(**options | changes)


def scheme(text, at=None):
    """A scheme with learned numbers that are no longer those of its start."""
    position = create_position(text, at or stage(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for param in jax.tree.leaves(nnx.state(position, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        param.set_value(param[...] + jnp.asarray(0.3 * rng.standard_normal(param.shape), param.dtype))
    return position


def exponential(skew):
    """exp of skew-symmetric matrices [..., b, b]: i times them is Hermitian."""
    values, vectors = np.linalg.eigh(1j * np.asarray(skew))
    return np.real((vectors * np.exp(-1j * values)[..., None, :]) @ vectors.conj().swapaxes(-1, -2))


def matrices(position, grid, key=None):
    """The matrix [D, D] by which each layer turns each token's vector of each head, [layer, L, N, D, D]: what becomes of unit vectors."""
    at = position.stage
    places = (at.prefix + grid[0] * grid[1],) if isinstance(at.pattern, Global) else grid
    units = jnp.eye(at.head_dim).reshape(at.head_dim, *[1] * (len(places) + 1), at.head_dim)
    units = jnp.broadcast_to(units, (at.head_dim, *places, at.heads, at.head_dim))
    graph, state = nnx.split(position)

    @jax.jit
    def turn(state, key):
        terms = nnx.merge(graph, state).terms(grid, key)
        attend = lambda q, k, v: jnp.stack([q, k, v])
        return jnp.stack([terms.layer(layer).transform(units, units, units, attend) for layer in range(at.depth)], axis=1)

    q, k, v = np.asarray(turn(state, key))
    np.testing.assert_array_equal(v, np.broadcast_to(units, v.shape))
    np.testing.assert_array_equal(q, k)
    return np.moveaxis(q.reshape(at.depth, at.head_dim, -1, at.heads, at.head_dim), 1, -1).copy()


def places(grid):
    """Row and column of each token, [L, 2]."""
    return np.array([(y, x) for y in range(grid[0]) for x in range(grid[1])])


def block_diagonal(blocks):
    """Blocks [..., G, b, b] as matrices [..., G b, G b]."""
    *batch, groups, size, _ = blocks.shape
    out = np.zeros((*batch, groups * size, groups * size))
    for g in range(groups):
        out[..., g * size : (g + 1) * size, g * size : (g + 1) * size] = blocks[..., g, :, :]
    return out


# The exponential itself


def random_skew(size, largest, count=40):
    half = np.random.default_rng(size).standard_normal((count, size, size))
    skew = half - half.swapaxes(1, 2)
    angles = np.abs(np.linalg.eigvals(skew)).max(axis=1)
    return skew * (np.linspace(0, largest, count) / angles)[:, None, None]  # the first is zero


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("largest", [0.7, 30.0, 300.0])
def test_expm(size, largest):
    skew = random_skew(size, largest)
    want = exponential(skew)
    with jax.enable_x64(True):
        np.testing.assert_allclose(expm(jnp.asarray(skew)), want, rtol=0, atol=1e-15 * max(10, 10 * largest))
    single = np.asarray(expm(jnp.asarray(skew, jnp.float32)))
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single[0], np.eye(size))
    # A rounding of the matrices themselves moves an angle by 3e-8 times its size; squarings double it that often.
    np.testing.assert_allclose(single, want, rtol=0, atol=2.5e-7 * max(2, 2 * largest))


def test_gradient_of_expm():
    with jax.enable_x64(True):
        skew = jnp.asarray(random_skew(4, 20.0, count=3))
        weights = jnp.asarray(np.random.default_rng(1).standard_normal(skew.shape))
        gradient = jax.jit(jax.grad(lambda a: jnp.sum(weights * expm(a))))(skew)
    for direction in np.random.default_rng(2).standard_normal((3, *skew.shape)):
        slopes = [scipy.linalg.expm_frechet(a, e, compute_expm=False) for a, e in zip(np.asarray(skew), direction, strict=True)]
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), np.sum(np.asarray(weights) * slopes), rtol=1e-11)


def test_expm_of_what_is_no_number_ends():
    assert np.isnan(expm(jnp.full((2, 2), jnp.nan))).any()
    assert not np.isfinite(expm(jnp.asarray([[0, jnp.inf], [-jnp.inf, 0]]))).all()


# Definitions


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "block", "per_layer", "per_head"),
    [
        (Global(), 8, True, True),
        (Global(), 2, False, True),
        (Window((2, 2), (1, 1)), 16, True, False),
        (Neighborhood((3, 3)), 8, False, False),
    ],
)
def test_liere(pattern, block, per_layer, per_head):
    prefix = 2 if pattern == Global() else 0
    position = scheme(f"liere(block={block},per_layer={per_layer},per_head={per_head})", stage(prefix=prefix, pattern=pattern))
    layers, heads, blocks = DEPTH if per_layer else 1, HEADS if per_head else 1, HEAD_DIM // block
    assert position.upper.shape == (layers, heads, 2, blocks, block * (block - 1) // 2)
    upper = np.zeros((layers, heads, 2, blocks, block, block))
    upper[..., *np.triu_indices(block, 1)] = position.upper[...]
    y_generators, x_generators = np.moveaxis((upper - upper.swapaxes(-1, -2))[:, None], 3, 0)  # [layer, 1, N, blocks, b, b]
    for grid in ((3, 4), (5, 2)):  # the map of creation, and another
        turned = matrices(position, grid)
        np.testing.assert_allclose(turned[:, :prefix], np.broadcast_to(np.eye(HEAD_DIM), turned[:, :prefix].shape), **EXACT)
        y, x = (np.linspace(0, n / unit, n)[place] for n, unit, place in zip(grid, (3, 4), places(grid).T, strict=True))
        y, x = (ends.reshape(-1, 1, 1, 1, 1) for ends in (y, x))
        want = block_diagonal(exponential(y * y_generators + x * x_generators))
        np.testing.assert_allclose(turned[:, prefix:], np.broadcast_to(want, turned[:, prefix:].shape), **EXACT)


def test_liere_on_a_map_of_one_patch_turns_nothing():
    turned = matrices(scheme("liere", stage(dtype=np.dtype(np.float32))), (1, 1))
    np.testing.assert_array_equal(turned, np.broadcast_to(np.eye(HEAD_DIM), turned.shape))


def test_liere_starts_anywhere_between_0_and_a_full_turn():
    upper = np.asarray(create_position("liere", stage(heads=9, dtype=np.dtype(np.float32)), rngs=nnx.Rngs(0)).upper[...])
    assert upper.min() >= 0
    assert upper.max() < 2 * math.pi
    assert set(np.floor(upper.ravel() / (2 * math.pi) * 10)) == set(range(10))


def test_liere_has_as_many_parameters_as_its_paper_says():
    base = Stage(depth=12, heads=12, head_dim=64, channels=768, grid=(14, 14), prefix=1)
    position = nnx.eval_shape(lambda: create_position("liere(block=64)", base, rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(position, nnx.Param))) == 580_608


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "variant", "block"),
    [(Global(), "ld", 8), (Global(), "ap", 4), (Window((2, 2), (1, 1)), "ap", 8), (Neighborhood((3, 3)), "ld", 4)],
)
def test_comrope(pattern, variant, block):
    prefix, grid = (1 if pattern == Global() else 0), (5, 2)
    position = scheme(f"comrope(variant={variant},block={block})", stage(prefix=prefix, pattern=pattern))
    learned = np.asarray(position.blocks[...])
    assert learned.shape == (DEPTH, HEADS, HEAD_DIM // block, block, block)
    centre = np.concatenate([np.full((prefix, 2), 0.5), (places(grid) + 0.5) / grid])
    turned = matrices(position, grid)
    assert turned.shape[:3] == (DEPTH, len(centre), HEADS)
    for layer in range(DEPTH):
        for j in range(HEAD_DIM // block):
            turns = centre @ np.asarray(position.scales[layer, 0, :, j]) if variant == "ld" else centre[:, j % 2]
            skew = learned[layer, :, j] - learned[layer, :, j].swapaxes(1, 2)
            own = slice(j * block, (j + 1) * block)
            np.testing.assert_allclose(turned[layer, :, :, own, own], exponential(turns[:, None, None, None] * skew), **EXACT)
            turned[layer, :, :, own, own] = 0
    np.testing.assert_array_equal(turned, 0)


@pytest.mark.parametrize("variant", ["ld", "ap"])
def test_comrope_starts_with_normal_draws(variant):
    wide = stage(heads=24, dtype=np.dtype(np.float32))
    position = create_position(f"comrope(variant={variant},std=0.5)", wide, rngs=nnx.Rngs(0))
    assert 0.48 < np.std(position.blocks[...]) < 0.52
    assert (variant == "ld") == hasattr(position, "scales")
    if variant == "ld":
        assert position.scales.shape == (DEPTH, 1, 2, 2)
        assert len(np.unique(position.scales[...])) == position.scales.size


@pytest.mark.usefixtures("x64")
def test_comrope_moves_each_patch_within_itself_in_training():
    grid, prefix = (20, 30), 2
    position = create_position("comrope", stage(prefix=prefix), rngs=nnx.Rngs(0))
    draw = lambda text: create_position(text, stage(prefix=prefix), rngs=nnx.Rngs(0))._coords(grid, jax.random.key(1))
    still = np.asarray(position._coords(grid, None))
    moved = (np.asarray(draw("comrope")) - still) * grid  # in patches
    np.testing.assert_array_equal(moved[:prefix], 0)
    assert np.abs(moved).max() == pytest.approx(0.5, abs=1e-12)
    on_border = np.isclose(np.abs(moved[prefix:]), 0.5).mean()
    assert 0.25 < on_border < 0.39  # two sigmas of a normal distribution: 0.317 of 1200 draws, give or take 0.013
    inside = moved[prefix:][np.abs(moved[prefix:]) < 0.49]
    assert 0.23 < inside.std() < 0.29  # a normal distribution of 0.5, cut off at 0.49: 0.263
    assert len(np.unique(inside)) == inside.size
    np.testing.assert_array_equal(draw("comrope(perturbation=0)"), still)
    shifted = np.asarray(draw("comrope(perturbation=0,offset=0.2)")) - still
    np.testing.assert_allclose(shifted, np.broadcast_to(shifted[:1], shifted.shape), **EXACT)
    assert (np.abs(shifted[0]) > 0).all()
    assert (np.abs(shifted[0]) < 1).all()
    # What is drawn is what the layers get.
    with_key = matrices(position, grid=(2, 3), key=jax.random.key(2))
    assert np.abs(with_key - matrices(position, grid=(2, 3))).max() > 0.01
    np.testing.assert_array_equal(with_key, matrices(position, grid=(2, 3), key=jax.random.key(2)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "variant"),
    [(Global(), "cayley"), (Global(), "circulant"), (Window((2, 2), (1, 1)), "circulant"), (Neighborhood((3, 3)), "cayley")],
)
def test_string(pattern, variant):
    prefix, grid = (1 if pattern == Global() else 0), (5, 2)
    position = scheme(f"string(variant={variant})", stage(prefix=prefix, pattern=pattern))
    learned, turned = np.asarray(position.learned[...]), matrices(position, grid)
    for layer, head in itertools.product(range(DEPTH), range(HEADS)):
        if variant == "cayley":
            upper = np.zeros((HEAD_DIM, HEAD_DIM))
            upper[np.triu_indices(HEAD_DIM, 1)] = learned[layer, head]
            skew, one = upper - upper.T, np.eye(HEAD_DIM)
            p = (one - skew) @ np.linalg.inv(one + skew)
            generators = np.zeros((2, HEAD_DIM, HEAD_DIM))
            for r in range(HEAD_DIM // 2):  # 2-D RoPE, columns first, channels (r, R + r)
                plane = np.zeros((HEAD_DIM, HEAD_DIM))
                plane[HEAD_DIM // 2 + r, r], plane[r, HEAD_DIM // 2 + r] = 1, -1
                generators[1 if r < HEAD_DIM // 4 else 0] += 100 ** (-4 * (r % (HEAD_DIM // 4)) / HEAD_DIM) * p @ plane @ p.T
        else:
            circulant = np.array([scipy.linalg.circulant(learned[layer, head, axis]) for axis in (0, 1)])
            generators = circulant - circulant.swapaxes(1, 2)
        own = exponential(np.einsum("la,aij->lij", np.concatenate([np.zeros((prefix, 2)), places(grid)]), generators))
        # q and k stay in the basis: it is their products that are defined.
        products = lambda x: np.einsum("qji,kjl->qkil", x, x)
        np.testing.assert_allclose(products(turned[layer, :, head]), products(own), **EXACT)


def test_string_starts_near_the_rope_that_it_is_about():
    for variant, size in (("cayley", (HEAD_DIM * (HEAD_DIM - 1) // 2,)), ("circulant", (2, HEAD_DIM))):
        position = create_position(f"string(variant={variant})", stage(heads=12, dtype=np.dtype(np.float32)), rngs=nnx.Rngs(0))
        assert position.learned.shape == (DEPTH, 12, *size)
        assert 0.018 < np.std(position.learned[...]) < 0.022


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pattern", "learnable"), [(Global(), False), (Global(), True), (Window((2, 2), (1, 1)), False), (Neighborhood((3, 3)), True)]
)
def test_spherical_rope(pattern, learnable):
    prefix = 2 if pattern == Global() else 0
    position = scheme(f"spherical_rope(base=50,learnable={learnable})", stage(prefix=prefix, pattern=pattern))
    fresh = create_position("spherical_rope(base=50,learnable=True)", stage(), rngs=nnx.Rngs(0))
    start = [50 ** (-i / 5) for i in range(5)]
    np.testing.assert_allclose(fresh.freqs[...], np.broadcast_to(start, (DEPTH, HEADS, 2, 5)), **EXACT)
    freqs = np.asarray(position.freqs[...]) if learnable else np.broadcast_to(start, (DEPTH, HEADS, 2, 5))
    about_rows, about_columns = np.array([[[0, 0, 0], [0, 0, -1], [0, 1, 0]], [[0, -1, 0], [1, 0, 0], [0, 0, 0]]])
    grid = (5, 2)
    turned = matrices(position, grid)
    np.testing.assert_array_equal(turned[:, :prefix], np.broadcast_to(np.eye(HEAD_DIM), turned[:, :prefix].shape))
    y, x = places(grid).T.reshape(2, -1, 1, 1, 1, 1)
    of_row, of_column = np.moveaxis(freqs, 2, 0)[:, :, None, ..., None, None]  # [layer, 1, N, groups, 1, 1] each
    want = exponential(y * of_row * about_rows) @ exponential(x * of_column * about_columns)
    np.testing.assert_allclose(turned[:, prefix:, :, :15, :15], block_diagonal(want), **EXACT)
    np.testing.assert_array_equal(turned[:, prefix:, :, 15], np.broadcast_to(np.eye(HEAD_DIM)[15], turned[:, prefix:, :, 15].shape))


# Properties


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("text", ALL)
def test_vectors_keep_their_length(text):
    turned = matrices(scheme(text), (4, 3))[1]
    np.testing.assert_allclose(turned.swapaxes(-1, -2) @ turned, np.broadcast_to(np.eye(HEAD_DIM), turned.shape), **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("text", ALL)
def test_scores_of_commuting_generators_depend_on_differences_only(text):
    height, width = 4, 4
    turned = matrices(scheme(text), (height, width))[1]
    scores = np.einsum("qnji,knjl->qknil", turned, turned)
    scores = scores.reshape(height, width, height, width, HEADS, HEAD_DIM, HEAD_DIM)
    moved = np.abs(scores[1:, 1:, 1:, 1:] - scores[:-1, :-1, :-1, :-1]).max()  # the same pairs, one row and column on
    if text in COMMUTING or "block=2" in text:
        assert moved < 1e-10
    else:
        assert moved > 1e-2


@pytest.mark.parametrize("text", ALL)
def test_bfloat16_vectors_are_turned_in_float32_and_rounded_once(text):
    single = np.dtype(np.float32)
    terms = jax.jit(scheme(text, stage(dtype=single)).terms, static_argnums=0)((3, 4))
    assert all(leaf.dtype == single for leaf in jax.tree.leaves(terms))
    turn = jax.jit(lambda *qkv: terms.layer(1).transform(*qkv, lambda q, k, v: jnp.stack([q, k, v])))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, HEADS, HEAD_DIM)), jnp.bfloat16)
    turned, precise = turn(x, -x, x), turn(*[one.astype(jnp.float32) for one in (x, -x, x)])
    assert turned.dtype == jnp.bfloat16
    assert precise.dtype == jnp.float32
    np.testing.assert_array_equal(turned, precise.astype(jnp.bfloat16))


@pytest.mark.parametrize("text", [text for text in ALL if text != "spherical_rope"])
def test_learned_numbers_get_a_gradient(text):
    key = jax.random.key(0) if text.startswith("comrope") else None  # in training, where that makes a difference
    position = scheme(text, stage(dtype=np.dtype(np.float32)))
    graph, params = nnx.split(position)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 10, HEADS, HEAD_DIM)), jnp.float32)

    def loss(params):
        terms = nnx.merge(graph, params).terms((5, 2), key)
        score = lambda q, k, v: jnp.sum(jnp.sin(jnp.einsum("blnd,bmnd->bnlm", q, k)))
        return sum(terms.layer(layer).transform(x, x[:, ::-1], x, score) for layer in range(DEPTH))

    for gradient in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(gradient).all()
        assert (gradient != 0).any()


@pytest.mark.parametrize("text", ALL)
def test_terms_say_what_differs_between_layers(text):
    terms = scheme(text, stage(dtype=np.dtype(np.float32))).terms((3, 4))
    marked = [leaf for leaf in jax.tree.leaves(terms, is_leaf=lambda x: isinstance(x, PerLayer)) if isinstance(leaf, PerLayer)]
    assert bool(marked) == (text not in ("liere(block=2,per_layer=False)", "spherical_rope"))
    assert all(mark.value.shape[0] == DEPTH for mark in marked)


@pytest.mark.parametrize(
    ("text", "head_dim", "message"),
    [
        ("liere(block=3)", 16, "block=3 does not go with head dimension 16: blocks must fill a head; use block of 2 or 4 or 8 or 16, or a"),
        ("liere", 6, "use block of 2 or 3 or 6, or a model with another width or number of heads"),
        (
            "comrope(variant=ap)",
            8,
            "block=8 does not go with head dimension 8: as many blocks for each axis must fill a head; use block of 2",
        ),
        ("comrope(variant=lp)", 16, "variant=lp is not allowed; use one of ld, ap"),
        ("comrope(perturbation=-1)", 16, "perturbation=-1.0 is not allowed"),
        ("string(variant=qr)", 16, "variant=qr is not allowed; use one of cayley, circulant"),
        ("string", 6, "head dimension 6 must be divisible by 4"),
        ("spherical_rope", 2, "head dimension 2 has no group of three channels"),
    ],
)
def test_heads_and_options_that_do_not_fit_are_refused(text, head_dim, message):
    with pytest.raises(ValueError, match=message):
        create_position(text, stage(head_dim=head_dim, channels=3 * head_dim), rngs=nnx.Rngs(0))
