"""Rotary schemes beyond the training grid, against the formulas of the papers in NumPy."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from rope_jax.models.swin import SwinWindow
from rope_jax.positions.extension import RULES
from rope_jax.positions.rotary import Rope2D
from rope_jax.positions.scheme import SCHEMES
from rope_jax_kernels import Global, Neighborhood, Window
from tests.positions.schemes import HEAD_DIM, HEADS, scheme, stage, trained_scheme

T, N = (4, 6), (10, 9)  # rows and columns of the maps of training and of evaluation
PAIRS = HEAD_DIM // 2
SHARED = "axial_rope(k_rope=1,shared=True"
EXACT = {"rtol": 1e-9, "atol": 1e-9}
pytestmark = pytest.mark.usefixtures("x64")


def base_scheme(text, **changes):
    return trained_scheme(text, std=0.5, **{"grid": T} | changes)


def extended_scheme(text, rule, **changes):
    """The scheme with a rule as its option."""
    inside = f"{text[:-1]}," if text.endswith(")") else f"{text}("
    return base_scheme(f"{inside}extend={rule})", **changes)


def steps(position, grid, layer=0):
    """Radians from one patch to the next, [N, A, R]: of coordinates that start anywhere."""
    rotation = position.terms(grid).layer(layer).rotation
    theta = np.einsum("la,nar->nlar", np.asarray(rotation.coords), np.asarray(rotation.freqs))
    theta = theta.sum(2)[:, position.stage.prefix :].reshape(len(rotation.freqs), *grid, -1)
    return np.stack([theta[:, 1, 0] - theta[:, 0, 0], theta[:, 0, 1] - theta[:, 0, 0]], axis=1)


def geometric(base, s):
    """Radians per patch of M pairs of one axis by NTK-aware scaling: another base."""
    count = PAIRS // 2
    return (base * s ** (count / (count - 1))) ** -(np.arange(count) / count)


def by_parts(w, side, s, alpha=1.0, beta=32.0):
    """NTK-by-parts of one frequency: equation by equation of arXiv 2309.00071, section 3.2."""
    wavelength = 2 * np.pi / w
    ramp = np.clip((side / wavelength - alpha) / (beta - alpha), 0, 1)
    return (1 - ramp) * w / s + ramp * w


S = np.array(N) / T


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("rope2d", "extrapolate"),
        ("rope_mixed", "extrapolate"),
        ("axial_rope(aspect=separate)", "interpolate"),
        ("cat_rope", None),  # its box has the shape of the map
        ("dinov3", "interpolate"),
        ("eva02", "interpolate"),
    ],
)
def test_rules_extrapolate_or_interpolate_from_the_training_grid(text, default):
    before = steps(base_scheme(text), T)
    smaller = (2, 6)
    for grid, scales in ((N, S), (smaller, np.divide(smaller, T))):
        expected = {"extrapolate": before, "interpolate": before / scales[:, None]}
        for rule, want in expected.items():
            np.testing.assert_allclose(steps(extended_scheme(text, rule), grid), want, **EXACT)
        if default:
            np.testing.assert_allclose(steps(base_scheme(text), grid), expected[default], **EXACT)
    for rule in ("ntk", "yarn"):
        np.testing.assert_allclose(steps(extended_scheme(text, rule), smaller), before, **EXACT)


@pytest.mark.parametrize(
    ("text", "base", "unit"),
    [
        ("rope2d(base=50)", 50, 1),
        ("eva02", 10000, 16 / np.array(T)),
        ("dinov3", 100, 2 * np.pi * 2 / np.array(T)),
        (f"{SHARED},generator=exponential,aspect=separate)", 100, 2 / np.array(T)),
    ],
)
def test_ntk_changes_the_base(text, base, unit):
    y, x = (geometric(base, s) * w for s, w in zip(S, np.broadcast_to(unit, 2), strict=True))
    expected = np.array([[[*y, *0 * y], [*0 * x, *x]]])  # rows turn the first pairs
    if text.startswith("rope2d"):  # columns do
        expected = np.roll(expected, PAIRS // 2, axis=-1)
    np.testing.assert_allclose(steps(extended_scheme(text, "ntk"), N), expected, **EXACT)


def test_ntk_of_a_ladder_divided_among_heads():
    # One ladder pi .. 10 pi of all heads: rung j N + n of head n; 10 is the inverse of a base.
    count = PAIRS // 4 * HEADS
    rung = np.arange(count)
    position = extended_scheme("axial_rope(aspect=separate)", "ntk")
    for axis, s in enumerate(S):
        scaled = np.pi * 10 ** (rung / count) * s ** (rung / (count - 1) - 1) * 2 / T[axis]
        of_axis = np.asarray(position.terms(N).rotation.freqs)[:, axis]
        of_axis = of_axis[:, of_axis[0] != 0] * 2 / N[axis]
        np.testing.assert_allclose(of_axis, scaled.reshape(-1, HEADS).T, **EXACT)


def test_rules_keep_directions_of_learned_frequencies():
    before = steps(base_scheme("rope_mixed"), T, layer=1)
    lengths = np.linalg.norm(before, axis=1, keepdims=True)
    logs = np.log(lengths)
    place = (logs.max() - logs) / (logs.max() - logs.min())
    after = steps(extended_scheme("rope_mixed", "ntk"), N, layer=1)
    np.testing.assert_allclose(after, before * S[:, None] ** -place, **EXACT)
    square = steps(extended_scheme("rope_mixed", "ntk"), (8, 12), layer=1)  # both axes grow alike
    np.testing.assert_allclose(square[:, 0] * before[:, 1], square[:, 1] * before[:, 0], **EXACT)


@pytest.mark.parametrize("text", ["rope2d(base=10)", "rope_mixed", "cat_rope", "dinov3"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 32.0), (0.3, 0.8)])
def test_yarn_interpolates_by_parts(text, alpha, beta):
    position = extended_scheme(text, "yarn")
    position.extend(alpha=alpha, beta=beta)
    before = steps(base_scheme(text), T, layer=2)
    lengths = np.linalg.norm(before, axis=1)
    expected = np.array(before)
    for axis, (side, s) in enumerate(zip(T, S, strict=True)):
        expected[:, axis] *= by_parts(lengths, side, s, alpha, beta) / lengths
    np.testing.assert_allclose(steps(position, N, layer=2), expected, **EXACT)


def test_temperature():
    assert extended_scheme("rope2d", "ntk").terms(N).logit_scale == 1
    yarn = extended_scheme("rope2d", "yarn")
    assert yarn.terms(N).logit_scale == pytest.approx((0.1 * np.log(np.prod(S)) + 1) ** 2)
    assert yarn.terms((2, 3)).logit_scale == 1
    with_prefix = extended_scheme("rope2d", "none,log_scale=True", prefix=2)
    for grid in (N, (2, 3)):
        expected = np.log(2 + np.prod(grid)) / np.log(2 + 24)
        assert with_prefix.terms(grid).logit_scale == pytest.approx(expected)
    assert extended_scheme("rope2d", "yarn,log_scale=True").terms(N).logit_scale == pytest.approx(
        np.log(90) / np.log(24)
    )
    summed = scheme("rope2d(extend=yarn)+rpb", grid=T).terms(N)
    assert summed.logit_scale == yarn.terms(N).logit_scale


def test_rules_keep_the_training_resolution():
    for text in ("rope_mixed", "axial_rope", "cat_rope"):
        original = base_scheme(text).terms(T).layer(0)
        for rule in RULES:
            terms = extended_scheme(text, f"{rule},log_scale={rule != 'yarn'}").terms(T).layer(0)
            jax.tree.map(np.testing.assert_array_equal, terms, original)


def freqs(position, grid=N):
    return np.asarray(position.terms(grid).layer(0).rotation.freqs)


def test_single_frequencies_and_axes_of_one_patch():
    text = "cat_rope(mode=paper_unit)"
    ntk, interpolated = (extended_scheme(text, rule) for rule in ("ntk", "interpolate"))
    np.testing.assert_allclose(freqs(ntk), freqs(interpolated), rtol=1e-12)
    line = {"grid": (1, 4)}
    before = freqs(base_scheme("axial_rope", **line), (3, 8))
    after = freqs(extended_scheme("axial_rope", "ntk", **line), (3, 8))
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert not np.allclose(after[:, 1], before[:, 1])


def test_reading_order_and_videos():
    count = PAIRS
    expected = (10000 * (90 / 24) ** (count / (count - 1))) ** -(np.arange(count) / count)
    np.testing.assert_allclose(freqs(extended_scheme("rope1d", "ntk"))[0, 0], expected, **EXACT)
    default = freqs(base_scheme("rope3d"), (5, *N))
    interpolated = freqs(extended_scheme("rope3d", "interpolate"), (5, *N))
    np.testing.assert_allclose(
        interpolated, default / np.array([1, *S])[:, None], **EXACT
    )  # frames extrapolate


def test_windows_count_visible_patches():
    window = Window((2, 3))
    default = freqs(base_scheme("rope2d", pattern=window), T)
    for pattern in (window, Neighborhood((3, 3))):
        same = extended_scheme("rope2d", "ntk", pattern=pattern)
        np.testing.assert_array_equal(freqs(same), default)
        # Coordinates in a box that grows keep the steps of training, not those of the larger map.
        boxed = extended_scheme("axial_rope(aspect=separate)", "interpolate", pattern=pattern)
        np.testing.assert_allclose(freqs(boxed), freqs(boxed, T) * S[:, None], **EXACT)
    larger = extended_scheme("rope2d", "interpolate", pattern=window)
    on_map = freqs(larger.with_pattern(Global()))
    np.testing.assert_allclose(on_map, default / S[:, None], **EXACT)
    larger.stage = stage(grid=N, pattern=Window((4, 3)))
    np.testing.assert_allclose(freqs(larger), default / [[2], [1]], **EXACT)
    swin = extended_scheme("rope2d", "interpolate", pattern=SwinWindow((2, 3)))
    swin.stage = stage(grid=N, pattern=SwinWindow((4, 3)))
    fitted = swin.with_pattern(SwinWindow((4, 3)).fit(N))  # a window of another type
    np.testing.assert_allclose(freqs(fitted), default / [[2], [1]], **EXACT)
    mixed = extended_scheme("rope2d", "interpolate", pattern=window, global_layers=(1,))
    assert not mixed.extends
    mixed.resize(N)
    assert mixed.extends  # its windows do not, its global layer does
    local = extended_scheme("axial_rope(window_coords=local_unit)", "ntk", pattern=window)
    assert not local.extends
    np.testing.assert_array_equal(freqs(local), freqs(local, T))


def test_uneven_coordinates_refuse_ntk(rope_log):
    assert scheme(f"{rope_log}(log_scale=True)", grid=T).terms(N).logit_scale > 1
    with pytest.raises(ValueError, match="extend=ntk needs coordinates that are evenly spaced"):
        scheme(f"{rope_log}(extend=ntk)", grid=T).terms(N)


@pytest.mark.parametrize("rule", ["ntk", "yarn,beta=1.5"])
def test_learned_frequencies_have_gradients(rule):
    graph, params, rest = nnx.split(extended_scheme("axial_rope_v1", rule), nnx.Param, ...)
    run = lambda params: nnx.merge(graph, params, rest).terms(N).layer(0).rotation.freqs
    check_grads(jax.jit(run), (params,), order=1, modes=["rev"])


def test_a_custom_scheme_keeps_its_option_of_the_same_name(monkeypatch):
    class CustomRope(Rope2D):
        def __init__(self, stage, *, rngs, beta: float = 0.5):
            super().__init__(stage, rngs=rngs)
            self.beta = beta

    monkeypatch.setitem(SCHEMES, "own_rope", CustomRope)
    position = scheme("own_rope(beta=2.5,extend=ntk)")
    assert (position.beta, position.extension.beta, position.extension.extend) == (2.5, 32, "ntk")
