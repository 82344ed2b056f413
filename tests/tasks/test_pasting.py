import numpy as np
import pytest

from rope_jax.tasks.pasting import paste

EDGES = {  # changes of boxes near an image of 30 columns and 20 rows
    "inside": lambda box: np.clip(box, 0, (30, 20, 30, 20)),
    "outside": lambda box: box,
    "half": lambda box: np.round(2 * box) / 2,
    "empty": lambda box: box[[0, 1, 0, 3]],
    "elsewhere": lambda box: np.add(box, (45, 0, 45, 0)),
}


@pytest.mark.parametrize("change", EDGES.values(), ids=EDGES)
def test_an_image_shows_its_part_of_a_larger_one(change):
    """A mask that reaches beyond an image is cut off there; nothing else has a probability."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random((7, 7))
        first, second = rng.random((2, 2)) * (60, 40) - (15, 10)
        box = change(np.concatenate([np.minimum(first, second), np.maximum(first, second)]))
        whole, image = np.zeros((60, 90)), np.zeros((20, 30))
        for canvas, corner in ((whole, [30, 20]), (image, [0, 0])):
            part, place = paste(mask, box + corner * 2, canvas.shape)
            canvas[place] = part
        np.testing.assert_allclose(image, whole[20:40, 30:60], atol=1e-9)
        np.testing.assert_array_equal(image >= 0.5, whole[20:40, 30:60] >= 0.5)
