"""Every scheme against its definition, written out token by token in float64.

Tolerance: both sides are float64, and angles reach 150 radians, so 1e-12 leaves room for rounding and for nothing else.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.positions import Stage, create_position
from rope_jax_kernels import Global, Neighborhood, Window

pytestmark = pytest.mark.usefixtures("x64", "quick_compiles")

DEPTH, HEADS, HEAD_DIM, CHANNELS = 3, 3, 16, 48
EXACT = {"rtol": 1e-12, "atol": 1e-12}
GRIDS = [(3, 5), (5, 2), (1, 1)]


def stage(grid=(3, 5), **changes):
    options = {"depth": DEPTH, "heads": HEADS, "head_dim": HEAD_DIM, "channels": CHANNELS, "grid": grid, "dtype": np.dtype(float)}
    return Stage(**options | changes)


def scheme(text, at=None, seed=0):
    return create_position(text, at or stage(), rngs=nnx.Rngs(seed))


def tokens(grid):
    return [(y, x) for y in range(grid[0]) for x in range(grid[1])]


def expected_angles(theta, grid, pairs):
    """theta(head, y, x, pair) for all heads, tokens and pairs."""
    return np.array([[[theta(n, y, x, r) for r in range(pairs)] for y, x in tokens(grid)] for n in range(HEADS)])


# Rotary schemes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("base", "k_rope"), [(10000, 1), (10, 1), (10000, 4)])
def test_rope1d(grid, base, k_rope):
    pairs = HEAD_DIM // (2 * k_rope)
    theta = lambda n, y, x, r: (y * grid[1] + x) * base ** (-2 * r / (HEAD_DIM / k_rope))
    angles = scheme(f"rope1d(base={base},k_rope={k_rope})").terms(grid).rotation.angles()
    np.testing.assert_allclose(np.broadcast_to(angles, (HEADS, *angles.shape[1:])), expected_angles(theta, grid, pairs), **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("options", "base", "k_rope", "shared", "full"),
    [
        ("", 100, 1, True, False),
        ("base=50", 50, 1, True, False),
        ("k_rope=2", 100, 2, True, False),
        ("k_rope=2,freq_span=full", 100, 2, True, True),
        ("shared=False", 100, 1, False, False),
        ("shared=False,k_rope=2,freq_span=full", 100, 2, False, True),
    ],
)
def test_rope2d(grid, options, base, k_rope, shared, full):
    pairs = HEAD_DIM // (2 * k_rope)
    span = HEAD_DIM if full else HEAD_DIM / k_rope

    def theta(n, y, x, r):
        step, coordinate = r % (pairs // 2), (x if r < pairs // 2 else y)
        if not shared:  # one ladder with HEADS times as many rungs, dealt out in turn
            step += n / HEADS
        return coordinate * base ** (-4 * step / span)

    angles = scheme(f"rope2d({options})").terms(grid).rotation.angles()
    assert angles.shape[0] == (1 if shared else HEADS)
    np.testing.assert_allclose(np.broadcast_to(angles, (HEADS, *angles.shape[1:])), expected_angles(theta, grid, pairs), **EXACT)


@pytest.mark.parametrize(("base", "k_rope"), [(10, 1), (100, 2)])
def test_rope_mixed_starts_as_a_turned_ladder(base, k_rope):
    position = scheme(f"rope_mixed(base={base},k_rope={k_rope})")
    pairs = HEAD_DIM // (2 * k_rope)
    mixed = np.asarray(position.mixed[...])
    assert mixed.shape == (DEPTH, HEADS, 2, pairs)
    complex_freqs = mixed[:, :, 1] + 1j * mixed[:, :, 0]  # x is the real axis
    ladder = base ** (-np.arange(pairs // 2) / (pairs // 2))
    turn = complex_freqs[:, :, :1]  # ladder starts at 1
    np.testing.assert_allclose(np.abs(turn), 1, **EXACT)
    np.testing.assert_allclose(complex_freqs, np.concatenate([ladder * turn, 1j * ladder * turn], axis=2), **EXACT)
    angles = np.sort(np.angle(turn).ravel())
    assert np.diff(angles).min() > 1e-6, "one angle for each head and layer"


def test_rope_mixed_starts_at_angles_all_round_the_circle():
    wide = Stage(depth=12, heads=16, head_dim=8, channels=128, grid=(2, 2))  # 192 angles
    first = np.asarray(scheme("rope_mixed", wide).mixed[...])[..., 0]
    eighths = np.floor(np.arctan2(first[:, :, 0], first[:, :, 1]) / (math.pi / 4))
    assert set(eighths.ravel()) == set(range(-4, 4))  # 192 uniform draws miss one of eight parts once in 10^10


def test_rope_mixed_turns_by_both_axes_with_the_frequencies_of_each_layer():
    position = scheme("rope_mixed")
    mixed = np.random.default_rng(0).standard_normal((DEPTH, HEADS, 2, HEAD_DIM // 2))
    position.mixed.set_value(jnp.asarray(mixed))
    for layer in range(DEPTH):
        theta = lambda n, y, x, r, f=mixed[layer]: y * f[n, 0, r] + x * f[n, 1, r]
        angles = position.terms((4, 2)).layer(layer).rotation.angles()
        np.testing.assert_allclose(angles, expected_angles(theta, (4, 2), HEAD_DIM // 2), **EXACT)


LADDERS = {
    "hdit": lambda rung: math.exp(math.log(math.pi) + rung * (math.log(10 * math.pi) - math.log(math.pi))),
    "eq35": lambda rung: math.exp(rung * (math.log(10 * math.pi) - math.log(math.pi))),
    "table31": lambda rung: math.exp(rung * math.log(10) * math.log(math.pi)),
    "exponential": lambda rung: 10000 ** (-rung / 2),
}


def centres(index, length, longest):
    return (-length + 2 * index + 1) / longest  # patches of side 2 / longest around 0


def endpoints(index, length, longest):
    return (-1 + 2 * index / (length - 1)) * length / longest if length > 1 else 0.0


def absolute(index, length, longest):
    return index


@pytest.mark.parametrize(
    ("generator", "coords", "axis_order", "shared", "k_rope"),
    [
        ("hdit", centres, "yx", False, 2),
        ("hdit", centres, "xy", False, 1),
        ("hdit", endpoints, "yx", True, 2),
        ("hdit", absolute, "yx", False, 4),
        ("eq35", centres, "xy", True, 4),
        ("table31", centres, "yx", False, 2),
        ("exponential", absolute, "yx", True, 2),
        ("exponential", endpoints, "xy", False, 2),
    ],
)
@pytest.mark.parametrize("grid", GRIDS)
def test_axial_rope(grid, generator, coords, axis_order, shared, k_rope):
    pairs = HEAD_DIM // (2 * k_rope)

    def theta(n, y, x, r):
        rung = (r % (pairs // 2)) / (pairs // 2) if shared else ((r % (pairs // 2)) * HEADS + n) / (HEADS * (pairs // 2))
        place = {"y": coords(y, grid[0], max(grid)), "x": coords(x, grid[1], max(grid))}
        return place[axis_order[r // (pairs // 2)]] * LADDERS[generator](rung)

    text = f"axial_rope(generator={generator},coords={coords.__name__},axis_order={axis_order},shared={shared},k_rope={k_rope})"
    angles = scheme(text).terms(grid).rotation.angles()
    assert angles.shape[0] == (1 if shared else HEADS)
    np.testing.assert_allclose(np.broadcast_to(angles, (HEADS, *angles.shape[1:])), expected_angles(theta, grid, pairs), **EXACT)


def test_defaults_of_axial_rope():
    spelt_out = "axial_rope(generator=hdit,coords=centres,axis_order=yx,shared=False,k_rope=2,pairing=half)"
    short, full = (scheme(text).terms((3, 5)).rotation for text in ("axial_rope", spelt_out))
    assert short.pairing == full.pairing == "half"
    np.testing.assert_array_equal(short.angles(), full.angles())


# Absolute embeddings


def added(position, grid):
    """What `embed` adds to the tokens."""
    count = position.stage.embed_prefix + grid[0] * grid[1]
    start = jnp.asarray(np.random.default_rng(1).standard_normal((2, count, CHANNELS)))
    table = np.asarray(position.embed(start, grid) - start)
    np.testing.assert_allclose(table[0], table[1], rtol=0, atol=1e-14)  # the rounding of a difference; what is added is of size 1
    return table[0]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("base", [10000, 100])
def test_sincos1d(prefix, base):
    grid = (3, 4)
    wave = lambda place, i: (math.sin if i % 2 == 0 else math.cos)(place / base ** (2 * (i // 2) / CHANNELS))
    want = [[wave(place, i) for i in range(CHANNELS)] for place in range(prefix + 12)]
    np.testing.assert_allclose(added(scheme(f"sincos1d(base={base})", stage(embed_prefix=prefix, prefix=prefix)), grid), want, **EXACT)


def heo(y, x, i, base):
    t, kind = divmod(i, 4)
    return [math.sin, math.cos][kind % 2]([x, y][kind // 2] * base ** (-t / (CHANNELS // 4)))


def lape_order(y, x, i, base):
    half = CHANNELS // 2
    place, i = (x, i) if i < half else (y, i - half)
    return [math.sin, math.cos][i % 2](place * math.exp(-2 * (i // 2) * math.log(base) / half))


def moco(y, x, i, base):
    block, t = divmod(i, CHANNELS // 4)
    return [math.sin, math.cos][block % 2]([x, y][block // 2] * base ** (-t / (CHANNELS // 4 - 1)))


def timm(y, x, i, base):
    block, t = divmod(i, CHANNELS // 4)
    return [math.sin, math.cos][block // 2]([y, x][block % 2] * base ** (-t / (CHANNELS // 4)))


@pytest.mark.parametrize(("order", "wave"), [("heo", heo), ("lape", lape_order), ("moco", moco), ("timm", timm)])
@pytest.mark.parametrize(("prefix", "base"), [(0, 10000), (1, 100)])
def test_sincos2d(order, wave, prefix, base):
    position = scheme(f"sincos2d(order={order},base={base})", stage(embed_prefix=prefix, prefix=prefix))
    for grid in GRIDS:
        want = [[0.0] * CHANNELS] * prefix + [[wave(y, x, i, base) for i in range(CHANNELS)] for y, x in tokens(grid)]
        np.testing.assert_allclose(added(position, grid), want, **EXACT)


def test_sincos2d_is_heos_by_default():
    np.testing.assert_array_equal(scheme("sincos2d").table((3, 4)), scheme("sincos2d(order=heo,base=10000)").table((3, 4)))


def cubic(t):
    t, a = abs(t), -0.75
    return (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def bicubic(values, size):
    """torch's interpolate(mode="bicubic", align_corners=False) of one map [h, w], point by point."""
    h, w = values.shape
    out = np.zeros(size)
    for i, j in itertools.product(*map(range, size)):
        y, x = (i + 0.5) * h / size[0] - 0.5, (j + 0.5) * w / size[1] - 0.5
        for p, q in itertools.product(range(math.floor(y) - 1, math.floor(y) + 3), range(math.floor(x) - 1, math.floor(x) + 3)):
            out[i, j] += cubic(y - p) * cubic(x - q) * values[min(max(p, 0), h - 1), min(max(q, 0), w - 1)]
    return out


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (6, 4), (2, 9)])  # the second has as many tokens as the first
def test_ape(prefix, grid):
    position = scheme("ape", stage((3, 5), embed_prefix=prefix, prefix=1))
    table = np.asarray(position.embedding[...])
    assert table.shape == (prefix + 15, CHANNELS)
    assert 0.018 < table.std() < 0.022  # 0.02 with up to 768 draws
    maps = table[prefix:].reshape(3, 5, CHANNELS)
    resized = np.stack([bicubic(maps[..., c], grid) for c in range(CHANNELS)], axis=-1)
    want = np.concatenate([table[:prefix], (maps if grid == (3, 5) else resized).reshape(-1, CHANNELS)])
    np.testing.assert_allclose(added(position, grid), want, **EXACT)


