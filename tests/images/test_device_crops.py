import functools

import jax
import numpy as np
import pytest
from PIL import Image

from rope_jax.data.images import device_crops
from rope_jax.data.images.crops import Box, crop_pixels, resized_crop
from rope_jax.data.images.device_crops import pack


def words(packed):
    return np.array([packed >> 32, packed & 0xFFFFFFFF], np.uint32)


@pytest.mark.parametrize("shape", [(8, 8), (32, 32), (24, 40)])
def test_boxes_are_what_pillow_makes_of_them(shape):
    rng = np.random.default_rng(0)
    crop = functools.partial(resized_crop, scale_min=0.05, interpolation="random")
    draws = rng.integers(0, 2**64, 400, np.uint64)
    # The steepest images there are: the cubic goes beyond 0 and 255.
    images = rng.integers(0, 2, (400, *shape, 3), np.uint8) * 255
    images[::2] = rng.integers(0, 256, images[::2].shape, np.uint8)
    boxes = [crop(shape[1], shape[0], shape, int(draw)) for draw in draws]
    assert {box.interpolation for box in boxes} == {
        Image.Resampling.BILINEAR,
        Image.Resampling.BICUBIC,
    }
    found = jax.jit(jax.vmap(device_crops.resized_crop))(
        images, np.stack([words(pack(box)) for box in boxes])
    )
    for image, box, draw in zip(images, np.asarray(found), draws, strict=True):
        np.testing.assert_array_equal(box, crop_pixels(image, crop, shape, int(draw)))


def test_the_smallest_boxes_and_the_whole():
    image = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)
    resize = jax.jit(device_crops.resized_crop)
    for interpolation in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
        for left, top, width, height in (
            (0, 0, 16, 16),
            (15, 15, 1, 1),
            (3, 0, 1, 16),
            (0, 14, 16, 2),
            (5, 6, 2, 3),
        ):
            box = Box((left, top, left + width, top + height), interpolation, alone=True)
            expected = Image.fromarray(image[top : top + height, left : left + width]).resize(
                (16, 16), interpolation
            )
            np.testing.assert_array_equal(resize(image, words(pack(box))), np.asarray(expected))


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 4, 4), Image.Resampling.LANCZOS, alone=True),
        Box((0, 0, 4, 4), Image.Resampling.BICUBIC),
        Box((0, 0, 2**15, 4), Image.Resampling.BICUBIC, alone=True),
    ],
)
def test_other_cuts_are_refused(box):
    with pytest.raises(
        ValueError,
        match="cannot be cut on the device: boxes are of whole pixels below 32768, bilinear or",
    ):
        pack(box)
