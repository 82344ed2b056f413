"""Crops and flips on the host; resizing is done by Pillow.

A crop is a box that depends only on the size and is known before the picture is decoded, so that
large JPEG files are decoded at a fraction of their size.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8, UInt64
from PIL import Image

from rope_jax.data.draws import scale_draws, uniform
from rope_jax.data.images.decode import EncodedImage
from rope_jax.names.options import Count, Positive, Probability, Share
from rope_jax.names.text import image_pair

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
Interpolation = Literal[*INTERPOLATIONS]
_RANDOM_INTERPOLATIONS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_TRIES = 10
# A shrinking box is first reduced in the JPEG transform, while it stays this many times larger than
# the result. At 2 the images are close to those without (Pillow's docs on `reducing_gap`).
_GAP = 2
_WHOLE = 2**24  # pixels; a larger picture is not resized as a whole


class Box(NamedTuple):
    """A box of a picture, and the method of resizing it.

    Attributes:
        edges: left, top, right, bottom in pixels.
        interpolation: with antialiasing for downsampling.
        alone: True to cut out the box before it is resized, so that pixels outside it have no
            influence; the edges are then whole numbers. A JPEG may be decoded at a fraction of its
            size before.
        resized: (width, height) to which the whole picture is resized first. The edges are then
            whole numbers, in pixels of the resized picture; the box is not resized again.
    """

    edges: tuple[float, float, float, float]
    interpolation: Image.Resampling
    alone: bool = False
    resized: tuple[int, int] | None = None


Crop = Callable[..., Box]  # (width, height, (h, w) of the result, a 64-bit draw) -> Box


def resized_crop(
    width: int,
    height: int,
    size: tuple[int, int],
    draw: int,
    *,
    scale_min: Share = 0.08,
    scale_max: Share = 1.0,
    ratio_min: Positive = 3 / 4,
    ratio_max: Positive = 4 / 3,
    interpolation: Literal[*INTERPOLATIONS, "random"] = "bicubic",
) -> Box:
    """A random box: uniform fraction of the area, uniform logarithm of width / height.

    Inception's crop as in torchvision and timm: ten boxes are drawn; if none fits, the largest one
    in the centre with an allowed ratio is taken.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result.
        draw: 64 random bits.
        scale_min: smallest fraction of the area, above 0.
        scale_max: largest fraction of the area, at most 1.
        ratio_min: smallest ratio of width to height.
        ratio_max: largest ratio of width to height.
        interpolation: a name of `INTERPOLATIONS`, or "random": bilinear or bicubic, equally often.

    Raises:
        ValueError: for options out of range.
    """
    check_order("resized_crop", scale_min=scale_min, scale_max=scale_max)
    check_order("resized_crop", ratio_min=ratio_min, ratio_max=ratio_max)
    numbers = uniform(draw)
    if interpolation == "random":
        resample = _RANDOM_INTERPOLATIONS[int(2 * next(numbers))]
    else:
        resample = INTERPOLATIONS[interpolation]
    low, high = math.log(ratio_min), math.log(ratio_max)
    for _ in range(_TRIES):
        area = width * height * (scale_min + (scale_max - scale_min) * next(numbers))
        ratio = math.exp(low + (high - low) * next(numbers))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int((width - w + 1) * next(numbers))
            top = int((height - h + 1) * next(numbers))
            break
    else:
        w = min(width, max(1, round(height * ratio_max)))
        h = min(height, max(1, round(width / ratio_min)))
        left, top = (width - w) // 2, (height - h) // 2
    return Box((left, top, left + w, top + h), resample, alone=True)


def centre(
    width: int,
    height: int,
    size: tuple[int, int],
    draw: int = 0,
    *,
    crop: Share = 1.0,
    interpolation: Interpolation = "bicubic",
) -> Box:
    """The centre after a resize that keeps the aspect ratio: torchvision's Resize and CenterCrop.

    The pixels equal torchvision's. If the resized picture would exceed 2**24 pixels (very long
    strips), only the kept part is resized, and pixels may differ slightly.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result.
        draw: not used.
        crop: fraction of the resized short side that is kept: for a square of r pixels the short
            side becomes r / crop, rounded down (256 for 224 at 0.875), and the long one follows,
            rounded down. Half of an odd margin is rounded to the even number.
        interpolation: a name of `INTERPOLATIONS`.
    """
    rows, columns = (math.floor(side / crop) for side in size)
    if width * rows >= height * columns:  # the height decides
        resized_height, resized_width = rows, max(columns, width * rows // height)
    else:
        resized_height, resized_width = max(rows, height * columns // width), columns
    top, left = round((resized_height - size[0]) / 2), round((resized_width - size[1]) / 2)
    right, bottom, resample = left + size[1], top + size[0], INTERPOLATIONS[interpolation]
    if resized_width * resized_height <= _WHOLE:
        resized = (resized_width, resized_height)
        return Box((left, top, right, bottom), resample, resized=resized)
    x, y = width / resized_width, height / resized_height
    return Box((left * x, top * y, min(right * x, width), min(bottom * y, height)), resample)


def stretch(
    width: int,
    height: int,
    size: tuple[int, int],
    draw: int = 0,
    *,
    interpolation: Interpolation = "bicubic",
) -> Box:
    """The whole picture, resized without regard to its aspect ratio.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        size: (h, w) of the result; not used.
        draw: not used.
        interpolation: a name of `INTERPOLATIONS`.
    """
    return Box((0, 0, width, height), INTERPOLATIONS[interpolation])


def crop_pixels(
    image: UInt8[np.ndarray, "H W *colours"], crop: Crop, size: tuple[int, int], draw: int = 0
) -> UInt8[np.ndarray, "h w *colours"]:
    """Crops and resizes the pixels of a picture.

    Args:
        image: uint8 [H, W, 3], or [H, W] without colours.
        crop: one of this module, with its options bound.
        size: (h, w) of the result, in pixels.
        draw: 64 random bits.

    Returns:
        uint8 [h, w, 3] or [h, w].
    """
    height, width = image.shape[:2]
    box = crop(width, height, size, draw)
    if box.alone:  # cut before Pillow copies the picture
        left, top, right, bottom = box.edges
        image = image[top:bottom, left:right]
    return _resize_box(Image.fromarray(np.ascontiguousarray(image)), box, size)


def crop_file(
    data: EncodedImage, crop: Crop, size: tuple[int, int], draw: int = 0
) -> UInt8[np.ndarray, "h w 3"]:
    """Decodes, crops and resizes a picture; otherwise like `crop_pixels`.

    Raises:
        ValueError: for files that cannot be decoded.
    """
    box = crop(*data.size, size, draw)
    left, top, right, bottom = box.edges
    reduce = 1
    if box.alone:
        shrinks = min((right - left) / size[1], (bottom - top) / size[0]) / _GAP
        reduce = next(factor for factor in (8, 4, 2, 1) if factor == 1 or shrinks >= factor)
    picture = data.picture(reduce=reduce)
    if picture.size != data.size:  # edges are no longer whole; pixels next to them have influence
        right, bottom = min(right / reduce, picture.width), min(bottom / reduce, picture.height)
        box = box._replace(edges=(left / reduce, top / reduce, right, bottom), alone=False)
    if box.alone:
        picture = picture.crop(box.edges)
    return _resize_box(picture, box, size)


def resize(
    images: UInt8[np.ndarray, "n H W 3"], size: int | tuple[int, int]
) -> UInt8[np.ndarray, "n h w 3"]:
    """Resizes images to one size, bicubic with antialiasing; the aspect may change.

    >>> resize(np.zeros((5, 8, 8, 3), np.uint8), (16, 12)).shape
    (5, 16, 12, 3)

    Args:
        images: uint8 [n, H, W, 3].
        size: (h, w) in pixels, or one number.

    Returns:
        uint8 [n, h, w, 3]; `images` itself if it has that size already.

    Raises:
        ValueError: for a size below 1, or images of another shape or dtype.
    """
    size = image_pair(size)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"images have shape {images.shape} and dtype {images.dtype}; they must be uint8 "
            "[n, H, W, 3]: a single one is image[None]"
        )
    if images.shape[1:3] == size:
        return images
    return np.stack([crop_pixels(image, stretch, size) for image in images])


def _resize_box(picture: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
    if box.resized is not None:
        return np.asarray(picture.resize(box.resized, box.interpolation).crop(box.edges))
    if box.alone:  # rows are resized first, as on the device; from Pillow 13 on, some columns are
        picture = picture.resize((size[1], picture.height), box.interpolation)
        return np.asarray(picture.resize(size[::-1], box.interpolation))
    return np.asarray(picture.resize(size[::-1], box.interpolation, box=box.edges))


def check_order(name: str, **options: int | float) -> None:
    """Raises ValueError unless the options of an augmentation ascend."""
    if [*options.values()] != sorted(options.values()):
        values = ",".join(f"{option}={value}" for option, value in options.items())
        raise ValueError(f"{name}({values}) is impossible: {' <= '.join(options)}")


def pad_and_crop(
    images: UInt8[np.ndarray, "B H W 3"], draws: UInt64[np.ndarray, " B"], *, pad: Count = 4
) -> UInt8[np.ndarray, "B H W 3"]:
    """Pads each image with black pixels and crops its original size at a random place.

    Args:
        images: uint8 [B, H, W, 3].
        draws: uint64 [B], uniform.
        pad: pixels on every side, at least 1 and smaller than both sides of the image.

    Returns:
        uint8 [B, H, W, 3].

    Raises:
        ValueError: for `pad` out of range.
    """
    height, width = images.shape[1:3]
    if pad >= min(height, width):
        raise ValueError(
            f"crop(pad={pad}) does not suit images of {height} x {width} pixels: "
            "pad must be below both sides"
        )
    places = 2 * pad + 1
    down = (scale_draws(draws >> np.uint64(32), places) - pad).tolist()
    right = (scale_draws(draws & np.uint64(0xFFFFFFFF), places) - pad).tolist()
    out = np.zeros_like(images)
    for image, source, y, x in zip(out, images, down, right, strict=True):
        inside = source[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)]
        image[max(-y, 0) : height - max(y, 0), max(-x, 0) : width - max(x, 0)] = inside
    return out


def flip(
    images: UInt8[np.ndarray, "B H W C"], draws: UInt64[np.ndarray, " B"], *, p: Probability = 0.5
) -> UInt8[np.ndarray, "B H W C"]:
    """Mirrors each image left to right with probability `p`.

    Args:
        images: uint8 [B, H, W, C].
        draws: uint64 [B], uniform.
        p: probability, 0 to 1.

    Returns:
        uint8 [B, H, W, C].
    """
    mirrored, out = mirror_mask(draws, p), images.copy()
    pixels = out.view(f"V{images.shape[-1]}")  # the bytes of a pixel are moved together
    pixels[mirrored] = pixels[mirrored, :, ::-1]
    return out


def mirror_mask(draws: UInt64[np.ndarray, " B"], p: float) -> Bool[np.ndarray, " B"]:
    """Mask of the images that `flip` mirrors, for the same arguments."""
    return (draws >> np.uint64(11)) * 2.0**-53 < p
