import numpy as np
import pytest

from rope_jax.tasks.pasting import paste


@pytest.mark.parametrize("edges", ["inside", "outside", "half", "empty"])
def test_an_image_shows_its_part_of_a_larger_one(edges):
    """A mask that reaches beyond an image is cut off there; nothing else has a probability."""
    rng, size, around = np.random.default_rng(0), (20, 30), (60, 90)
    for _ in range(50):
        mask = rng.random((7, 7))
        first, second = rng.random((2, 2)) * [size[::-1]] * 2 - (np.array(size[::-1]) / 2)
        box = np.concatenate([np.minimum(first, second), np.maximum(first, second)])
        if edges == "inside":
            box = np.clip(box, 0, size[::-1] * 2)
        elif edges == "half":
            box = np.round(2 * box) / 2
        elif edges == "empty":
            box[2] = box[0]
        whole, image = np.zeros(around), np.zeros(size)
        for canvas, corner in ((whole, [30, 20]), (image, [0, 0])):
            part, place = paste(mask, box + corner * 2, canvas.shape)
            canvas[place] = part
        np.testing.assert_allclose(image, whole[20:40, 30:60], atol=1e-9)
        np.testing.assert_array_equal(image >= 0.5, whole[20:40, 30:60] >= 0.5)


def test_a_box_elsewhere_is_not_pasted():
    part, place = paste(np.ones((2, 2)), np.array([50.0, 0, 60, 10]), (10, 20))
    assert part.size == 0
    assert np.zeros((10, 20))[place].size == 0
