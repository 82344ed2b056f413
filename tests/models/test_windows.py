"""Windows in isotropic ViTs, the paddings of official codes, and positions in both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.attention import make_window
from rope_jax.positions import Stage, Terms, create_position
from rope_jax_kernels import Global
from tests.models.definition import dense, softmax, value
from tests.models.small import abstract, pictures, run, small_model
from tests.slow import some_slow

WINDOWS = {"class_token": False, "attention": "window"}
HEADS, HEAD_DIM = 3, 16


def regions(length, size, shift):
    """The window and the side of the map's border of each token of an axis, after a shift.

    Negative for padding.
    """
    padded = -(-length // size) * size
    rolled = (np.arange(padded) - shift) % padded
    return [(r // size, bool(shift and r >= padded - shift)) for r in rolled]


def windowed_attention(x, attn, size, padding, shift, extra=lambda q, dy, dx: 0.0):
    """Attention of a map [H, W, C] in windows, by its definition, token by token.

    `extra` is a term of the logits, of the query and its offset to the key.
    """
    height, width, channels = x.shape
    rows, columns = (regions(n, size, shift) for n in (height, width))
    bias = value(attn.qkv.bias)
    outside = {"mask": None, "tokens": bias, "qkv": 0 * bias}[padding]
    qkv = {
        (y, c): dense(x[y, c], attn.qkv) if y < height and c < width else outside
        for y in range(len(rows))
        for c in range(len(columns))
    }
    qkv = {place: part.reshape(3, HEADS, -1) for place, part in qkv.items() if part is not None}
    out = np.zeros((height, width, channels))
    for y, c in np.ndindex(height, width):
        q = qkv[y, c][0]
        keys = [(i, j) for i, j in qkv if rows[i] == rows[y] and columns[j] == columns[c]]
        k, v = (np.stack([qkv[place][part] for place in keys]) for part in (1, 2))
        logits = np.einsum("nd,knd->nk", q, k) * q.shape[-1] ** -0.5
        logits += np.stack([extra(q, y - i, c - j) * np.ones(HEADS) for i, j in keys], axis=1)
        out[y, c] = np.einsum("nk,knd->nd", softmax(logits), v).ravel()
    return dense(out, attn.proj)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("grid", "side", "shift", "padding"),
    [
        ((4, 5), 3, 0, "mask"),
        ((4, 5), 3, 0, "tokens"),
        ((4, 5), 3, 0, "qkv"),
        ((4, 5), 3, 1, "mask"),
        ((4, 5), 3, 1, "tokens"),
        ((4, 5), 3, 1, "qkv"),
        ((2, 5), 4, 0, "mask"),  # a window that is larger than the map
        ((2, 5), 4, 0, "tokens"),
        ((2, 5), 4, 0, "qkv"),
        ((4, 3), 4, 2, "tokens"),  # it keeps its shift, as in official codes
        ((4, 3), 4, 2, "qkv"),
    ],
)
def test_windowed_attention_matches_the_definition(grid, side, shift, padding):
    model = small_model("vit_s16", "none", dtype=jnp.float64, **WINDOWS, window_size=side)
    attn = model.blocks[0].attn
    plain = make_window((side, side), padding)
    pattern = dataclasses.replace(plain, shift=(shift, shift))
    x = np.random.default_rng(0).standard_normal((1, *grid, 48))
    # Terms of the query and the offset; they are not defined for windows that are shifted.
    vectors = np.random.default_rng(1).standard_normal((2, 2 * side - 1, HEAD_DIM))
    terms, extra = Terms(), lambda q, dy, dx: 0.0
    if not shift:
        terms = make_decomposed(vectors, grid, plain).terms(grid).layer(0)
        extra = lambda q, dy, dx: q @ (vectors[0][dy + side - 1] + vectors[1][dx + side - 1])
    got = jax.jit(lambda x: attn(x, grid, pattern, terms))(x.reshape(1, -1, 48))
    want = windowed_attention(x[0], attn, side, padding, shift, extra)
    np.testing.assert_allclose(np.asarray(got).reshape(want.shape), want, atol=1e-12)


def make_decomposed(vectors, grid, pattern):
    """The scheme with given vectors; a window that spans the map has the central offsets."""
    settings = {"pattern": pattern, "global_layers": (), "dtype": np.dtype(float)}
    stage = Stage(1, HEADS, HEAD_DIM, 48, grid, **settings)
    position = create_position("decomposed", stage, rngs=nnx.Rngs(0))
    for tables, values in zip((position.rows, position.columns), vectors, strict=True):
        first = (len(values) - len(tables[0][...])) // 2
        tables[0].set_value(jnp.asarray(values[first : len(values) - first]))
    return position


# On a map that a window spans, windows are global attention, whatever the position.
# Windows of another size, which no block has, change nothing.
SCHEMES = ["ape", "axial_rope", "decomposed", "dinov3", "lape(ape)", "lpe", "rope_mixed+ape", "rpb"]
SPANNING = [(scheme, 9, (1,)) for scheme in (*SCHEMES, "spherical_rope")] + [("rope2d", 2, (0, 1))]
QUICK = [SPANNING[n] for n in (2, 6, 7, -1)]


@pytest.mark.parametrize(("scheme", "size", "blocks"), some_slow(SPANNING, QUICK))
def test_a_window_spanning_the_map_is_global_attention(scheme, size, blocks):
    images = pictures(6, 10)
    want, _ = run(small_model("vit_s16", scheme, class_token=False), images)
    mixed = small_model("vit_s16", scheme, **WINDOWS, window_size=size, global_blocks=blocks)
    np.testing.assert_allclose(run(mixed, images)[0], want, atol=2e-5)


@pytest.mark.parametrize(
    ("text", "box", "in_windows", "on_map"),
    [
        ("rope2d", "map", 1, 1),  # integers: the trained range in windows
        ("rope2d", "own", 1, 1),
        # A box: the spacing of the map, or that of a map of the window's size.
        ("axial_rope", "map", 2 / 8, 2 / 8),
        ("axial_rope", "own", 2 / 4, 2 / 8),
    ],
)
def test_coordinates_within_windows_and_on_the_map(text, box, in_windows, on_map):
    """Padded windows may be larger than the map: coordinates continue beyond it."""
    settings = {"pattern": make_window((4, 4), "tokens"), "global_layers": (1,), "window_box": box}
    stage = Stage(2, HEADS, HEAD_DIM, 48, (8, 8), **settings)
    position = create_position(text, stage, rngs=nnx.Rngs(0))
    everywhere = position.with_pattern(Global())
    cases = [(position, (6, 8), (4, 4), in_windows), (everywhere, (6, 8), (6, 8), on_map)]
    cases += [(position, (3, 3), (4, 4), 1)] if text == "rope2d" else []
    for view, grid, size, spacing in cases:
        coords = np.asarray(view.terms(grid).rotation.coords).reshape(-1, 2)
        expected = np.indices(size).reshape(2, -1).T * spacing
        np.testing.assert_allclose(coords - coords[0], expected, atol=1e-6)


def test_bias_tables_have_the_size_of_the_window():
    settings = WINDOWS | {"position": "rpb", "depth": 2, "global_blocks": (1,), "image_size": 512}
    assert abstract("vit_s16", **settings).position.offsets.shape == (2, 12, 27, 27)
    model = abstract("vit_s16", window_size=7, **settings)
    assert model.position.offsets.shape == (2, 12, 13, 13)
