"""Windows in isotropic ViTs, the paddings of official codes, and positions in both."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.attention import PaddedWindow, make_window
from rope_jax.positions import Stage, Terms, create_position
from rope_jax_kernels import Global
from tests.models.small import compile_read, pictures, run, small_model, some_slow

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
    kernel, bias = np.asarray(attn.qkv.kernel[...]), np.asarray(attn.qkv.bias[...])
    outside = {"mask": None, "tokens": bias, "qkv": np.zeros_like(bias)}[padding]
    qkv = {
        (y, c): x[y, c] @ kernel + bias if y < height and c < width else outside
        for y in range(len(rows))
        for c in range(len(columns))
    }
    qkv = {place: value.reshape(3, HEADS, -1) for place, value in qkv.items() if value is not None}
    out = np.zeros((height, width, channels))
    for y, c in np.ndindex(height, width):
        q = qkv[y, c][0]
        keys = [(i, j) for i, j in qkv if rows[i] == rows[y] and columns[j] == columns[c]]
        k, v = (np.stack([qkv[place][part] for place in keys]) for part in (1, 2))
        logits = np.einsum("nd,knd->nk", q, k) * q.shape[-1] ** -0.5
        logits += np.stack([extra(q, y - i, c - j) * np.ones(HEADS) for i, j in keys], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[y, c] = np.einsum("nk,knd->nd", weights, v).ravel()
    return out @ np.asarray(attn.proj.kernel[...]) + np.asarray(attn.proj.bias[...])


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
    plain = make_window(side, padding)
    pattern = dataclasses.replace(plain, shift=(shift, shift))
    x = np.random.default_rng(0).standard_normal((1, *grid, 48))
    # Terms of the query and the offset; they are not defined for windows that are shifted.
    vectors = np.random.default_rng(1).standard_normal((2, 2 * side - 1, HEAD_DIM))
    terms, extra = Terms(), lambda q, dy, dx: 0.0
    if not shift:
        terms = make_decomposed(vectors, grid, plain).terms(grid).layer(0)
        extra = lambda q, dy, dx: q @ (vectors[0][dy + side - 1] + vectors[1][dx + side - 1])
    got = attn(jnp.asarray(x).reshape(1, -1, 48), grid, pattern, terms)
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
SCHEMES = [
    "ape",
    "axial_rope",
    "decomposed",
    "dinov3",
    "lape(ape)",
    "lpe",
    "rope_mixed+ape",
    "rpb",
    "spherical_rope",
]


@pytest.mark.parametrize("scheme", some_slow(SCHEMES, ["decomposed", "rope_mixed+ape", "rpb"]))
def test_a_window_spanning_the_map_is_global_attention(scheme):
    images = pictures(6, 10)
    everywhere = small_model("vit_s16", scheme, class_token=False)
    want, _ = run(everywhere, images)
    mixed = small_model("vit_s16", scheme, **WINDOWS, window_size=9, global_blocks=(1,))
    np.testing.assert_allclose(run(mixed, images)[0], want, atol=2e-5)


def test_all_blocks_may_be_global():
    """Windows of another size, which no block has, change nothing."""
    images = pictures(8, 12)
    model = small_model("vit_s16", "rope2d", **WINDOWS, window_size=2, global_blocks=(0, 1))
    want, _ = run(small_model("vit_s16", "rope2d", class_token=False), images)
    np.testing.assert_allclose(run(model, images)[0], want, atol=2e-5)


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_distant_tokens_meet_in_global_blocks_only(scan):
    def reach(blocks):
        model = small_model(
            "vit_s16", "none", **WINDOWS, window_size=2, global_blocks=blocks, scan_layers=scan
        )
        see = compile_read(model, lambda model, images, _: model.features(images, norm=False)[0])
        images = pictures(8, 12)
        moved = see(images.at[:, :2, :2].add(1.0)) - see(images)
        return np.abs(moved).max(axis=(0, 3)) > 1e-6

    near = np.zeros((4, 6), bool)
    near[:2, :2] = True
    np.testing.assert_array_equal(reach(()), near)
    assert reach((1,)).all()


def coords(text, grid, pattern, **settings):
    stage = Stage(2, HEADS, HEAD_DIM, 48, (8, 8), pattern=pattern, global_layers=(1,), **settings)
    position = create_position(text, stage, rngs=nnx.Rngs(0))
    return [
        np.asarray(view.terms(grid).rotation.coords).reshape(-1, 2)
        for view in (position, position.with_pattern(Global()))
    ]


def test_coordinates_within_windows_and_on_the_map():
    grid, window = (6, 8), make_window(4, "mask")
    map_coords = np.indices(grid).reshape(2, -1).T
    window_coords = np.indices((4, 4)).reshape(2, -1).T
    for text in ("rope2d", "rope_mixed"):  # integers: the trained range in windows
        for box in ("map", "own"):
            in_windows, on_map = coords(text, grid, window, window_box=box)
            np.testing.assert_array_equal(in_windows, window_coords)
            np.testing.assert_array_equal(on_map, map_coords)
    # A box: the spacing of the map, or that of a map of the window's size.
    for box, spacing in (("map", 2 / 8), ("own", 2 / 4)):
        in_windows, on_map = coords("axial_rope", grid, window, window_box=box)
        np.testing.assert_allclose(in_windows - in_windows[0], window_coords * spacing, atol=1e-6)
        np.testing.assert_allclose(on_map - on_map[0], map_coords * 2 / 8, atol=1e-6)
    # Padded windows may be larger than the map: coordinates continue beyond it.
    in_windows, _ = coords("rope2d", (3, 3), PaddedWindow((4, 4)))
    np.testing.assert_array_equal(in_windows, window_coords)


def test_bias_tables_have_the_size_of_the_window():
    create = lambda **changes: nnx.eval_shape(
        lambda: rope_jax.create_model(
            "vit_s16", position="rpb", depth=2, **WINDOWS | {"global_blocks": (1,)} | changes
        )
    )
    assert create(image_size=512).position.offsets.shape == (2, 12, 27, 27)
    assert create(image_size=512, window_size=7).position.offsets.shape == (2, 12, 13, 13)