def test_std_of_ape():
    assert 0.18 < np.std(scheme("ape(std=0.2)").embedding[...]) < 0.22  # the ViT-Lite family's
    np.testing.assert_array_equal(scheme("ape(std=0)").embedding[...], 0)


# Relative position bias


def random_bias(text, at):
    position = scheme(text, at)
    offsets = np.random.default_rng(2).standard_normal(position.offsets.shape)
    position.offsets.set_value(jnp.asarray(offsets))
    return position, offsets


@pytest.mark.parametrize("key_minus_query", [True, False])
def test_rpb_of_a_whole_map_and_of_windows(key_minus_query):
    h, w = 3, 4
    pattern = Global() if key_minus_query else Window((h, w), (1, 2))
    position, offsets = random_bias("rpb", stage((h, w) if key_minus_query else (9, 8), pattern=pattern))
    assert offsets.shape == (DEPTH, HEADS, 2 * h - 1, 2 * w - 1)
    sign = -1 if key_minus_query else 1
    for layer in range(DEPTH):
        bias = np.asarray(position.terms(position.stage.grid).layer(layer).bias)
        assert bias.shape == (HEADS, (2 * h - 1) * (2 * w - 1))
        for (qy, qx), (ky, kx) in itertools.product(tokens((h, w)), repeat=2):
            stored = offsets[layer, :, sign * (qy - ky) + h - 1, sign * (qx - kx) + w - 1]
            np.testing.assert_array_equal(bias[:, (qy - ky + h - 1) * (2 * w - 1) + qx - kx + w - 1], stored)


