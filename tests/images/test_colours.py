"""Photometric distortion: OpenCV's colours against colorsys, and the effect of each change."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.data.images.device_colours import Changes, change_colours, draw, to_hsv, to_rgb

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 15, 3), dtype=np.uint8)
SCALE = np.array([180, 255, 255])


def in_floats(function, pixels):
    return np.apply_along_axis(lambda x: function(*x), -1, pixels)


def test_colours_match_opencv_up_to_rounding():
    hsv = jax.jit(to_hsv)
    converted = np.stack(hsv(PIXELS), axis=-1)
    difference = np.abs(converted - in_floats(colorsys.rgb_to_hsv, PIXELS / 255.0) * SCALE)
    difference[..., 0] = np.minimum(difference[..., 0], 180 - difference[..., 0])
    assert difference.max() <= 0.66  # half a step, and the rounding of OpenCV's quotients
    back = np.asarray(jax.jit(to_rgb)(tuple(np.moveaxis(converted, -1, 0))))
    assert np.abs(back - in_floats(colorsys.hsv_to_rgb, converted / SCALE) * 255).max() <= 0.501
    samples = np.uint8([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 9, 9], [0, 0, 0], [255, 0, 9]]])
    assert np.stack(hsv(samples), -1)[0].tolist() == [
        [0, 255, 255], [60, 255, 255], [120, 255, 255], [0, 0, 9], [0, 0, 0], [179, 255, 255],
    ]  # fmt: skip


def test_changes_apply_in_order():
    """Changes are compared with Python's colours, rounded as by OpenCV."""
    none = Changes(np.zeros(4, bool), True, 0.0, 1.0, 1.0, 0)
    run = jax.jit(change_colours)

    def apply_changes(**changes):
        changes_made = jax.tree.map(jnp.asarray, none._replace(**changes))
        return np.asarray(run(PIXELS, changes_made)).astype(int)

    def hsv(pixels, change):
        values = in_floats(colorsys.rgb_to_hsv, pixels / 255.0) * SCALE
        return in_floats(colorsys.hsv_to_rgb, change(values) / SCALE) * 255

    np.testing.assert_array_equal(apply_changes(), PIXELS)
    add, contrast, saturate, turn = np.eye(4, dtype=bool)
    brighter = np.clip(PIXELS + 20.5, 0, 255).astype(int)
    np.testing.assert_array_equal(apply_changes(enabled=add, added=20.5), brighter)
    flatter = (PIXELS * np.float32(0.7)).astype(int)
    np.testing.assert_array_equal(apply_changes(enabled=contrast, contrast=0.7), flatter)
    grey = hsv(PIXELS, lambda x: x * (1, 0.5, 1))
    assert np.abs(apply_changes(enabled=saturate, saturation=0.5) - grey).max() < 5
    turned = hsv(PIXELS, lambda x: np.add(x, (17, 0, 0)) % (180, 256, 256))
    assert np.abs(apply_changes(enabled=turn, turn=17) - turned).max() < 5
    combined = {"enabled": np.ones(4, bool), "contrast": 1.5, "saturation": 0.5, "turn": -9}
    cut_first = hsv(np.clip(PIXELS * 1.5, 0, 255), lambda x: x * (1, 0.5, 1) - (9, 0, 0))
    cut_last = np.clip(1.5 * hsv(PIXELS, lambda x: x * (1, 0.5, 1) - (9, 0, 0)), 0, 255)
    for early, expected, other in ((True, cut_first, cut_last), (False, cut_last, cut_first)):
        image = apply_changes(early=early, **combined)
        assert np.abs(image - expected).mean() < 1
        assert np.abs(image - other).mean() > 5


def test_changes_are_drawn_like_mmsegmentation():
    keys = jax.random.split(jax.random.key(0), 2000)
    draws = jax.jit(jax.vmap(lambda key: draw(key, 32.0, 0.5, 0.5, 18, 0.5)))(keys)
    drawn = jax.tree.map(np.asarray, draws)
    assert np.abs(drawn.enabled.mean(0) - 0.5).max() < 0.04
    assert np.abs(np.corrcoef(np.c_[drawn.enabled, drawn.early].T) - np.eye(5)).max() < 0.08
    assert 0.46 < drawn.early.mean() < 0.54
    for values, low, high in ((drawn.added, -32, 32), (drawn.contrast, 0.5, 1.5)):
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
    assert 0.5 <= drawn.saturation.min() < 0.52
    assert set(drawn.turn.tolist()) == set(range(-18, 18))
