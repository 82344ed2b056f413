"""Resizing and cropping of images with boxes: sizes, and boxes compared with pixels."""

import numpy as np
import pytest

from rope_jax.data.images.augment import parse_augment
from rope_jax.data.images.crops import flip
from rope_jax.data.images.fits import (
    detr_crop,
    fit,
    flip_boxes,
    place_boxes,
    place_pixels,
    smallest_canvas,
)
from tests.images.test_joint import draws

SMALL = {"low": 48, "high": 80, "step": 8, "long": 133, "before_low": 40, "before_high": 60}
SMALL |= {"before_step": 10, "cut_low": 38, "cut_high": 60}


def detectron2_size(size, short, long):
    """The size as detectron2's ResizeShortestEdge computes it."""
    height, width = size
    scale = short / min(size)
    height, width = (short, scale * width) if height < width else (scale * height, short)
    if max(height, width) > long:
        scale = long / max(height, width)
        height, width = height * scale, width * scale
    return int(height + 0.5), int(width + 0.5)


def test_sizes_match_detectron2():
    for height in range(50, 641, 23):
        for width in (height, 333, 427, 500, 640):
            for short in (480, 512, 800):
                expected = detectron2_size((height, width), short, 1333)
                assert fit((height, width), short=short).extent == expected
    # A half pixel, which rounding in one step would lose.
    assert fit((634, 317)).extent == (1333, 667) == detectron2_size((634, 317), 800, 1333)


def test_training_sizes_match_the_recipe():
    """All eleven shorter sides occur; half of the images are resized and cut before."""
    placings = [detr_crop((427, 640), draw) for draw in draws(2000)]
    uncut = [placing for placing in placings if placing.part == (427, 640)]
    assert 0.47 < len(uncut) / len(placings) < 0.53
    assert {placing.extent[0] for placing in uncut} == set(range(480, 801, 32))
    assert {placing.resized for placing in placings} - {(427, 640)} == {
        (400, 600),
        (500, 749),
        (600, 899),
    }
    cut = [placing for placing in placings if placing.part != (427, 640)]
    sides, corners, wholes = np.array(
        [(placing.part, placing.corner, placing.resized) for placing in cut]
    ).swapaxes(0, 1)
    assert sides.min() >= 384
    assert all(590 < side <= 600 for side in sides.max(0))
    assert corners.min() == 0
    assert (corners + sides <= wholes).all()
    assert (corners + sides == wholes).any(0).all()
    for placing in placings:
        assert max(placing.extent) <= 1333
        assert min(placing.extent) in range(480, 801, 32) or max(placing.extent) == 1333
        scales = np.divide(placing.extent, placing.part)
        assert abs(scales[0] / scales[1] - 1) < 0.004


def test_images_of_any_shape_fit():
    for size in ((1, 3000), (3000, 1), (1, 1), (5, 65_000)):
        for draw in draws(30):
            placing = detr_crop(size, draw)
            assert min(placing.extent) >= 1
            assert max(placing.extent) <= 1333
            assert np.prod(placing.resized) <= 2**25


def test_boxes_follow_their_objects():
    """A rectangle of one colour coincides with its box, to a pixel."""
    size, moved = (90, 70), 0
    image = np.zeros((*size, 3), np.uint8)
    image[6:20, 10:28, 1] = 255
    for draw in draws(60):
        placing, flips = detr_crop(size, draw, **SMALL), np.array([draw], np.uint64)
        boxes, kept = place_boxes(np.array([[10.0, 6, 28, 20]]), size, placing)
        visible = flip(place_pixels(image, placing)[None], flips)[0, ..., 1] > 127
        assert visible.shape == placing.extent
        assert kept[0] or not visible.any()
        for box in flip_boxes(boxes[None], placing.extent[1], flips)[0]:
            if (box[2:] - box[:2]).min() >= 2:  # not cut to a sliver
                rows, columns = (np.flatnonzero(visible.any(axis)) for axis in (1, 0))
                framed = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
                np.testing.assert_allclose(box, framed, atol=1.0)
                moved += 1
    assert 40 < moved < 60


@pytest.mark.parametrize(
    ("extents", "canvas"),
    [
        ([(40, 60)], (48, 64)),
        ([(60, 40), (20, 20)], (64, 48)),
        ([(60, 40), (40, 60)], (80, 80)),
        ([(80, 136)], (80, 136)),
        ([(81, 1)], (136, 136)),
    ],
)
def test_the_smallest_canvas(extents, canvas):
    canvases = [(80, 80), (48, 64), (64, 48), (80, 136), (136, 136)]
    assert smallest_canvas(np.array(extents), canvases) == canvas


@pytest.mark.parametrize(
    "text",
    ["detr_crop(low=0)", "detr_crop(step=0)", "detr_crop(cut=2)", "detr_crop(high=2000)",
     "detr_crop(cut_low=700)", "detr_crop(before_low=700)", "fit(short=900,long=800)"],
)  # fmt: skip
def test_options_out_of_range_are_refused(text):
    with pytest.raises(ValueError, match=r"(detr_crop|fit).* (is impossible|must be a)"):
        parse_augment(text)[0]((40, 60), 0)