@pytest.mark.parametrize("grid", [(9, 8), (14, 5)])
def test_rpb_of_neighbourhoods_is_the_table_on_every_map(grid):
    position, offsets = random_bias("rpb", stage((9, 8), pattern=Neighborhood((3, 5), (2, 1))))
    assert offsets.shape == (DEPTH, HEADS, 5, 9)
    for layer in range(DEPTH):
        np.testing.assert_array_equal(position.terms(grid).layer(layer).bias, offsets[layer])


def centre(table, rows, columns):
    """The middle rows x columns of a table [h, w]; zeros where it has none."""
    out = np.zeros((rows, columns))
    for i, j in itertools.product(range(rows), range(columns)):
        y, x = i - rows // 2 + table.shape[0] // 2, j - columns // 2 + table.shape[1] // 2
        if 0 <= y < table.shape[0] and 0 <= x < table.shape[1]:
            out[i, j] = table[y, x]
    return out


# rows of the map grow, columns shrink; a window has the same rules as the map
@pytest.mark.parametrize("grow", ["bicubic", "pad"])
@pytest.mark.parametrize("shrink", ["bicubic", "crop"])
@pytest.mark.parametrize("windows", [False, True])
def test_rpb_on_another_map(grow, shrink, windows):
    position, offsets = random_bias(f"rpb(grow={grow},shrink={shrink})", stage((3, 4), pattern=Window((5, 4)) if windows else Global()))
    bias = np.asarray(position.terms((5, 2)).layer(1).bias).reshape(HEADS, 9, 3)
    for head in range(HEADS):
        table = offsets[1, head]
        table = bicubic(table, (9, 7)) if grow == "bicubic" else centre(table, 9, 7)
        table = bicubic(table, (9, 3)) if shrink == "bicubic" else centre(table, 9, 3)
        np.testing.assert_allclose(bias[head], table if windows else table[::-1, ::-1], **EXACT)


