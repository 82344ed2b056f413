"""Every scheme against its definition, written out token by token in float64.

Tolerance: both sides are float64, and angles reach 150 radians, so 1e-12 leaves room for rounding and for nothing else.
"""

import itertools
import math

import jax
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


@pytest.mark.parametrize("grid", GRIDS)
def test_rope2d_in_the_order_of_heos_equation_12(grid):
    theta = lambda n, y, x, r: (x, y)[r % 2] * 100 ** (-(r // 2) / (HEAD_DIM / 4))  # R(n, 2t) has x, R(n, 2t + 1) y
    angles = scheme("rope2d(order=alternate)").terms(grid).rotation.angles()
    np.testing.assert_allclose(angles, expected_angles(theta, grid, HEAD_DIM // 2)[:1], **EXACT)


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


@pytest.mark.parametrize("shared", [True, False])
def test_axial_rope_in_pixels_has_equal_steps_with_both_ends(shared):
    count = HEAD_DIM // 4 * (1 if shared else HEADS)
    freqs = scheme(f"axial_rope(generator=pixel,coords=endpoints,k_rope=1,shared={shared})").terms((3, 3)).rotation.freqs
    for axis in (0, 1):
        first = axis * HEAD_DIM // 4
        ladder = np.asarray(freqs[:, axis, first : first + HEAD_DIM // 4]).T.ravel()  # dealt out to the heads in turn
        np.testing.assert_allclose(ladder, [math.pi * (1 + 4 * i / (count - 1)) for i in range(count)], **EXACT)


@pytest.mark.parametrize("coords", [centres, endpoints])
def test_a_window_of_axial_rope_may_be_the_box_itself(coords):
    windows = stage((9, 8), pattern=Window((3, 4), (1, 2)))
    text = f"axial_rope(coords={coords.__name__},window_coords=local_unit)"
    rotation = scheme(text, windows).terms((9, 8)).rotation
    np.testing.assert_allclose(rotation.coords, [(coords(y, 3, 4), coords(x, 4, 4)) for y, x in tokens((3, 4))], **EXACT)
    small = scheme(text, windows).terms((2, 8)).rotation.coords  # the window is as high as the map
    np.testing.assert_allclose(small, [(coords(y, 2, 4), coords(x, 4, 4)) for y, x in tokens((2, 4))], **EXACT)
    for elsewhere in (Global(), Neighborhood((3, 3))):  # one map, one box
        same = [
            scheme(name, stage(pattern=elsewhere)).terms((5, 6)).rotation.coords for name in (text, f"axial_rope(coords={coords.__name__})")
        ]
        np.testing.assert_array_equal(*same)


@pytest.mark.parametrize("coords", [centres, endpoints])
@pytest.mark.parametrize("grid", GRIDS)
def test_either_side_of_the_box_of_axial_rope_may_be_minus_1_to_1(coords, grid):
    rotation = scheme(f"axial_rope(coords={coords.__name__},aspect=separate)").terms(grid).rotation
    np.testing.assert_allclose(
        rotation.coords, [(coords(y, grid[0], grid[0]), coords(x, grid[1], grid[1])) for y, x in tokens(grid)], **EXACT
    )


def test_defaults_of_axial_rope():
    options = "k_rope=2,shared=False,generator=hdit,coords=centres,aspect=isotropic,axis_order=yx,window_coords=global_spacing,pairing=half"
    short, full = (scheme(text).terms((3, 5)).rotation for text in ("axial_rope", f"axial_rope({options})"))
    assert short.pairing == full.pairing == "half"
    np.testing.assert_array_equal(short.angles(), full.angles())


def test_rope2d_and_dinov3_are_corners_of_the_thesis_ablation():
    corner = "axial_rope(k_rope=1,shared=True,generator=exponential,coords=absolute,axis_order={})"
    plane, rows_first, meta = (scheme(text).terms((3, 5)).rotation for text in ("rope2d", corner.format("yx"), "dinov3"))
    np.testing.assert_array_equal(plane.angles(), scheme(corner.format("xy")).terms((3, 5)).rotation.angles())
    np.testing.assert_allclose(meta.freqs, 2 * math.pi * rows_first.freqs, **EXACT)


@pytest.mark.parametrize("k_rope", [1, 2])
def test_axial_rope_v1_starts_between_pi_and_5_pi_and_learns_each_axis(k_rope):
    position = scheme(f"axial_rope_v1(k_rope={k_rope})")
    per_axis = HEAD_DIM // (4 * k_rope)
    start = [math.pi * 5 ** (i / (per_axis - 1)) for i in range(per_axis)]
    assert position.log_freqs.shape == (DEPTH, HEADS, 2, per_axis)
    np.testing.assert_allclose(np.exp(position.log_freqs[...]), np.broadcast_to(start, (DEPTH, HEADS, 2, per_axis)), **EXACT)
    learned = np.random.default_rng(0).standard_normal((DEPTH, HEADS, 2, per_axis))
    position.log_freqs.set_value(jnp.asarray(learned))
    grid = (5, 2)
    for layer in range(DEPTH):

        def theta(n, y, x, r, log_freqs=learned[layer]):
            axis, step = divmod(r, per_axis)
            return centres((y, x)[axis], grid[axis], max(grid)) * math.exp(log_freqs[n, axis, step])

        angles = position.terms(grid).layer(layer).rotation.angles()
        np.testing.assert_allclose(angles, expected_angles(theta, grid, 2 * per_axis), **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("options", "base", "reference", "k_rope"), [("", 10000, 16, 1), ("base=100,reference=14,k_rope=2", 100, 14, 2)])
def test_eva02(grid, options, base, reference, k_rope):
    per_axis = HEAD_DIM // (4 * k_rope)

    def theta(n, y, x, r):
        axis, step = divmod(r, per_axis)
        return (y, x)[axis] / grid[axis] * reference * base ** (-step / per_axis)

    angles = scheme(f"eva02({options})").terms(grid).rotation.angles()
    np.testing.assert_allclose(angles, expected_angles(theta, grid, 2 * per_axis)[:1], **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("options", "base", "anchor"), [("", 10000, 14), ("base=100,anchor=4", 100, 4)])
def test_as2drope(grid, prefix, options, base, anchor):
    def theta(index, r):
        y, x = index // grid[1], index % grid[1]
        place = x / grid[1] * anchor if r % 2 == 0 else y / grid[0] * anchor
        return place * base ** (-4 * (r // 2) / HEAD_DIM)

    count = grid[0] * grid[1]
    want = [[theta(index, r) for r in range(HEAD_DIM // 2)] for index in range(-prefix, count)]
    angles = scheme(f"as2drope({options})", stage(prefix=prefix)).terms(grid).rotation.angles()
    np.testing.assert_allclose(angles[0], want, **EXACT)


def test_as2drope_on_the_map_of_training_has_its_class_token_in_the_last_column_above_the_map():
    coords = scheme("as2drope", stage((14, 14), prefix=1)).terms((14, 14)).rotation.coords
    np.testing.assert_allclose(coords[:3], [(-1, 13), (0, 0), (0, 1)], **EXACT)


@pytest.mark.parametrize(("head_dim", "split"), [(64, (8, 12, 12)), (16, (2, 3, 3)), (6, (1, 1, 1))])
def test_rope3d(head_dim, split):
    grid = (2, 3, 4)
    at = stage(head_dim=head_dim, channels=3 * head_dim, prefix=1)
    rotation = scheme("rope3d", at).terms(grid).rotation
    want = [[0.0] * (head_dim // 2)]
    for place in itertools.product(*map(range, grid)):
        want.append([place[axis] * 10000 ** (-i / count) for axis, count in enumerate(split) for i in range(count)])
    np.testing.assert_allclose(rotation.angles()[0], want, **EXACT)
    one_frame = scheme("rope3d", at).terms((3, 4)).rotation
    np.testing.assert_array_equal(one_frame.angles(), rotation.angles()[:, :13])


def test_rope3d_of_a_map_goes_with_windows_and_of_a_video_does_not():
    position = scheme("rope3d", stage((6, 8), pattern=Window((3, 4))))
    np.testing.assert_array_equal(position.terms((6, 8)).rotation.coords, [(0, y, x) for y, x in tokens((3, 4))])
    with pytest.raises(ValueError, match=r"grid=\(2, 6, 8\) is a video, but windows and neighbourhoods are those of a map"):
        position.terms((2, 6, 8))
    with pytest.raises(ValueError, match="three axes need three pairs of channels, but 2 turn: use a smaller k_rope"):
        scheme("rope3d(k_rope=4)")


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("normalize", "k_rope"), [("separate", 1), ("max", 2), ("min", 1)])
@pytest.mark.parametrize("periods", [("base=100", lambda i, m: 100 ** (i / m)), ("min_period=0.5,max_period=8", None)])
def test_dinov3(grid, normalize, k_rope, periods):
    pairs = HEAD_DIM // (2 * k_rope)
    per_axis = pairs // 2
    text, period = periods
    period = period or (lambda i, m: 0.5 * (8 / 0.5) ** (i / (m - 1)))
    side = {"separate": grid, "max": (max(grid),) * 2, "min": (min(grid),) * 2}[normalize]

    def theta(n, y, x, r):
        axis = r // per_axis
        place = ((y, x)[axis] + 0.5) / side[axis] * 2 - 1
        return 2 * math.pi * place / period(r % per_axis, per_axis)

    angles = scheme(f"dinov3(normalize_coords={normalize},k_rope={k_rope},{text})").terms(grid).rotation.angles()
    np.testing.assert_allclose(angles, expected_angles(theta, grid, pairs)[:1], **EXACT)


def affine(text, depth=400):
    """Along each axis and in each of many layers, in training: a and b of coordinate -> a * (coordinate + b); [layer, axis] each."""
    position = scheme(text, stage(depth=depth, prefix=5))
    moved, again = (np.asarray(position.terms((3, 5), jax.random.key(0)).rotation.coords.value) for _ in range(2))
    np.testing.assert_array_equal(moved, again)
    still = np.asarray(position.terms((3, 5)).rotation.coords)
    np.testing.assert_array_equal(moved[:, :5], 0)  # class and storage tokens
    first, last = 5, -1
    a = (moved[:, last] - moved[:, first]) / (still[last] - still[first])
    b = moved[:, last] / a - still[last]
    np.testing.assert_allclose(moved[:, 5:], a[:, None] * (still[5:] + b[:, None]), **EXACT)
    return a, b


def spread(values, low, high):
    """Whether values are all different, and fill a range evenly: no tenth of it without one."""
    values = np.ravel(values)
    assert len(np.unique(values)) == len(values)
    assert low <= values.min()
    assert values.max() <= high
    return set(np.floor((values - low) / (high - low) * 10)) >= set(range(10))


def test_dinov3_in_training_scales_each_layer_by_itself():
    a, b = affine("dinov3")
    np.testing.assert_allclose(b, 0, atol=1e-12)
    np.testing.assert_allclose(a[:, 0], a[:, 1], **EXACT)
    assert spread(np.log2(a[:, 0]), -1, 1)


def test_dinov3_in_training_shifts_and_stretches_each_axis_first_if_told_to():
    a, b = affine("dinov3(shift=0.3,rescale=1)")
    np.testing.assert_allclose(a, 1, **EXACT)
    assert spread(b, -0.3, 0.3)
    a, _ = affine("dinov3(jitter=1.5,rescale=1)")
    assert spread(np.log(a) / math.log(1.5), -1, 1)
    a, b = affine("dinov3(shift=0.3,jitter=1.5,rescale=2)")
    assert spread(b, -0.3, 0.3), "shifted before it is scaled"
    assert 2.5 < a.max() < 3
    assert 2.5 < 1 / a.min() < 3
    assert spread(np.log(a[:, 0] / a[:, 1]) / math.log(1.5), -2, 2)


def test_dinov3_refuses_factors_below_1_and_half_a_range_of_periods():
    for text, message in (
        ("jitter=0.5", "jitter=0.5 is not allowed; it is the largest factor: use 1"),
        ("rescale=0.9", "rescale=0.9"),
        ("max_period=3", "min_period=0.0 is not allowed; use a number above 0"),
        ("min_period=3,max_period=2", "min_period=3.0 is longer than max_period=2.0: swap them"),
        ("shift=-1", "shift=-1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            scheme(f"dinov3({text})")


CAT_FREQS = {"paper": lambda i: 10000 ** (-2 * i / HEAD_DIM), "paper_unit": lambda i: 1.0, "released": lambda i: 1.0}


def cat_theta(grid, mode):
    def theta(n, y, x, r):
        # Columns from -pi up to pi, rows from pi down to -pi.
        place = endpoints(x, grid[1], max(grid)) if r % 2 == 0 else -endpoints(y, grid[0], max(grid))
        return math.pi * place * CAT_FREQS[mode](r // 2)

    return theta


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("mode", ["paper", "paper_unit"])
def test_cat_rope(grid, mode):
    angles = scheme(f"cat_rope(mode={mode})").terms(grid).rotation.angles()
    np.testing.assert_allclose(angles, expected_angles(cat_theta(grid, mode), grid, HEAD_DIM // 2)[:1], **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
def test_cat_rope_without_pi_itself(grid):
    place = lambda i, n: (2 * i - n) / n * math.pi * n / max(grid)  # the paper's formula, and the aspect ratio
    theta = lambda n, y, x, r: (place(x, grid[1]) if r % 2 == 0 else -place(y, grid[0])) * CAT_FREQS["paper"](r // 2)
    angles = scheme("cat_rope(coords=half_open)").terms(grid).rotation.angles()
    np.testing.assert_allclose(angles, expected_angles(theta, grid, HEAD_DIM // 2)[:1], **EXACT)


def test_cat_rope_is_the_papers_by_default():
    spelt_out = "cat_rope(mode=paper,base=10000,coords=endpoints,pairing=half,k_rope=1)"
    short, full = (scheme(text).terms((3, 5)).rotation for text in ("cat_rope", spelt_out))
    np.testing.assert_array_equal(short.angles(), full.angles())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("pattern", [Global(), Window((2, 2)), Neighborhood((3, 3))])
def test_released_cat_rope_multiplies_by_a_gain(grid, pattern):
    prefix = 2 if pattern == Global() else 0
    theta = expected_angles(cat_theta(grid, "released"), grid, HEAD_DIM // 2)
    gain = np.concatenate([np.cos(theta) - np.sin(theta), np.cos(theta) + np.sin(theta)], axis=2)  # [N, L, D]
    gain = np.concatenate([np.ones((HEADS, prefix, HEAD_DIM)), gain], axis=1).swapaxes(0, 1)
    places = (len(gain),) if pattern == Global() else grid
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, *places, HEADS, HEAD_DIM)))
    transform = scheme("cat_rope(mode=released)", stage(prefix=prefix, pattern=pattern)).terms(grid).transform
    turned = transform(q, k, v, lambda q, k, v: jnp.stack([q, k, v]))
    want = np.stack([x * gain.reshape(*places, HEADS, HEAD_DIM) for x in (q, k)] + [v])
    np.testing.assert_allclose(turned, want, **EXACT)


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
