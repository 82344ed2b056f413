"""Frames: which part of a picture of any size becomes an image of one size. Cutting and resizing are Pillow's.

A frame is decided from the size alone, before the picture is decoded: large JPEG files are then decoded at a fraction of their size.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from rope_jax.data.decode import EncodedImage

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_RANDOM_INTERPOLATIONS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_TRIES = 10
# A crop that shrinks is first reduced in the JPEG transform as far as it stays so many times as large as the result. At 2 the images are
# close to those without the reduction (Pillow's documentation of `reducing_gap`).
_GAP = 2


class Cut(NamedTuple):
    """A box of a picture and how it is resized.

    Attributes:
        box: left, top, right, bottom in pixels.
        interpolation: with antialiasing where it shrinks.
        alone: whether the box is cut out before it is resized, so that pixels beside it take no part; then its numbers are whole.
        reducible: whether the picture may be decoded at a fraction of its size.
    """

    box: tuple[float, float, float, float]
    interpolation: Image.Resampling
    alone: bool = False
    reducible: bool = False


Frame = Callable[..., Cut]  # (width, height, (h, w) of the result, a 64-bit draw) -> Cut


def resized_crop(
    width: int,
    height: int,
    size: tuple[int, int],
    draw: int,
    *,
    scale_min: float = 0.08,
    scale_max: float = 1.0,
    ratio_min: float = 3 / 4,
    ratio_max: float = 4 / 3,
    interpolation: str = "bicubic",
) -> Cut:
    """A random box: area uniform in [scale_min, scale_max] of the picture's, logarithm of width / height uniform.

    Ten boxes are drawn; where none fits, it is the largest one in the centre whose ratio is allowed (Inception's crop as torchvision and
    timm have it).

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result.
        draw: 64 random bits.
        scale_min: share of the area, above 0.
        scale_max: share of the area, at most 1.
        ratio_min: of width to height.
        ratio_max: of width to height.
        interpolation: a name of `INTERPOLATIONS`, or "random": bilinear or bicubic with equal chances.

    Returns:
        the cut.

    Raises:
        ValueError: for options out of range.
    """
    if not 0 < scale_min <= scale_max <= 1 or not 0 < ratio_min <= ratio_max < math.inf:
        raise ValueError(
            f"resized_crop(scale_min={scale_min},scale_max={scale_max},ratio_min={ratio_min},ratio_max={ratio_max}) is impossible: "
            "0 < scale_min <= scale_max <= 1 and 0 < ratio_min <= ratio_max"
        )
    numbers = _uniform(draw)
    resample = _RANDOM_INTERPOLATIONS[int(2 * next(numbers))] if interpolation == "random" else _interpolation(interpolation)
    low, high = math.log(ratio_min), math.log(ratio_max)
    for _ in range(_TRIES):
        area = width * height * (scale_min + (scale_max - scale_min) * next(numbers))
        ratio = math.exp(low + (high - low) * next(numbers))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int((width - w + 1) * next(numbers)), int((height - h + 1) * next(numbers))
            return Cut((left, top, left + w, top + h), resample, alone=True, reducible=True)
    w, h = min(width, max(1, round(height * ratio_max))), min(height, max(1, round(width / ratio_min)))
    left, top = (width - w) // 2, (height - h) // 2
    return Cut((left, top, left + w, top + h), resample, alone=True, reducible=True)


def centre(width: int, height: int, size: tuple[int, int], draw: int = 0, *, crop: float = 1.0, interpolation: str = "bicubic") -> Cut:
    """The centre of the picture after its aspect-keeping resize, as in the field's evaluations (torchvision's Resize and CenterCrop).

    Only what will be kept is resized. Pillow may then take rows before columns rather than after them; with its rounding in between, pixels
    differ by a level here and there from those of a resize of the whole.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result.
        draw: not used.
        crop: share of the resized short side that is kept: for a square of r pixels the short side becomes r / crop, rounded down (256 of
            224 at 0.875), and the long one follows, rounded down.
        interpolation: a name of `INTERPOLATIONS`.

    Returns:
        the cut.

    Raises:
        ValueError: for options out of range.
    """
    if not 0 < crop <= 1:
        raise ValueError(f"centre(crop={crop}) is impossible: crop is above 0 and at most 1")
    rows, columns = (math.floor(side / crop + 1e-9) for side in size)
    if width * rows >= height * columns:  # the height decides
        resized_height, resized_width = rows, max(columns, width * rows // height)
    else:
        resized_height, resized_width = max(rows, height * columns // width), columns
    top, left = round((resized_height - size[0]) / 2), round((resized_width - size[1]) / 2)
    x, y = width / resized_width, height / resized_height
    box = (left * x, top * y, min((left + size[1]) * x, width), min((top + size[0]) * y, height))
    return Cut(box, _interpolation(interpolation))


def stretch(width: int, height: int, size: tuple[int, int], draw: int = 0, *, interpolation: str = "bicubic") -> Cut:
    """The whole picture, whatever that does to its aspect.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result; not used.
        draw: not used.
        interpolation: a name of `INTERPOLATIONS`.

    Returns:
        the cut.

    Raises:
        ValueError: for an unknown interpolation.
    """
    return Cut((0, 0, width, height), _interpolation(interpolation))


FRAMES: dict[str, Frame] = {"resized_crop": resized_crop, "centre": centre, "stretch": stretch}


def cut_pixels(image: UInt8[np.ndarray, "H W 3"], frame: Frame, size: tuple[int, int], draw: int = 0) -> UInt8[np.ndarray, "h w 3"]:
    """Applies a frame to the pixels of a picture.

    Args:
        image: uint8 [H, W, 3].
        frame: of `FRAMES`, with its options bound.
        size: (h, w) of the result, in pixels.
        draw: 64 random bits.

    Returns:
        uint8 [h, w, 3].
    """
    height, width = image.shape[:2]
    cut = frame(width, height, size, draw)
    if cut.alone:  # cut before Pillow copies the picture
        left, top, right, bottom = cut.box
        image, cut = image[top:bottom, left:right], cut._replace(box=(0, 0, right - left, bottom - top))
    return _resized(Image.fromarray(np.ascontiguousarray(image)), cut, size)


def cut_file(data: EncodedImage, frame: Frame, size: tuple[int, int], draw: int = 0) -> UInt8[np.ndarray, "h w 3"]:
    """Decodes a picture and applies a frame; otherwise like `cut_pixels`.

    Raises:
        ValueError: for what cannot be decoded.
    """
    cut = frame(*data.size, size, draw)
    left, top, right, bottom = cut.box
    reduce = 1
    if cut.reducible:
        shrinks = min((right - left) / size[1], (bottom - top) / size[0]) / _GAP
        reduce = next(factor for factor in (8, 4, 2, 1) if factor == 1 or shrinks >= factor)
    picture = data.picture(reduce=reduce)
    if picture.size != data.size:  # the box no longer falls on whole pixels; what lies beside it takes a small part
        box = (left / reduce, top / reduce, min(right / reduce, picture.width), min(bottom / reduce, picture.height))
        cut = cut._replace(box=box, alone=False)
    if cut.alone:
        picture, cut = picture.crop(cut.box), cut._replace(box=None)
    return _resized(picture, cut, size)


def _resized(picture: Image.Image, cut: Cut, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(picture.resize(size[::-1], cut.interpolation, box=cut.box))


def _interpolation(name: str) -> Image.Resampling:
    if name not in INTERPOLATIONS:
        raise ValueError(f"interpolation {name!r} is unknown; known are {', '.join(INTERPOLATIONS)}; resized_crop also takes random")
    return INTERPOLATIONS[name]


def _uniform(draw: int) -> Iterator[float]:
    """Numbers in [0, 1) that follow from one draw (SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    mask = 2**64 - 1
    while True:
        draw = (draw + 0x9E3779B97F4A7C15) & mask
        mixed = ((draw ^ (draw >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        yield ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53
