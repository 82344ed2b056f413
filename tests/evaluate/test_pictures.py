"""The picture of segmented images."""

import jax
import numpy as np
import pytest

from rope_jax.data import decode_image
from rope_jax.evaluate.accuracy import state_evaluator
from rope_jax.tasks.pictures import Segmented, draw_pictures
from rope_jax.tasks.sheets import class_colours
from tests.training.recipe import start


@pytest.mark.parametrize(("names", "number"), [(["ground", "one", "two"], 3), (None, 150)])
def test_pictures_have_a_row_for_each_image(tmp_path, names, number):
    """Panels of 256 pixels, 12 apart, below a line of 22 pixels: image, classes, predicted."""
    image, classes = np.full((4, 4, 3), 7, np.uint8), np.zeros((4, 4), np.uint8)
    classes[0, 0], classes[1] = 255, 1
    wide = Segmented(np.full((4, 8, 3), 9, np.uint8), np.full((4, 8), 2, np.uint8),
                     np.zeros((4, 8), np.uint8))  # fmt: skip
    draw_pictures([Segmented(image, classes, classes.T), wide], names, number, tmp_path / "p.png")
    sheet = decode_image((tmp_path / "p.png").read_bytes())
    assert sheet.shape == (22 + 256 + 22 + 128 + 22 + 12 + 22, 816, 3)  # the last is the legend
    colours = np.zeros((256, 3), np.uint8)  # black without a class
    colours[:number] = class_colours(number)
    panels = [sheet[22 : 22 + 256, 12 + k * 268 :][:, :256][32::64, 32::64] for k in range(3)]
    for panel, expected in zip(panels, (image, colours[classes], colours[classes.T]), strict=True):
        np.testing.assert_array_equal(panel, expected)
    assert (sheet[22 + 256 + 22 + 20, [20, 288]] == [[9] * 3, colours[2]]).all()
    assert (sheet[-22 + 4, [17, 167, 317]] == colours[:3]).all()


def test_weights_are_arguments_of_programs():
    """Constants would be copied into the program: gigabytes for a large model."""
    evaluator = state_evaluator(*start()[:2])
    images = np.zeros((2, 8, 8, 3), np.float32)
    traced = jax.jit(evaluator.apply).trace(evaluator.weights, images)
    assert max((np.size(x) for x in traced.jaxpr.consts), default=0) < 8 * 8 * 3
