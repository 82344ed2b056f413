import math
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from rope_jax.data import decode_image
from rope_jax.data.images.crops import (
    INTERPOLATIONS,
    centre,
    crop_file,
    crop_pixels,
    resized_crop,
)
from rope_jax.data.images.decode import EncodedImage
from tests.images.test_decode import encode, exif

DRAWS = [int(x) for x in np.random.default_rng(0).integers(0, 2**64, 4000, dtype=np.uint64)]


def smooth(height, width, seed=0):
    """A picture without sharp edges, as photographs are."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def test_resized_crop_has_its_distribution():
    width, height = 400, 300
    crop = partial(resized_crop, width, height, (224, 224), interpolation="random")
    drawn = [crop(draw) for draw in DRAWS]
    bilinear = np.mean([box.interpolation == Image.Resampling.BILINEAR for box in drawn])
    assert abs(bilinear - 0.5) < 4 * 0.5 / math.sqrt(len(DRAWS))
    boxes = np.array([box.edges for box in drawn], float)
    left, top, right, bottom = boxes.T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, width, height)
    w, h = right - left, bottom - top
    assert np.array_equal(boxes, boxes.round())
    area, ratio = w * h / (width * height), w / h
    assert 0.075 < area.min() < 0.1
    assert 0.74 < ratio.min() < 0.76 < 1.32 < ratio.max() < 1.35
    # Areas below 0.5 fit at any ratio, on the first try: a third is below 0.08 + 0.42 / 3.
    small = area[area < 0.5]
    assert abs((small < 0.08 + 0.42 / 3).mean() - 1 / 3) < 4 * math.sqrt(2 / 9 / len(small))
    logs = np.log(ratio[area < 0.5]) / np.log(4 / 3)
    assert abs(logs.mean()) < 4 / math.sqrt(3 * len(logs))
    assert abs(logs.var() - 1 / 3) < 0.1 / 3
    # A box may lie anywhere within the image.
    free = (left / (width - w))[w < width]
    assert abs(free.mean() - 0.5) < 4 / math.sqrt(12 * len(free))
    assert abs(free.var() - 1 / 12) < 0.01


@pytest.mark.parametrize(
    ("shape", "edges"),
    [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506)), ((1, 1), (0, 0, 1, 1))],
)
def test_resized_crop_of_extreme_pictures_is_central_and_largest(shape, edges):
    assert resized_crop(*shape, (8, 8), 1, scale_min=0.9).edges == edges


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_resized_crop_cuts_before_resizing(name):
    image, crop = smooth(60, 90), partial(resized_crop, interpolation=name)
    for draw in DRAWS[:20]:
        part = Image.fromarray(image).crop(crop(90, 60, (16, 24), draw).edges)
        expected = part.resize((24, part.height), INTERPOLATIONS[name])  # rows first
        expected = np.asarray(expected.resize((24, 16), INTERPOLATIONS[name]))
        np.testing.assert_array_equal(crop_pixels(image, crop, (16, 24), draw), expected)


# Width and height of a picture, height and width of the result, and crop; resized (width, height)
# and corner (left, top) of torchvision's Resize and CenterCrop, and the checksum of their pixels.
TORCHVISION = [
    ((500, 375), (224, 224), 0.875, (341, 256), (58, 16), 0x7B624C03),
    ((375, 500), (224, 224), 0.875, (256, 341), (16, 58), 0x857880E2),
    ((333, 500), (224, 224), 0.9, (248, 372), (12, 74), 0x4D11EA31),
    ((640, 427), (384, 384), 1.0, (575, 384), (96, 0), 0xB8B65811),
    ((77, 50), (32, 32), 1.0, (49, 32), (8, 0), 0xED856C57),
    ((301, 299), (160, 160), 0.875, (183, 182), (12, 11), 0x17788526),
    ((43, 532), (96, 96), 0.9, (106, 1311), (5, 608), 0xF25B0CC3),
    ((1000, 1000), (224, 224), 224 / 256, (256, 256), (16, 16), None),
    ((1000, 1000), (240, 240), 0.95, (252, 252), (6, 6), None),
    # Which torchvision does not have: each side is at least as large as that of the result.
    ((90, 60), (24, 40), 0.95, (42, 28), (1, 2), None),
    ((40, 133), (24, 40), 0.95, (42, 139), (1, 58), None),
]


@pytest.mark.parametrize(("shape", "size", "crop", "resized", "corner", "checksum"), TORCHVISION)
def test_pixels_match_torchvision(shape, size, crop, resized, corner, checksum):
    box = centre(*shape, size, crop=crop)
    assert (box.resized, box.edges[:2]) == (resized, corner)
    if checksum is not None:
        y, x = np.mgrid[: shape[1], : shape[0]]
        pattern = np.stack([(x * 7 + y * 3) % 256, (x * x // 5 + y) % 256, (x ^ y) % 256], axis=-1)
        cropped = crop_pixels(pattern.astype(np.uint8), partial(centre, crop=crop), size)
        assert zlib.crc32(cropped.tobytes()) == checksum


def test_only_very_long_strips_are_cut_before_resizing():
    """The limit is 2**24 pixels, a strip of 256:1 at 256 pixels."""
    box = centre(257, 1, (256, 256))
    assert (box.resized, box.edges) == (None, (128, 0, 129, 1))
    assert centre(256, 1, (256, 256)).resized == (2**16, 2**8)
    image = smooth(1, 256)
    full_strip = Image.fromarray(image).resize((2**16, 2**8), Image.Resampling.BICUBIC)
    left = (2**16 - 2**8) // 2
    expected = np.asarray(full_strip.crop((left, 0, left + 2**8, 2**8)))
    np.testing.assert_array_equal(crop_pixels(image, centre, (256, 256)), expected)


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("crop", [resized_crop, partial(centre, crop=0.9)])
def test_files_and_pixels_give_equal_crops(crop, orientation):
    picture = Image.fromarray(smooth(120, 90))
    data = encode(picture, "JPEG", quality=95, exif=exif(orientation))
    for draw in DRAWS[:4]:
        np.testing.assert_array_equal(
            crop_file(EncodedImage(data), crop, (32, 40), draw),
            crop_pixels(decode_image(data), crop, (32, 40), draw),
        )


@pytest.mark.parametrize(("side", "reduce"), [(130, 2), (260, 4), (515, 8)])
def test_large_jpegs_are_decoded_at_reduced_size(side, reduce, monkeypatch):
    data = encode(Image.fromarray(smooth(side + 3, side)), "JPEG", quality=95)
    encoded, reductions = EncodedImage(data), []
    picture = encoded.picture
    monkeypatch.setattr(
        encoded, "picture", lambda *, reduce: reductions.append(reduce) or picture(reduce=reduce)
    )
    whole_crop = partial(resized_crop, scale_min=1.0, ratio_min=0.9, ratio_max=1.1)
    got = crop_file(encoded, whole_crop, (32, 32), 5)
    assert reductions == [reduce]
    expected = crop_pixels(decode_image(data), whole_crop, (32, 32), 5)
    assert np.abs(got.astype(int) - expected).mean() < 1.5
    # Evaluation never does so.
    np.testing.assert_array_equal(
        crop_file(EncodedImage(data), centre, (32, 32)),
        crop_pixels(decode_image(data), centre, (32, 32)),
    )
