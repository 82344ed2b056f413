"""Resizing and cropping of images with boxes: sizes, and boxes compared with pixels."""

import numpy as np
import pytest

from rope_jax.data.images.augment import parse_augment
from rope_jax.data.images.crops import flip
from rope_jax.data.images.fits import (
    clipped,
    detr_crop,
    fit,
    flip_boxes,
    placed_boxes,
    placed_pixels,
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


def test_sizes_are_those_of_detectron2():
    for height in range(50, 641, 23):
        for width in (height, 333, 427, 500, 640):
            for short in (480, 512, 800):
                wanted = detectron2_size((height, width), short, 1333)
                assert fit((height, width), short=short).extent == wanted
    # Half a pixel, which rounding in one step would lose.
    assert fit((634, 317)).extent == (1333, 667) == detectron2_size((634, 317), 800, 1333)


def test_training_sizes_are_those_of_the_recipe():
    """All eleven shorter sides, half of the images cut; a cut image is resized before."""
    found = [detr_crop((427, 640), draw) for draw in draws(2000)]
    uncut = [one for one in found if one.part == (427, 640)]
    assert 0.47 < len(uncut) / len(found) < 0.53
    assert {one.extent[0] for one in uncut} == set(range(480, 801, 32))
    assert {one.resized for one in found} - {(427, 640)} == {(400, 600), (500, 749), (600, 899)}
    cut = [one for one in found if one.part != (427, 640)]
    sides = np.array([one.part for one in cut])
    assert sides.min() >= 384
    assert sides.max() <= 600
    assert (sides.max(0) > 590).all()
    corners = np.array([one.corner for one in cut])
    ends = corners + sides
    assert corners.min() == 0
    assert (ends <= [one.resized for one in cut]).all()
    assert (ends == [one.resized for one in cut]).any(0).all()
    for one in found:
        assert max(one.extent) <= 1333
        assert min(one.extent) in range(480, 801, 32) or max(one.extent) == 1333
        aspect = one.extent[0] / one.extent[1] / (one.part[0] / one.part[1])
        assert abs(aspect - 1) < 0.004


def test_images_of_any_shape_are_placed():
    for size in ((1, 3000), (3000, 1), (1, 1), (5, 65_000)):
        for draw in draws(30):
            placing = detr_crop(size, draw)
            assert min(placing.extent) >= 1
            assert max(placing.extent) <= 1333
            assert np.prod(placing.resized) <= 2**25


def test_boxes_stay_around_what_they_frame():
    """A rectangle of one colour is found again where its box is, to a pixel."""
    rng = np.random.default_rng(0)
    moved = 0
    for number, draw in enumerate(draws(60)):
        height, width = rng.integers(40, 120, 2).tolist()
        top, left = (int(rng.integers(0, n - 20)) for n in (height, width))
        bottom, right = top + int(rng.integers(10, 20)), left + int(rng.integers(10, 20))
        image = np.zeros((height, width, 3), np.uint8)
        image[top:bottom, left:right, 1] = 255
        placing = (
            detr_crop((height, width), draw, **SMALL)
            if number % 3
            else fit((height, width), short=80, long=133)
        )
        box = np.array([[left, top, right, bottom]], float)
        boxes, kept = placed_boxes(box, (height, width), placing)
        pixels = placed_pixels(image, placing)
        assert pixels.shape[:2] == placing.extent
        flips = np.array([draw], np.uint64)
        seen = flip(pixels[None], flips)[0, ..., 1] > 127
        if not kept[0]:
            assert not seen.any()
            continue
        x1, y1, x2, y2 = flip_boxes(boxes[None], pixels.shape[1], flips)[0, 0]
        rows, columns = (np.flatnonzero(seen.any(axis)) for axis in (1, 0))
        if min(x2 - x1, y2 - y1) < 2:  # cut to a sliver
            continue
        found = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        np.testing.assert_allclose([x1, y1, x2, y2], found, atol=1.0)
        moved += 1
    assert moved > 40


def test_boxes_are_mirrored_with_their_images():
    numbers = np.array(draws(40), np.uint64)
    images = np.zeros((40, 6, 10, 3), np.uint8)
    images[:, 2:5, 1:4] = 255
    boxes = np.tile(np.array([[1.0, 2, 4, 5]]), (40, 1, 1))
    for p in (0.0, 0.4, 1.0):
        turned = flip(images, numbers, p=p)
        for pixels, (box,) in zip(turned, flip_boxes(boxes, 10, numbers, p=p), strict=True):
            x1, y1, x2, y2 = box.astype(int)
            assert pixels[y1:y2, x1:x2].all()
            assert pixels.sum() == 9 * 3 * 255


def test_boxes_are_clipped_and_left_out():
    boxes = np.array([[-5.0, 2, 4, 30], [4, 4, 4, 8], [20, 0, 30, 5], [0, 0, 10, 10]])
    inside, kept = clipped(boxes, (10, 16))
    assert kept.tolist() == [True, False, False, True]
    assert inside.tolist() == [[0, 2, 4, 10], [0, 0, 10, 10]]


def test_the_smallest_canvas():
    canvases = [(80, 80), (48, 64), (64, 48), (80, 136), (136, 136)]

    def canvas(*extents):
        return smallest_canvas(np.array(extents), canvases)

    assert canvas((40, 60)) == (48, 64)
    assert canvas((60, 40), (20, 20)) == (64, 48)
    assert canvas((60, 40), (40, 60)) == (80, 80)
    assert canvas((80, 136)) == (80, 136)
    assert canvas((81, 1)) == (136, 136)
    with pytest.raises(ValueError, match=r"137x20 pixels, but the canvases are 80x80, 48x64,"):
        canvas((137, 20))


@pytest.mark.parametrize(
    "text",
    ["detr_crop(low=0)", "detr_crop(step=0)", "detr_crop(cut=2)", "detr_crop(high=2000)",
     "detr_crop(cut_low=700)", "detr_crop(before_low=700)", "fit(short=900,long=800)"],
)  # fmt: skip
def test_options_out_of_range_are_refused(text):
    (crop,) = parse_augment(text)
    with pytest.raises(ValueError, match=f"{crop.name}.* is impossible"):
        crop((40, 60), 0)
