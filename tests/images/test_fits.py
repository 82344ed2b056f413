"""Resizing and cropping of images with boxes: sizes, and boxes compared with pixels."""

import numpy as np
import pytest

from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import parse_augment, parse_crop
from rope_jax.data.images.crops import flip
from rope_jax.data.images.fits import (
    detr_crop,
    fit,
    flip_boxes,
    place_boxes,
    place_pixels,
    smallest_canvas,
)
from rope_jax.data.images.joint import (
    bilinear_crop,
    crop_both,
    nearest_crop,
    scale_size,
    scaled_crop,
)

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
    sides, corners, wholes = (
        np.array([getattr(placing, name) for placing in cut])
        for name in ("part", "corner", "resized")
    )
    assert sides.min() >= 384
    assert all(590 < side <= 600 for side in sides.max(0))
    assert corners.min() == 0
    assert (corners + sides <= wholes).all()
    assert (corners + sides == wholes).any(0).all()
    for placing in placings:
        assert max(placing.extent) <= 1333
        assert min(placing.extent) in range(480, 801, 32) or max(placing.extent) == 1333
        aspect = placing.extent[0] / placing.extent[1] / (placing.part[0] / placing.part[1])
        assert abs(aspect - 1) < 0.004


def test_images_of_any_shape_fit():
    for size in ((1, 3000), (3000, 1), (1, 1), (5, 65_000)):
        for draw in draws(30):
            placing = detr_crop(size, draw)
            assert min(placing.extent) >= 1
            assert max(placing.extent) <= 1333
            assert np.prod(placing.resized) <= 2**25


def test_boxes_follow_their_objects():
    """A rectangle of one colour coincides with its box, to a pixel."""
    rng, moved = np.random.default_rng(0), 0
    for number, draw in enumerate(draws(60)):
        size = tuple(rng.integers(40, 120, 2).tolist())
        start = rng.integers(0, np.array(size) - 20)
        stop = start + rng.integers(10, 20, 2)
        image = np.zeros((*size, 3), np.uint8)
        image[start[0] : stop[0], start[1] : stop[1], 1] = 255
        crop = detr_crop(size, draw, **SMALL)
        placing = crop if number % 3 else fit(size, short=80, long=133)
        box = np.array([[*start[::-1], *stop[::-1]]], float)
        boxes, kept = place_boxes(box, size, placing)
        pixels = place_pixels(image, placing)
        assert pixels.shape[:2] == placing.extent
        flips = np.array([draw], np.uint64)
        visible = flip(pixels[None], flips)[0, ..., 1] > 127
        if not kept[0]:
            assert not visible.any()
            continue
        (moved_box,) = flip_boxes(boxes[None], pixels.shape[1], flips)[0]
        if (moved_box[2:] - moved_box[:2]).min() < 2:  # cut to a sliver
            continue
        rows, columns = (np.flatnonzero(visible.any(axis)) for axis in (1, 0))
        framed = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        np.testing.assert_allclose(moved_box, framed, atol=1.0)
        moved += 1
    assert moved > 40


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


def draws(count):
    zeros = np.zeros(count, int)
    return example_draws(0, zeros, np.arange(count), count, "test").tolist()


@pytest.mark.parametrize("resized", [(5, 7), (20, 30)])
def test_images_are_resized_by_plain_bilinear_interpolation(resized):
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    tents = []
    for before, after in zip((9, 13), resized, strict=True):
        places = (np.arange(after) + 0.5) * before / after - 0.5
        places = places.clip(0, before - 1)
        tents.append(np.maximum(0, 1 - abs(places[:, None] - np.arange(before))))
    expected = np.einsum("yh,hwc,xw->yxc", tents[0], image, tents[1])
    assert np.abs(bilinear_crop(image, resized, (0, 0), resized) - expected).max() <= 0.501


def test_crops_are_parts_of_the_resized_image():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)
    classes = rng.integers(0, 5, (9, 13), dtype=np.uint8)
    resized = bilinear_crop(image, (20, 30), (0, 0), (20, 30))
    part = bilinear_crop(image, (20, 30), (4, 7), (6, 8))
    np.testing.assert_array_equal(part, resized[4:10, 7:15])
    resized = nearest_crop(classes, (20, 30), (0, 0), (20, 30))
    np.testing.assert_array_equal(
        nearest_crop(classes, (20, 30), (4, 7), (6, 8)), resized[4:10, 7:15]
    )
    for i, j in np.ndindex(20, 30):
        assert resized[i, j] == classes[int((i + 0.5) * 9 / 20), int((j + 0.5) * 13 / 30)]


# Each class has a colour.
CLASSES = np.arange(12, dtype=np.uint8).reshape(3, 4).repeat(16, 0).repeat(16, 1)
IMAGE = np.repeat((CLASSES * 20)[..., None], 3, -1)


def test_image_and_classes_stay_aligned():
    """After augmentation, pixels away from borders still have their colour."""
    sizes = set()
    for draw in draws(20):
        pixels, labels = scaled_crop(IMAGE, CLASSES, (48, 40), draw, short=48, long=64)
        assert pixels.shape == (*labels.shape, 3)
        assert (np.array(labels.shape) <= (48, 40)).all()
        assert (pixels[..., 0] == labels * 20).mean() > 0.8
        sizes.add(labels.shape)
    assert len(sizes) > 5


@pytest.mark.parametrize(("share", "low", "high"), [(0.75, 0.95, 1.0), (1.0, 0.0, 0.5)])
def test_crops_of_a_single_class_are_redrawn(share, low, high):
    """Counts the crops with less than three quarters of one class."""
    image, classes = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)
    classes[:, 40:] = 1
    options = {"low": 1.0, "high": 1.0, "short": 64, "long": 64, "share": share}
    crops = [scaled_crop(image, classes, (24, 24), draw, **options)[1] for draw in draws(60)]
    assert low < np.mean([0.25 < crop.mean() < 0.75 for crop in crops]) <= high


def test_scaled_sizes_match_official_recipes():
    assert scale_size((512, 683), 1.0, short=512, long=2048) == (512, 683)
    assert scale_size((300, 2000), 1.0, short=512, long=2048) == (307, 2048)
    assert scale_size((480, 640), 0.5, short=512, long=2048) == (256, 341)
    with pytest.raises(ValueError, match="low=2"):
        scaled_crop(
            np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8), (2, 2), 0, low=2.0, high=1.0
        )


@pytest.mark.parametrize(
    "crop", ["centre(crop=0.8)", "stretch(interpolation=bilinear)", "resized_crop"]
)
def test_box_crops_cut_image_and_classes_alike(crop):
    """Resizing by the nearest pixel creates no other classes."""
    for draw in draws(3):
        pixels, labels = crop_both(IMAGE, CLASSES, parse_crop(crop), (24, 20), draw)
        assert (pixels.shape, labels.shape) == ((24, 20, 3), (24, 20))
        near = np.abs(pixels[..., 0].astype(int) - 20 * labels.astype(int)) <= 4
        assert near.mean() > 0.6
        assert set(np.unique(labels)) <= set(range(12))
        if crop != "resized_crop":
            assert labels[12, 10] in (CLASSES[24, 32], 5, 6)
