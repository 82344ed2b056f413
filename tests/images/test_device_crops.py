import functools

import jax
import numpy as np
import pytest
from PIL import Image

from rope_jax.data.images import device_crops
from rope_jax.data.images.crops import Box, resized_crop
from rope_jax.data.images.device_crops import pack


@pytest.mark.parametrize(
    ("shape", "size"), [((16, 16), (16, 16)), ((24, 40), (24, 40)), ((24, 40), (11, 28))]
)
def test_boxes_match_pillow(shape, size):
    """Random boxes, the smallest, and the whole image, enlarged and reduced."""
    rng = np.random.default_rng(0)
    crop = functools.partial(resized_crop, scale_min=0.05, interpolation="random")
    draws = rng.integers(0, 2**64, 390, np.uint64)
    boxes = [crop(shape[1], shape[0], size, int(draw)) for draw in draws]
    bilinear, bicubic = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
    assert {box.interpolation for box in boxes} == {bilinear, bicubic}
    edges = (0, 0, *shape[::-1]), (15, 15, 16, 16), (3, 0, 4, 16), (0, 14, 16, 16), (5, 6, 7, 9)
    boxes += [
        Box(box_edges, kind, alone=True) for box_edges in edges for kind in (bilinear, bicubic)
    ]
    # The steepest images there are: the cubic goes beyond 0 and 255.
    images = rng.integers(0, 2, (400, *shape, 3), np.uint8) * 255
    images[::2] = rng.integers(0, 256, images[::2].shape, np.uint8)
    resize = jax.jit(jax.vmap(functools.partial(device_crops.resized_crop, size=size)))
    words = np.array([divmod(pack(box), 2**32) for box in boxes], np.uint32)
    results = np.asarray(resize(images, words))
    for image, box, result in zip(images, boxes, results, strict=True):
        part = Image.fromarray(image).crop(box.edges)
        wide = part.resize((size[1], part.height), box.interpolation)
        np.testing.assert_array_equal(result, wide.resize(size[::-1], box.interpolation))


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 4, 4), Image.Resampling.LANCZOS, alone=True),
        Box((0, 0, 4, 4), Image.Resampling.BICUBIC),
        Box((0, 0, 2**15, 4), Image.Resampling.BICUBIC, alone=True),
    ],
)
def test_unsupported_boxes_are_refused(box):
    with pytest.raises(
        ValueError,
        match="cannot be cut on the device: boxes are of whole pixels below 32768, bilinear or",
    ):
        pack(box)
