import numpy as np
import pytest

from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import parse_crop
from rope_jax.data.images.joint import (
    bilinear_crop,
    crop_both,
    nearest_crop,
    scale_size,
    scaled_crop,
)


def draws(count):
    zeros = np.zeros(count, int)
    return example_draws(0, zeros, np.arange(count), count, "test").tolist()


@pytest.mark.parametrize(
    ("resized", "corner", "part"),
    [((5, 7), (0, 0), (5, 7)), ((20, 30), (0, 0), (20, 30)), ((20, 30), (4, 7), (6, 8))],
)
def test_crops_are_parts_of_the_image_resized_by_plain_interpolation(resized, corner, part):
    """Bilinear for images, the nearest pixel for classes."""
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    tents, nearest = [], []
    for before, after in zip((9, 13), resized, strict=True):
        places = (np.arange(after) + 0.5) * before / after
        nearest.append(places.astype(int))
        places = (places - 0.5).clip(0, before - 1)
        tents.append(np.maximum(0, 1 - abs(places[:, None] - np.arange(before))))
    window = tuple(slice(start, start + size) for start, size in zip(corner, part, strict=True))
    expected = np.einsum("yh,hwc,xw->yxc", tents[0], image, tents[1])[window]
    assert np.abs(bilinear_crop(image, resized, corner, part) - expected).max() <= 0.501
    classes = image[..., 0][np.ix_(*nearest)][window]
    np.testing.assert_array_equal(nearest_crop(image[..., 0], resized, corner, part), classes)


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