# LaPE


@pytest.mark.parametrize("inner", ["ape", "sincos1d", "sincos2d(order=lape)"])
@pytest.mark.parametrize("embed_prefix", [0, 1])
def test_lape_is_a_chain_of_layer_norms(inner, embed_prefix):
    position = scheme(f"lape({inner})", stage(prefix=1, embed_prefix=embed_prefix))
    rng = np.random.default_rng(3)
    scale, shift = rng.standard_normal((2, DEPTH, CHANNELS))
    np.testing.assert_array_equal(position.scale[...], 1)
    np.testing.assert_array_equal(position.bias[...], 0)
    position.scale.set_value(jnp.asarray(scale))
    position.bias.set_value(jnp.asarray(shift))
    grid = (4, 3)
    start = jnp.asarray(rng.standard_normal((1, 13, CHANNELS)))
    np.testing.assert_array_equal(position.embed(start, grid), start)  # nothing joins the tokens themselves
    p = np.asarray(position.inner.table(grid))
    if not embed_prefix:
        p = np.concatenate([np.zeros((1, CHANNELS)), p])
    terms = position.terms(grid)
    for layer in range(DEPTH):
        mean = p.sum(axis=1, keepdims=True) / CHANNELS
        variance = ((p - mean) ** 2).sum(axis=1, keepdims=True) / CHANNELS
        p = (p - mean) / np.sqrt(variance + 1e-6) * scale[layer] + shift[layer]
        np.testing.assert_allclose(terms.layer(layer).add, p, rtol=1e-10, atol=1e-10)  # divisions by small deviations add up
    assert terms.rotation is None
    assert terms.bias is None
