"""Rotary schemes beyond the training grid, against the formulas of the papers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

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


def extended_scheme(text, rule, **changes):
    """The scheme with a rule as its option."""
    inside = f"{text[:-1]}," if text.endswith(")") else f"{text}("
    return trained_scheme(f"{inside}extend={rule})", std=0.5, **{"grid": T} | changes)


def steps(position, grid, layer=0, **options):
    """Radians from one patch to the next, [N, A, R]: of coordinates that start anywhere."""
    rotation = position.terms(grid, **options).layer(layer).rotation
    theta = np.einsum("la,nar->nlar", np.asarray(rotation.coords), np.asarray(rotation.freqs))
    theta = theta.sum(2)[:, position.stage.prefix :].reshape(len(rotation.freqs), *grid, -1)
    return np.stack([theta[:, 1, 0] - theta[:, 0, 0], theta[:, 0, 1] - theta[:, 0, 0]], axis=1)


def geometric(base, s):
    """Radians per patch of M pairs of one axis by NTK-aware scaling: another base."""
    count = PAIRS // 2
    return (base * s ** (count / (count - 1))) ** -(np.arange(count) / count)


def axes(y, x):
    """[1, 2, R] of a scheme whose rows turn the first pairs."""
    zeros = np.zeros_like(y)
    return np.array([[[*y, *zeros], [*zeros, *x]]])


def by_parts(w, side, s, alpha=1.0, beta=32.0):
    """NTK-by-parts of one frequency: equation by equation of arXiv 2309.00071, section 3.2."""
    wavelength = 2 * np.pi / w
    turns = side / wavelength
    if turns < alpha:
        ramp = 0.0
    elif turns > beta:
        ramp = 1.0
    else:
        ramp = (turns - alpha) / (beta - alpha)
    return (1 - ramp) * w / s + ramp * w


S = np.array(N) / T


def test_position_interpolation_scales_coordinates():
    for text in ("rope2d", "rope_mixed", "axial_rope(aspect=separate)", "cat_rope", "dinov3"):
        before = steps(base_scheme(text), T)
        after = steps(extended_scheme(text, "interpolate"), N)
        np.testing.assert_allclose(after, before / S[:, None], **EXACT)
        after = steps(extended_scheme(text, "extrapolate"), N)
        np.testing.assert_allclose(after, before, **EXACT)


def base_scheme(text, **changes):
    return trained_scheme(text, std=0.5, **{"grid": T} | changes)


def test_default_rules_of_box_and_integer_coordinates():
    for text, rule in (
        ("rope2d", "extrapolate"),
        ("rope_mixed", "extrapolate"),
        ("axial_rope(aspect=separate)", "interpolate"),
        ("dinov3", "interpolate"),
        ("eva02", "interpolate"),
    ):
        default, explicit = (
            p.terms(N).layer(1).rotation for p in (base_scheme(text), extended_scheme(text, rule))
        )
        np.testing.assert_allclose(default.angles(), explicit.angles(), **EXACT)


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
    expected = axes(y, x)
    if text.startswith("rope2d"):  # columns turn the first pairs
        expected = np.roll(expected, PAIRS // 2, axis=-1)
    np.testing.assert_allclose(steps(extended_scheme(text, "ntk"), N), expected, **EXACT)


def test_ntk_of_a_ladder_divided_among_heads():
    # One ladder pi .. 10 pi of all heads: rung j N + n of head n; 10 is the inverse of a base.
    count = PAIRS // 4 * HEADS
    ratio = 10 ** (1 / count)
    for axis, s in enumerate(S):
        lowest_last = np.pi * 10 ** (1 - 1 / count) / ratio ** np.arange(count)
        scaled = lowest_last * s ** -(np.arange(count) / (count - 1)) * 2 / T[axis]
        dealt = scaled[::-1].reshape(-1, HEADS).T
        position = extended_scheme("axial_rope(aspect=separate)", "ntk")
        rotation = position.terms(N).rotation
        freqs = np.asarray(rotation.freqs)[:, axis]
        freqs = freqs[:, freqs[0] != 0] * 2 / N[axis]
        np.testing.assert_allclose(freqs, dealt, **EXACT)


def test_rules_keep_directions_of_learned_frequencies():
    before = steps(base_scheme("rope_mixed"), T, layer=1)
    lengths = np.linalg.norm(before, axis=1, keepdims=True)
    logs = np.log(lengths)
    place = (logs.max() - logs) / (logs.max() - logs.min())
    after = steps(extended_scheme("rope_mixed", "ntk"), N, layer=1)
    np.testing.assert_allclose(after, before * S[:, None] ** -place, **EXACT)
    assert place.min() == 0
    assert place.max() == 1
    square = steps(extended_scheme("rope_mixed", "ntk"), (8, 12), layer=1)  # both axes grow alike
    np.testing.assert_allclose(square[:, 0] * before[:, 1], square[:, 1] * before[:, 0], **EXACT)


@pytest.mark.parametrize("text", ["rope2d(base=10)", "rope_mixed", "cat_rope", "dinov3"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 32.0), (0.3, 0.8)])
def test_yarn_interpolates_by_parts(text, alpha, beta):
    position = extended_scheme(text, "yarn")
    position.extend(alpha=alpha, beta=beta)
    before = steps(base_scheme(text), T, layer=2)
    lengths = np.linalg.norm(before, axis=1)
    expected = [
        [
            [
                0 if w == 0 else w * by_parts(length, T[axis], S[axis], alpha, beta) / length
                for w, length in zip(row, lengths[head], strict=True)
            ]
            for axis, row in enumerate(rows)
        ]
        for head, rows in enumerate(before)
    ]
    np.testing.assert_allclose(steps(position, N, layer=2), expected, **EXACT)


def test_temperature():
    patches = np.prod(S)
    assert extended_scheme("rope2d", "ntk").terms(N).logit_scale == 1
    yarn = extended_scheme("rope2d", "yarn")
    assert yarn.terms(N).logit_scale == pytest.approx((0.1 * np.log(patches) + 1) ** 2)
    assert yarn.terms((2, 3)).logit_scale == 1
    with_prefix = extended_scheme("rope2d", "none,log_scale=True", prefix=2)
    expected = [np.log(2 + np.prod(grid)) / np.log(2 + 24) for grid in (N, (2, 3))]
    scales = [with_prefix.terms(grid).logit_scale for grid in (N, (2, 3))]
    assert scales == pytest.approx(expected)
    assert scales[1] < 1 < scales[0]
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
            assert terms.logit_scale == 1
            assert jnp.array_equal(terms.rotation.freqs, original.rotation.freqs)
            assert jnp.array_equal(terms.rotation.coords, original.rotation.coords)


def test_smaller_maps():
    small = (2, 6)
    for text in ("rope2d", "axial_rope(aspect=separate)"):
        before, default = steps(base_scheme(text), T), steps(base_scheme(text), small)
        for rule in ("ntk", "yarn", "extrapolate"):
            np.testing.assert_allclose(steps(extended_scheme(text, rule), small), before, **EXACT)
        stretched = steps(extended_scheme(text, "interpolate"), small)
        np.testing.assert_allclose(stretched, before * [[2], [1]], **EXACT)
        np.testing.assert_allclose(default, before if text == "rope2d" else stretched, **EXACT)


def test_single_frequencies_and_axes_of_one_patch():
    text = "cat_rope(mode=paper_unit)"
    freqs_pair = (
        extended_scheme(text, rule).terms(N).rotation.freqs for rule in ("ntk", "interpolate")
    )
    np.testing.assert_allclose(*freqs_pair, rtol=1e-12)
    line = {"grid": (1, 4)}
    default, ntk = base_scheme("axial_rope", **line), extended_scheme("axial_rope", "ntk", **line)
    before, after = (np.asarray(p.terms((3, 8)).rotation.freqs) for p in (default, ntk))
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert not np.allclose(after[:, 1], before[:, 1])


def test_reading_order_and_videos():
    count = PAIRS
    expected = (10000 * (90 / 24) ** (count / (count - 1))) ** -(np.arange(count) / count)
    freqs = extended_scheme("rope1d", "ntk").terms(N).rotation.freqs
    np.testing.assert_allclose(freqs[0, 0], expected, **EXACT)
    positions = base_scheme("rope3d"), extended_scheme("rope3d", "interpolate")
    default, interpolated = (position.terms((5, *N)).rotation.freqs for position in positions)
    np.testing.assert_allclose(
        interpolated, default / np.array([1, *S])[:, None], **EXACT
    )  # frames extrapolate


def test_windows_count_visible_patches():
    def freqs(text, rule, pattern, on, other_pattern=None):
        position = extended_scheme(text, rule, pattern=pattern)
        position = position if other_pattern is None else position.with_pattern(other_pattern)
        return np.asarray(position.terms(on).layer(0).rotation.freqs)

    default = freqs("rope2d", "none", Window((2, 3)), T)
    for pattern in (Window((2, 3)), Neighborhood((3, 3))):
        np.testing.assert_array_equal(freqs("rope2d", "ntk", pattern, N), default)
        # Coordinates in a box that grows keep the steps of training, not those of the larger map.
        boxed = extended_scheme("axial_rope(aspect=separate)", "interpolate", pattern=pattern)
        before, after = (boxed.terms(grid).rotation for grid in (T, N))
        np.testing.assert_allclose(after.freqs, before.freqs * S[:, None], **EXACT)
    larger = extended_scheme("rope2d", "interpolate", pattern=Window((2, 3)))
    larger.stage = stage(grid=N, pattern=Window((4, 3)))
    np.testing.assert_allclose(larger.terms(N).rotation.freqs[0, 0], default[0, 0] / 2, **EXACT)
    np.testing.assert_allclose(larger.terms(N).rotation.freqs[0, 1], default[0, 1], **EXACT)
    on_map = freqs("rope2d", "interpolate", Window((2, 3)), N, other_pattern=Global())
    np.testing.assert_allclose(on_map, default / S[:, None], **EXACT)
    local = extended_scheme("axial_rope(window_coords=local_unit)", "ntk", pattern=Window((2, 3)))
    assert not local.extends
    np.testing.assert_array_equal(*(local.terms(grid).rotation.freqs for grid in (T, N)))


def test_uneven_coordinates_refuse_ntk(rope_log):
    assert scheme(f"{rope_log}(log_scale=True)", grid=T).terms(N).logit_scale > 1
    with pytest.raises(ValueError, match="extend=ntk needs coordinates that are evenly spaced"):
        scheme(f"{rope_log}(extend=ntk)", grid=T).terms(N)


@pytest.mark.parametrize("rule", ["ntk", "yarn,beta=1.5"])
def test_learned_frequencies_have_gradients(rule):
    graph, params, rest = nnx.split(extended_scheme("axial_rope_v1", rule), nnx.Param, ...)
    freqs = lambda params: nnx.merge(graph, params, rest).terms(N).layer(0).rotation.freqs
    check_grads(jax.jit(freqs), (params,), order=1, modes=["rev"])


def test_a_custom_scheme_keeps_its_option_of_the_same_name(monkeypatch):
    class CustomRope(Rope2D):
        def __init__(self, stage, *, rngs, beta: float = 0.5):
            super().__init__(stage, rngs=rngs)
            self.beta = beta

    monkeypatch.setitem(SCHEMES, "own_rope", CustomRope)
    position = scheme("own_rope(beta=2.5,extend=ntk)")
    assert (position.beta, position.extension.beta, position.extension.extend) == (2.5, 32, "ntk")
