"""Rotary schemes against their definitions, written out token by token in float64."""

import itertools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions import grids
from rope_jax_kernels import Global, Neighborhood, Window, rotate
from tests.positions.schemes import (
    DEPTH,
    EXACT,
    GRID,
    GRIDS,
    HEAD_DIM,
    HEADS,
    compiled_terms,
    normal,
    scheme,
    tokens,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")

PAIRS = HEAD_DIM // 2


def first_rotation(text, on=GRID, **changes):
    return scheme(text, **changes).terms(on).layer(0).rotation


def angles(rotation):
    """theta [N or 1, L, R]."""
    return np.einsum("la,nar->nlr", rotation.coords, rotation.freqs)


# Definitions: the angle of a pair r of a head n at a token (y, x). A head has R pairs; heads that
# share their frequencies count as one.


def rope1d(n, y, x, r, grid, *, base=10000, R=PAIRS):
    return (y * grid[1] + x) * base ** (-r / R)


def rope2d(n, y, x, r, grid, *, base=100, R=PAIRS, span=None, heads=1, alternate=False):
    if alternate:  # Heo et al.'s equation 12: R(n, 2t) has x, R(n, 2t + 1) y
        step, place = r // 2, (x, y)[r % 2]
    else:
        step, place = r % (R // 2), (x if r < R // 2 else y)
    # One ladder with as many rungs as all heads have, dealt out in turn.
    return place * base ** (-(step + n / heads) / ((span or R) / 2))


def centres(index, length, longest):
    return (-length + 2 * index + 1) / longest  # patches of side 2 / longest around 0


def endpoints(index, length, longest):
    return (-1 + 2 * index / (length - 1)) * length / longest if length > 1 else 0.0


def absolute(index, length, longest):
    return index


def ladder(generator, i, count):
    """Rung i of `count`."""
    if generator == "pixel":
        return math.pi * (1 + 4 * i / max(count - 1, 1))
    low, high = {
        "hdit": (math.pi, 10 * math.pi),
        "eq35": (1, 10),
        "table31": (1, math.pi ** math.log(10)),
        "exponential": (1, 1 / 100),
    }[generator]
    return math.exp(math.log(low) + i / count * (math.log(high) - math.log(low)))


def axial_rope(
    n, y, x, r, grid, *, heads=HEADS, R=PAIRS // 2, generator="hdit", coords=centres,
    axis_order="yx", separate=False,
):  # fmt: skip
    axis, step = divmod(r, R // 2)
    sides = grid if separate else (max(grid),) * 2
    place = {"y": coords(y, grid[0], sides[0]), "x": coords(x, grid[1], sides[1])}
    return place[axis_order[axis]] * ladder(generator, step * heads + n, heads * R // 2)


def eva02(n, y, x, r, grid, *, side, base=10000, R=PAIRS):
    """The angle of EVA-02."""
    axis, step = divmod(r, R // 2)
    return (y, x)[axis] / grid[axis] * side * base ** (-step / (R // 2))


def as2drope(n, y, x, r, grid, *, anchor=14, base=10000):
    place = x / grid[1] if r % 2 == 0 else y / grid[0]
    return place * anchor * base ** (-4 * (r // 2) / HEAD_DIM)


def dinov3(n, y, x, r, grid, *, side=None, R=PAIRS, periods=(1, 100), closed=False):
    axis, step = divmod(r, R // 2)
    place = ((y, x)[axis] + 0.5) / (side(grid) if side else grid[axis]) * 2 - 1
    period = periods[0] * (periods[1] / periods[0]) ** (step / (R // 2 - closed))
    return 2 * math.pi * place / period


def cat_rope(n, y, x, r, grid, *, base=10000, half_open=False):
    """Columns from -pi up to pi, rows from pi down to -pi."""
    place, length = ((x, grid[1]), (y, grid[0]))[r % 2]
    if half_open:  # the paper's formula, and the aspect ratio
        place = (2 * place - length) / length * length / max(grid)
    else:
        place = endpoints(place, length, max(grid))
    return (-1) ** r * math.pi * place * base ** (-2 * (r // 2) / HEAD_DIM)


CASES = {
    "rope1d": (rope1d, {}),
    "rope1d(base=10)": (rope1d, {"base": 10}),
    "rope1d(k_rope=4)": (rope1d, {"R": 2}),
    "rope2d": (rope2d, {}),
    "rope2d(base=50)": (rope2d, {"base": 50}),
    "rope2d(k_rope=2)": (rope2d, {"R": 4}),
    "rope2d(k_rope=2,freq_span=full)": (rope2d, {"R": 4, "span": PAIRS}),
    "rope2d(shared=False)": (rope2d, {"heads": HEADS}),
    "rope2d(shared=False,k_rope=2,freq_span=full)": (
        rope2d,
        {"heads": HEADS, "R": 4, "span": PAIRS},
    ),
    "rope2d(order=alternate)": (rope2d, {"alternate": True}),
    "axial_rope": (axial_rope, {}),
    "axial_rope(axis_order=xy,k_rope=1)": (axial_rope, {"axis_order": "xy", "R": PAIRS}),
    "axial_rope(coords=endpoints,shared=True)": (axial_rope, {"coords": endpoints, "heads": 1}),
    "axial_rope(coords=absolute,k_rope=4)": (axial_rope, {"coords": absolute, "R": 2}),
    "axial_rope(aspect=separate)": (axial_rope, {"separate": True}),
    "axial_rope(aspect=separate,coords=endpoints)": (
        axial_rope,
        {"separate": True, "coords": endpoints},
    ),
    "eva02": (eva02, {"side": 16}),
    "eva02(base=100,reference=14,k_rope=2)": (eva02, {"side": 14, "base": 100, "R": 4}),
    "as2drope": (as2drope, {}),
    "as2drope(base=100,anchor=4)": (as2drope, {"base": 100, "anchor": 4}),
    "dinov3": (dinov3, {}),
    "dinov3(normalize_coords=max,k_rope=2)": (dinov3, {"side": max, "R": 4}),
    "dinov3(normalize_coords=min,min_period=0.5,max_period=8)": (
        dinov3,
        {"side": min, "periods": (0.5, 8), "closed": True},
    ),
    "cat_rope": (cat_rope, {}),
    "cat_rope(mode=paper_unit)": (cat_rope, {"base": 1}),
    "cat_rope(coords=half_open)": (cat_rope, {"half_open": True}),
} | {
    f"axial_rope(generator={name},shared={shared})": (
        axial_rope,
        {"generator": name, "heads": 1 if shared else HEADS},
    )
    for name, shared in itertools.product(
        ("eq35", "table31", "exponential", "pixel"), (False, True)
    )
}


@pytest.mark.parametrize("text", CASES)
def test_angles(text):
    definition, options = CASES[text]
    heads = options.get("heads", HEADS if text.startswith("axial_rope") else 1)
    pairs = options.get("R", PAIRS // 2 if text.startswith("axial_rope") else PAIRS)
    position = scheme(text)
    for grid in GRIDS:
        want = [
            [
                [definition(n, y, x, r, grid, **options) for r in range(pairs)]
                for y, x in tokens(grid)
            ]
            for n in range(heads)
        ]
        np.testing.assert_allclose(angles(position.terms(grid).rotation), want, **EXACT)


@pytest.mark.parametrize("coords", ["centres", "endpoints"])
def test_no_pair_aliases_on_the_training_map_with_generator_nyquist(coords):
    for sides in [(1, 1), (1, 2), (2, 2), (1, 3), (4, 3), (7, 7), (14, 9)]:
        position = scheme(f"axial_rope(generator=nyquist,coords={coords})", grid=sides)
        theta = angles(position.terms(sides).rotation).reshape(HEADS, *sides, -1)
        for axis in (1, 2):
            assert np.abs(np.diff(theta, axis=axis)).max(initial=0.0) <= np.pi + 1e-9
    texts = ("axial_rope", "axial_rope(generator=nyquist)")
    np.testing.assert_allclose(*(scheme(text, grid=(20, 8)).freqs() for text in texts))


def test_frequencies_of_nyquist_are_those_of_the_training_map():
    """On larger images too; 2 x 4 patches: pi .. 2 pi."""
    position = scheme("axial_rope(generator=nyquist)", grid=(2, 4))
    before = position.freqs()
    position.resize((16, 32))
    np.testing.assert_array_equal(position.freqs(), before)
    assert np.pi < before.max() < 2 * np.pi


def test_global_blocks_have_the_frequencies_of_nyquist_of_the_map():
    """In windows with boxes of their own they are those of the window."""
    text = "axial_rope(generator=nyquist)"
    windows = {"pattern": Window((4, 4)), "window_box": "own", "global_layers": (1,)}
    position = scheme(text, grid=(16, 16), **windows)
    of_map, of_window = (scheme(text, grid=(n, n)).freqs() for n in (16, 4))
    np.testing.assert_array_equal(position.freqs(), of_window)
    np.testing.assert_array_equal(position.with_pattern(Global()).freqs(), of_map)


# Learned frequencies


@pytest.mark.parametrize(("base", "k_rope"), [(10, 1), (100, 2)])
def test_rope_mixed_starts_as_a_rotated_ladder(base, k_rope):
    mixed = np.asarray(scheme(f"rope_mixed(base={base},k_rope={k_rope})").mixed[...])
    pairs = PAIRS // k_rope
    assert mixed.shape == (DEPTH, HEADS, 2, pairs)
    freqs = mixed[:, :, 1] + 1j * mixed[:, :, 0]  # x is the real axis
    ladder = base ** (-np.arange(pairs // 2) / (pairs // 2))
    turn = freqs[:, :, :1]  # the ladder starts at 1
    np.testing.assert_allclose(np.abs(turn), 1, **EXACT)
    want = np.concatenate([ladder * turn, 1j * ladder * turn], axis=2)
    np.testing.assert_allclose(freqs, want, **EXACT)


def test_rope_mixed_starts_at_uniform_angles():
    first = np.asarray(scheme("rope_mixed", depth=12, heads=16, head_dim=8).mixed[...])[..., 0]
    turns = np.arctan2(first[:, :, 0], first[:, :, 1])
    assert np.diff(np.sort(turns.ravel())).min() > 1e-8, "one angle for each head and layer"
    # 192 uniform draws miss one of eight parts once in 10^10.
    assert set(np.floor(turns.ravel() / (math.pi / 4))) == set(range(-4, 4))


@pytest.mark.parametrize("k_rope", [1, 2])
def test_axial_rope_v1_starts_from_pi_to_5_pi_on_each_axis(k_rope):
    text, count, grid = f"axial_rope_v1(k_rope={k_rope})", PAIRS // (2 * k_rope), (5, 2)
    start = [math.pi * 5 ** (i / (count - 1)) for i in range(count)]
    want = np.broadcast_to(start, (DEPTH, HEADS, 2, count))
    np.testing.assert_allclose(np.exp(scheme(text).log_freqs[...]), want, **EXACT)
    position = trained_scheme(text)
    for layer, freqs in enumerate(np.exp(position.log_freqs[...])):
        want = [
            [[*(centres(y, 5, 5) * rows), *(centres(x, 2, 5) * columns)] for y, x in tokens(grid)]
            for rows, columns in freqs
        ]
        got = angles(position.terms(grid).layer(layer).rotation)
        np.testing.assert_allclose(got, want, **EXACT)


# Prefix tokens, windows, video


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix_tokens_of_as2drope_count_backwards(prefix):
    for grid in GRIDS:
        first = angles(first_rotation("as2drope", grid, prefix=prefix))[0, :prefix]
        places = [divmod(index, grid[1]) for index in range(-prefix, 0)]
        want = [[as2drope(0, y, x, r, grid) for r in range(PAIRS)] for y, x in places]
        np.testing.assert_allclose(first, want, **EXACT)


ROTARY = [
    "rope1d",
    "rope2d(pairing=interleaved)",
    "rope_mixed",
    "axial_rope",
    "axial_rope(coords=endpoints)",
    "axial_rope_v1",
    "eva02",
    "dinov3",
    "cat_rope",
]


@pytest.mark.parametrize("text", ROTARY)
def test_float32_schemes_have_float32_coordinates_and_frequencies(text):
    rotation = first_rotation(text, dtype=np.dtype(np.float32))
    assert rotation.coords.dtype == rotation.freqs.dtype == jnp.float32
    exact = first_rotation(text)
    np.testing.assert_allclose(rotation.coords, exact.coords, rtol=2**-23, atol=0)
    if text != "rope_mixed":  # random draws differ between precisions
        np.testing.assert_allclose(rotation.freqs, exact.freqs, rtol=2**-21, atol=0)


@pytest.mark.parametrize("coords", [centres, endpoints])
def test_axial_rope_may_use_the_window_as_its_box(coords):
    text = f"axial_rope(coords={coords.__name__},window_coords=local_unit)"
    for grid, h, w in (((9, 8), 3, 4), ((2, 8), 2, 4)):  # the second map is no higher than a window
        rotation = first_rotation(text, grid, grid=(9, 8), pattern=Window((3, 4), (1, 2)))
        want = [(coords(y, h, max(h, w)), coords(x, w, max(h, w))) for y, x in tokens((h, w))]
        np.testing.assert_allclose(rotation.coords, want, **EXACT)
    for elsewhere in (Global(), Neighborhood((3, 3))):  # one map, one box
        texts = (text, f"axial_rope(coords={coords.__name__})")
        coords_pair = [first_rotation(text, (5, 6), pattern=elsewhere).coords for text in texts]
        np.testing.assert_array_equal(*coords_pair)


@pytest.mark.parametrize(
    ("head_dim", "split"), [(64, (8, 12, 12)), (16, (2, 3, 3)), (6, (1, 1, 1))]
)
def test_rope3d(head_dim, split):
    grid = (2, 3, 4)
    position = scheme("rope3d", head_dim=head_dim, prefix=1)
    freqs = [[10000 ** (-i / count) for i in range(count)] for count in split]
    want = [[0.0] * (head_dim // 2)]
    for place in tokens(grid):
        want.append([place[axis] * f for axis in range(3) for f in freqs[axis]])
    got = angles(position.terms(grid).rotation)
    np.testing.assert_allclose(got[0], want, **EXACT)
    one_frame = angles(position.terms((3, 4)).rotation)
    np.testing.assert_array_equal(one_frame, got[:, :13])


def test_rope3d_supports_windows_on_maps_only():
    position = scheme("rope3d", grid=(6, 8), pattern=Window((3, 4)))
    coords = position.terms((6, 8)).rotation.coords
    np.testing.assert_array_equal(coords, [(0, y, x) for y, x in tokens((3, 4))])
    with pytest.raises(ValueError, match=r"grid=\(2, 6, 8\) is a video, but windows"):
        position.terms((2, 6, 8))
    with pytest.raises(ValueError, match="three axes need three pairs of channels, but 2 turn"):
        scheme("rope3d(k_rope=4)")


# DINOv3 in training


def affine(text):
    """a and b of coordinate -> a * (coordinate + b) in training, [layer, axis] each."""
    position = scheme(text, depth=400, prefix=5)
    moved, again = (
        np.asarray(position.terms(GRID, jax.random.key(0)).rotation.coords.value) for _ in range(2)
    )
    np.testing.assert_array_equal(moved, again)
    still = np.asarray(position.terms(GRID).rotation.coords)
    np.testing.assert_array_equal(moved[:, :5], 0)  # class and storage tokens
    first, last = 5, -1
    a = (moved[:, last] - moved[:, first]) / (still[last] - still[first])
    b = moved[:, last] / a - still[last]
    np.testing.assert_allclose(moved[:, 5:], a[:, None] * (still[5:] + b[:, None]), **EXACT)
    return a, b


def assert_spread(values, low, high):
    """Checks that values are all different and each tenth of the range has some."""
    values = np.ravel(values)
    assert len(np.unique(values)) == len(values)
    assert low <= values.min()
    assert values.max() <= high
    assert set(np.floor((values - low) / (high - low) * 10)) >= set(range(10))


def test_dinov3_scales_layers_independently_in_training():
    a, b = affine("dinov3")
    np.testing.assert_allclose(b, 0, atol=1e-12)
    np.testing.assert_allclose(a[:, 0], a[:, 1], **EXACT)
    assert_spread(np.log2(a[:, 0]), -1, 1)


def test_dinov3_optionally_shifts_and_stretches_axes():
    a, b = affine("dinov3(shift=0.3,jitter=1.5,rescale=2)")
    assert_spread(b, -0.3, 0.3)  # shifted before it is scaled
    assert 2.5 < a.max() < 3
    assert 2.5 < 1 / a.min() < 3
    assert_spread(np.log(a[:, 0] / a[:, 1]) / math.log(1.5), -2, 2)


# CAT's released form


@jax.jit
def stacked(transform, q, k, v):
    return transform(q, k, v, lambda *qkv: jnp.stack(qkv))


@pytest.mark.parametrize("pattern", [Global(), Window((2, 2)), Neighborhood((3, 3))])
def test_released_cat_rope_multiplies_by_a_gain(pattern):
    prefix = 2 if pattern == Global() else 0
    position = scheme("cat_rope(mode=released)", prefix=prefix, pattern=pattern)
    for grid in GRIDS[:2]:
        theta = np.array(
            [[cat_rope(0, y, x, r, grid, base=1) for r in range(PAIRS)] for y, x in tokens(grid)]
        )
        cos, sin = np.cos(theta), np.sin(theta)
        gain = np.concatenate([cos - sin, cos + sin], axis=1)
        gain = np.concatenate([np.ones((prefix, HEAD_DIM)), gain])
        places = (len(gain),) if pattern == Global() else grid
        q, k, v = normal(3, 2, *places, HEADS, HEAD_DIM)
        got = stacked(compiled_terms(position, grid).transform, q, k, v)
        gain = gain.reshape(*places, 1, HEAD_DIM)
        np.testing.assert_allclose(got, np.stack([q * gain, k * gain, v]), **EXACT)


# Official code: frequencies, coordinates and rotated vectors of Heo et al., HDiT, Meta and timm

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "golden_positions.json").read_text()
)
# Both sides are float32 numbers of size 30 at most, printed with seven decimals.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5}
SMALL = {"depth": 1, "heads": 2, "grid": (2, 3), "dtype": np.dtype(np.float32)}


def golden(name, *shape):
    value = GOLDEN[name]
    if isinstance(value, dict):
        value = value.get("out") or value["v"]
    return np.reshape(value, shape)


def assert_rotates_as(rotation, name):
    """Compares the rotated golden input [N, L, D]."""
    x = jnp.asarray(GOLDEN["input"]["x"], jnp.float32).reshape(1, 2, 6, 16)
    turned, _ = rotate(x, x, rotation, layout="BNLD")
    np.testing.assert_allclose(turned[0], golden(name, 2, 6, 16), **TOLERANCE)


@pytest.mark.parametrize(
    ("text", "name", "pattern"),
    [
        ("rope2d(pairing=interleaved)", "heo_axial_base100", Global()),
        ("rope2d(pairing=interleaved)", "timm_rope_axial_xy", Global()),
        ("rope2d(pairing=interleaved,base=50)", "heo_swin_axial_base50", Window((2, 3))),
        ("dinov3", "dinov3_base100_separate", Global()),
        ("eva02(pairing=interleaved)", "timm_eva02_cat_ij_ref16", Global()),
        ("axial_rope", "hdit_axial_krope2_nonshared", Global()),
    ],
)
def test_rotated_vectors_match_the_official_code(text, name, pattern):
    assert_rotates_as(first_rotation(text, (2, 3), pattern=pattern, **SMALL), name)


def test_rope_mixed_matches_heo():
    want = GOLDEN["heo_mixed"]
    columns, rows = np.reshape(want["freqs"], want["freqs_shape"])
    position = scheme("rope_mixed(pairing=interleaved)", **SMALL)
    position.mixed.set_value(jnp.asarray(np.stack([rows, columns], axis=1)[None], jnp.float32))
    assert_rotates_as(position.terms((2, 3)).layer(0).rotation, "heo_mixed")


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("hdit_freqs_")])
def test_axial_frequencies_match_hdit(name):
    head_dim, heads = map(int, re.findall(r"\d+", name))
    freqs = first_rotation("axial_rope", **SMALL | {"heads": heads, "head_dim": head_dim}).freqs
    ladder = golden(name, *GOLDEN[name]["shape"])
    zeros = np.zeros_like(ladder)
    rows, columns = [ladder, zeros], [zeros, ladder]  # rows turn the first pairs
    np.testing.assert_allclose(freqs[:, 0], np.concatenate(rows, axis=1), **TOLERANCE)
    np.testing.assert_allclose(freqs[:, 1], np.concatenate(columns, axis=1), **TOLERANCE)


@pytest.mark.parametrize(
    ("coords", "name"),
    [(grids.centres, "hdit_pos_2x3"), (grids.endpoints, "hdit_pos_2x3_aligncorners")],
)
def test_coordinates_match_hdit(coords, name):
    np.testing.assert_allclose(coords((2, 3)), golden(name, 2, 3, 2), **TOLERANCE)
