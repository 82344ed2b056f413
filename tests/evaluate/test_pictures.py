"""The picture of segmented images."""

import jax
import numpy as np

from rope_jax.data import decode_image
from rope_jax.data.sources import scenes
from rope_jax.evaluate.accuracy import applied
from rope_jax.evaluate.pictures import Segmented, draw_pictures, first_images
from rope_jax.evaluate.sheets import class_colours
from rope_jax.training.setup import initial_state, prepare
from tests.training.recipe import tiny


def test_classes_have_colours_of_their_own():
    for count in (2, 11, 150):
        assert len(np.unique(class_colours(count), axis=0)) == count
    apart = np.abs(class_colours(11)[:, None].astype(int) - class_colours(11)).sum(-1)
    assert apart[~np.eye(11, dtype=bool)].min() > 30


def test_a_picture_has_a_row_for_each_image(tmp_path):
    """Panels of 256 pixels, 12 apart, below a line of 22 pixels: image, classes, predicted."""
    image, classes = np.full((4, 4, 3), 7, np.uint8), np.zeros((4, 4), np.uint8)
    classes[0, 0], classes[1] = 255, 1
    wide = Segmented(np.full((4, 8, 3), 9, np.uint8), np.full((4, 8), 2, np.uint8),
                     np.zeros((4, 8), np.uint8))  # fmt: skip
    found = [Segmented(image, classes, classes.T), wide]
    sizes = []
    for names, number in ((["ground", "one", "two"], 3), (None, 150)):
        draw_pictures(found, names, number, tmp_path / "p.png")
        sheet = decode_image((tmp_path / "p.png").read_bytes())
        sizes.append(sheet.shape)
        colours = class_colours(number)
        panels = [sheet[22 : 22 + 256, 12 + k * 268 :][:, :256][32::64, 32::64] for k in range(3)]
        assert (panels[0] == 7).all()
        known = classes != 255
        np.testing.assert_array_equal(panels[1][known], colours[classes[known]])
        np.testing.assert_array_equal(panels[2][known.T], colours[classes.T[known.T]])
        assert not panels[1][~known].any()
        below = sheet[22 + 256 + 22 :]
        assert (below[20, 20] == 9).all()
        assert (below[20, 288] == colours[2]).all()
    assert sizes[0] == sizes[1] == (22 + 256 + 22 + 128 + 22 + 12 + 22, 816, 3)
    legend = sheet[-22:]
    for number, left in ((0, 12), (1, 162), (2, 312)):
        assert (legend[4, left + 5] == colours[number]).all()


def test_a_legend_of_too_many_classes_is_left_out(tmp_path):
    classes = np.arange(100, dtype=np.uint8).reshape(10, 10)
    pixels = np.zeros((10, 10, 3), np.uint8)
    draw_pictures([Segmented(pixels, classes, classes)], None, 150, tmp_path / "p.png")
    sheet = decode_image((tmp_path / "p.png").read_bytes())
    assert sheet.shape == (22 + 256 + 22 + 12, 816, 3)


def test_weights_are_arguments_of_the_program(monkeypatch):
    """Constants would be copied into it: of a large model, gigabytes."""
    monkeypatch.setattr(scenes, "COUNTS", {"train": 8, "test": 2})
    changes = {"data__source": "scenes", "data__image_size": 16, "data__augment": "none"}
    changes |= {"model__head": "linear", "eval__resolutions": (), "batch_size": 8}
    setup, model = prepare(tiny(**changes))
    apply, weights = applied(setup, initial_state(setup, model))
    traced = jax.jit(apply).trace(weights, np.zeros((2, 16, 16, 3), np.float32))
    sizes = [np.size(x) for x in traced.jaxpr.consts]
    assert max(sizes, default=0) < 16 * 16 * 3
    (first, _) = first_images(setup, initial_state(setup, model))
    assert first.predicted.shape == (16, 16)
