"""Joint crops of images and the classes of their pixels.

`scaled_crop` is mmsegmentation's recipe for ADE20k: resize at random, crop at random. Images are
resized bilinearly without antialiasing, classes by the nearest pixel.
"""

from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from rope_jax.data.draws import uniform
from rope_jax.data.images.crops import Box, check_order, crop_pixels
from rope_jax.names.options import Count, Positive, Share

IGNORED = 255
_REDRAWS = 10  # crops beyond the first

Pixels = UInt8[np.ndarray, "h w 3"]
Classes = UInt8[np.ndarray, "h w"]


def crop_both(
    image: Pixels, classes: Classes, crop: Any, size: tuple[int, int], draw: int = 0
) -> tuple[UInt8[np.ndarray, "H W 3"], UInt8[np.ndarray, "H W"]]:
    """One crop of an image and of its classes, which are resized by the nearest pixel.

    Args:
        image: of any size.
        classes: of its pixels; 255 for none.
        crop: an `Augmentation` for labels of pixels.
        size: (H, W) of the crop; a joint one may be smaller.
        draw: 64 random bits.
    """
    if "images" not in crop.entry.labels:  # it changes both
        return crop(image, classes, size, draw)

    def nearest(*arguments: Any) -> Box:
        return crop(*arguments)._replace(interpolation=Image.Resampling.NEAREST)

    return crop_pixels(image, crop, size, draw), crop_pixels(classes, nearest, size, draw)


def scale_size(
    size: tuple[int, int], ratio: float, *, short: int | float, long: int | float
) -> tuple[int, int]:
    """The size at which both sides fit into `ratio` times (short, long), with the same aspect.

    >>> scale_size((683, 1024), 1.0, short=512, long=2048)
    (512, 768)

    Args:
        size: (height, width) of the image.
        ratio: of the resized image to one that just fits.
        short, long: pixels that the sides must fit into.
    """
    factor = min(long * ratio / max(size), short * ratio / min(size))
    return tuple(max(1, int(side * factor + 0.5)) for side in size)


def scaled_crop(
    image: Pixels,
    classes: Classes,
    size: tuple[int, int],
    draw: int,
    *,
    low: Positive = 0.5,
    high: Positive = 2.0,
    short: Count = 512,
    long: Count = 2048,
    share: Share = 0.75,
) -> tuple[UInt8[np.ndarray, "H W 3"], UInt8[np.ndarray, "H W"]]:
    """A crop of the image resized by a random ratio, and its classes.

    Like mmsegmentation's RandomResize and RandomCrop, except that classes are those of the pixel
    with the nearest centre, where OpenCV takes the one to the upper left.

    >>> pixels, classes = np.zeros((60, 80, 3), np.uint8), np.zeros((60, 80), np.uint8)
    >>> image, labels = scaled_crop(pixels, classes, (64, 64), 1, short=32, long=128)
    >>> image.shape, labels.shape
    ((43, 58, 3), (43, 58))

    Args:
        image: of any size.
        classes: of its pixels; 255 for none.
        size: the largest (H, W) of the crop.
        draw: 64 random bits.
        low, high: of the ratio, see `scale_size`.
        short, long: see `scale_size`.
        share: a crop in which one class has this fraction (of the pixels with a class) or more, or
            that has a single class, is drawn again, up to ten times.

    Returns:
        The crop and its classes; smaller than `size` where the resized image is.

    Raises:
        ValueError: options out of range.
    """
    check_order("scaled_crop", low=low, high=high)
    check_order("scaled_crop", short=short, long=long)
    numbers = uniform(draw)
    ratio = low + (high - low) * next(numbers)
    resized = scale_size(image.shape[:2], ratio, short=short, long=long)
    extent = tuple(map(min, resized, size))
    for _ in range(1 + _REDRAWS):
        corner = tuple(
            int(next(numbers) * (n - m + 1)) for n, m in zip(resized, extent, strict=True)
        )
        labels = nearest_crop(classes, resized, corner, extent)
        counts = np.bincount(labels.ravel(), minlength=256)[:IGNORED]
        if share == 1 or ((counts > 0).sum() > 1 and counts.max() < share * counts.sum()):
            break
    return bilinear_crop(image, resized, corner, extent), labels


def nearest_crop(
    classes: Classes, resized: tuple[int, int], corner: tuple[int, int], extent: tuple[int, int]
) -> UInt8[np.ndarray, "rows columns"]:
    """A part of a resized map of classes, with the nearest pixel at each place.

    Args:
        classes: the map.
        resized: (height, width) to which it is resized.
        corner: first row and column of the part.
        extent: rows and columns of the part.
    """
    rows, columns = (
        ((np.arange(first, first + count) + 0.5) * before / after).astype(int)
        for first, count, before, after in zip(corner, extent, classes.shape, resized, strict=True)
    )
    return classes[rows[:, None], columns]


def bilinear_crop(
    image: Pixels, resized: tuple[int, int], corner: tuple[int, int], extent: tuple[int, int]
) -> UInt8[np.ndarray, "rows columns 3"]:
    """A part of the image, interpolated bilinearly between the centres of pixels."""
    mixed = image
    for axis in (0, 1):
        before, after, first = image.shape[axis], resized[axis], corner[axis]
        place = (np.arange(first, first + extent[axis]) + 0.5) * before / after - 0.5
        low = np.floor(place).astype(int)
        weight = (place - low).astype(np.float32).reshape(-1, *(1,) * (2 - axis))
        lower, upper = (
            np.take(mixed, np.clip(low + step, 0, before - 1), axis).astype(np.float32)
            for step in (0, 1)
        )
        mixed = lower + weight * (upper - lower)
    return np.rint(mixed).astype(np.uint8)
