import math

import numpy as np
import pytest

from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import parse_crop
from rope_jax.data.images.joint import (
    bilinear_crop,
    crop_both,
    nearest_crop,
    padded,
    scaled_crop,
    scaled_size,
)


def draws(count):
    zeros = np.zeros(count, int)
    return example_draws(0, zeros, np.arange(count), count, "test").tolist()


def test_images_are_resized_between_centres_without_antialiasing():
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    for resized in ((5, 7), (20, 30)):
        found = bilinear_crop(image, resized, (0, 0), resized)
        for i, j in np.ndindex(*resized):
            y, x = (
                (k + 0.5) * n / m - 0.5 for k, n, m in zip((i, j), (9, 13), resized, strict=True)
            )
            wanted = 0
            for row in (math.floor(y), math.floor(y) + 1):
                for column in (math.floor(x), math.floor(x) + 1):
                    share = (1 - abs(y - row)) * (1 - abs(x - column))
                    wanted = wanted + share * image[min(max(row, 0), 8), min(max(column, 0), 12)]
            assert np.abs(found[i, j] - wanted).max() <= 0.501


def test_a_part_of_the_resized_image_is_cut_out_of_it():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)
    classes = rng.integers(0, 5, (9, 13), dtype=np.uint8)
    whole = bilinear_crop(image, (20, 30), (0, 0), (20, 30))
    part = bilinear_crop(image, (20, 30), (4, 7), (6, 8))
    np.testing.assert_array_equal(part, whole[4:10, 7:15])
    whole = nearest_crop(classes, (20, 30), (0, 0), (20, 30))
    np.testing.assert_array_equal(
        nearest_crop(classes, (20, 30), (4, 7), (6, 8)), whole[4:10, 7:15]
    )
    for i, j in np.ndindex(20, 30):
        assert whole[i, j] == classes[int((i + 0.5) * 9 / 20), int((j + 0.5) * 13 / 30)]


def test_image_and_classes_stay_together():
    """Each class has a colour: after augmentation, pixels away from borders still have it."""
    classes = np.repeat(np.repeat(np.arange(12).reshape(3, 4), 16, 0), 16, 1).astype(np.uint8)
    image = np.repeat((classes * 20)[..., None], 3, -1)
    sizes = set()
    for draw in draws(20):
        pixels, labels = scaled_crop(image, classes, (48, 40), draw, short=48, long=64)
        assert pixels.shape == (*labels.shape, 3)
        assert (np.array(labels.shape) <= (48, 40)).all()
        assert (pixels[..., 0] == labels * 20).mean() > 0.8
        sizes.add(labels.shape)
    assert len(sizes) > 5


def test_crops_of_one_class_are_drawn_again():
    classes = np.zeros((64, 64), np.uint8)
    classes[:, 40:] = 1
    image = np.zeros((64, 64, 3), np.uint8)
    options = {"low": 1.0, "high": 1.0, "short": 64, "long": 64}
    shares = {}
    for share in (0.75, 1.0):
        crops = [
            scaled_crop(image, classes, (24, 24), d, share=share, **options)[1] for d in draws(60)
        ]
        shares[share] = np.mean(
            [np.bincount(c.ravel(), minlength=2).max() < 0.75 * c.size for c in crops]
        )
    assert shares[0.75] > 0.95 > 0.5 > shares[1.0]


def test_the_size_of_official_recipes():
    assert scaled_size((512, 683), 1.0, short=512, long=2048) == (512, 683)
    assert scaled_size((300, 2000), 1.0, short=512, long=2048) == (307, 2048)
    assert scaled_size((480, 640), 0.5, short=512, long=2048) == (256, 341)
    with pytest.raises(ValueError, match="low=2"):
        scaled_crop(
            np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8), (2, 2), 0, low=2.0, high=1.0
        )


def test_crops_with_a_box_cut_image_and_classes_alike():
    """Each class has a colour; resized by the nearest pixel, the classes have no others."""
    classes = np.repeat(np.repeat(np.arange(12).reshape(3, 4), 16, 0), 16, 1).astype(np.uint8)
    image = np.repeat((classes * 20)[..., None], 3, -1)
    for crop in ("centre(crop=0.8)", "stretch(interpolation=bilinear)", "resized_crop"):
        for draw in draws(3):
            pixels, labels = crop_both(image, classes, parse_crop(crop), (24, 20), draw)
            assert (pixels.shape, labels.shape) == ((24, 20, 3), (24, 20))
            near = np.abs(pixels[..., 0].astype(int) - 20 * labels.astype(int)) <= 4
            assert near.mean() > 0.6
            assert set(np.unique(labels)) <= set(range(12))
            middle = classes[24, 32] if crop != "resized_crop" else labels[12, 10]
            assert labels[12, 10] in (middle, 5, 6)


def test_padding_has_no_class():
    images, labels = padded(np.ones((2, 3, 4, 3), np.uint8), np.ones((2, 3, 4), np.uint8), (5, 4))
    assert images[:, 3:].max() == 0
    assert (labels[:, 3:] == 255).all()
    assert images[:, :3].min() == labels[:, :3].min() == labels[:, :3].max() == 1
