"""Resizing and cropping of images with boxes, which keep their aspect, and the sizes of batches.

The placing of an image follows from its size and one draw: every process can compute the sizes of
all images of a batch, and thus its canvas, without reading them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8, UInt64
from PIL import Image

from rope_jax.data.draws import uniform
from rope_jax.data.images.crops import check_order, mirror_mask
from rope_jax.names.options import Count, CountOrZero, Probability

Size = tuple[int, int]  # height, width

_LEAST = 1e-5  # pixels: a box has no area if a side is not longer than this
_WHOLE = 2**24  # pixels; a larger image is not resized as a whole


class Placing(NamedTuple):
    """Two steps of resizing and cropping, from an image to the result.

    Attributes:
        resized: size to which the whole image is resized.
        corner: top and left of the part of it that is kept.
        part: size of that part.
        scaled: size to which the part is resized.
        offset: top and left of the result in it.
        extent: size of the result.
    """

    resized: Size
    corner: tuple[int, int]
    part: Size
    scaled: Size
    offset: tuple[int, int]
    extent: Size


def fit(size: Size, draw: int = 0, *, short: Count = 800, long: Count = 1333) -> Placing:
    """The whole image, resized so that its sides fit: the evaluation of DETR and its descendants.

    Sizes are detectron2's, which detrex uses; facebookresearch/detr rounds some differently.

    >>> fit((480, 640)).extent, fit((300, 900)).extent
    ((800, 1067), (444, 1333))

    Args:
        size: (height, width) of the image.
        draw: not used.
        short, long: pixels that the shorter and the longer side must fit into; one of them fits
            exactly.

    Raises:
        ValueError: options out of range.
    """
    check_order("fit", short=short, long=long)
    fitted = fit_size(size, short=short, long=long)
    return Placing(size, (0, 0), size, fitted, (0, 0), fitted)


def fit_size(size: Size, *, short: int, long: int) -> Size:
    """The size at which both sides of an image fit, with the same aspect: detectron2's.

    It is scaled to the shorter side, then, if too long, to the longer one, and rounded at the end.
    In one step, a few sides close to half a pixel would be rounded the other way.

    Source: ResizeShortestEdge of facebookresearch/detectron2.

    >>> fit_size((480, 640), short=800, long=1333)
    (800, 1067)
    >>> fit_size((634, 317), short=800, long=1333)  # in one step (1333, 666)
    (1333, 667)

    Args:
        size: (height, width) of the image.
        short, long: pixels that the shorter and the longer side must fit into.
    """
    sides = [short if side == min(size) else short / min(size) * side for side in size]
    if max(sides) > long:
        sides = [side * (long / max(sides)) for side in sides]
    return tuple(max(1, int(side + 0.5)) for side in sides)


def detr_crop(
    size: Size,
    draw: int,
    *,
    low: Count = 480,
    high: Count = 800,
    step: Count = 32,
    long: Count = 1333,
    cut: Probability = 0.5,
    before_low: Count = 400,
    before_high: Count = 600,
    before_step: Count = 100,
    cut_low: Count = 384,
    cut_high: Count = 600,
    window: CountOrZero = 0,
) -> Placing:
    """The image or a part of it, resized to a random shorter side: the training of DETR.

    Source: IDEA-Research/detrex (`coco_detr`), in all details, with detectron2's sizes. It follows
    facebookresearch/detr, which truncates where detectron2 rounds.

    >>> detr_crop((480, 640), 3)
    Placing(resized=(600, 800), corner=(18, 255), part=(517, 399), scaled=(663, 512), offset=(0, 0),
            extent=(663, 512))

    Args:
        size: (height, width) of the image.
        draw: 64 random bits.
        low, high, step: the shorter side, in pixels, is low, low + step, ... or high, unless the
            longer one would exceed `long`.
        long: largest side, in pixels.
        cut: probability of cutting a part out of the image, before that resizing.
        before_low, before_high, before_step: shorter sides, in pixels, to one of which the image is
            resized before a part is cut out.
        cut_low, cut_high: the sides of the part, in pixels, or of the image where that has fewer.
        window: largest side of the result, in pixels, which is cut out of a larger one at a random
            place (ViT-Adapter's Mask R-CNN); 0 to keep all of it.

    Raises:
        ValueError: options out of range.
    """
    check_order("detr_crop", low=low, high=high, long=long)
    check_order("detr_crop", before_low=before_low, before_high=before_high)
    check_order("detr_crop", cut_low=cut_low, cut_high=cut_high)
    shorts = range(low, high + 1, step)
    befores = range(before_low, before_high + 1, before_step)
    numbers = uniform(draw)
    resized = part = size
    corner = (0, 0)
    if next(numbers) < cut:
        before = befores[int(next(numbers) * len(befores))]
        resized = fit_size(size, short=before, long=max(before, _WHOLE // before))
        least, most = ([min(side, n) for side in resized] for n in (cut_low, cut_high))
        part = tuple(a + int(next(numbers) * (b - a + 1)) for a, b in zip(least, most, strict=True))
        corner = tuple(int(next(numbers) * (n - m + 1)) for n, m in zip(resized, part, strict=True))
    short = shorts[int(next(numbers) * len(shorts))]
    scaled = fit_size(part, short=short, long=long)
    extent = tuple(min(side, window or side) for side in scaled)
    offset = tuple(int(next(numbers) * (n - m + 1)) for n, m in zip(scaled, extent, strict=True))
    return Placing(resized, corner, part, scaled, offset, extent)


def place_pixels(image: UInt8[np.ndarray, "h w 3"], placing: Placing) -> UInt8[np.ndarray, "H W 3"]:
    """Places the pixels of an image: bilinear, with antialiasing where it shrinks."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    for size, (top, left), (height, width) in (placing[:3], placing[3:]):
        if picture.size != size[::-1]:  # otherwise Pillow would copy it
            picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        if size != (height, width):
            picture = picture.crop((left, top, left + width, top + height))
    return np.asarray(picture)


def place_masks(masks: UInt8[np.ndarray, "n h w"], placing: Placing) -> UInt8[np.ndarray, "n H W"]:
    """Places masks; of several pixels in place of one, the one to the upper left (mmdetection)."""

    def places(axis: int) -> Int[np.ndarray, " m"]:
        place = np.arange(placing.extent[axis]) + placing.offset[axis]
        place = place * placing.part[axis] // placing.scaled[axis] + placing.corner[axis]
        return place * masks.shape[1 + axis] // placing.resized[axis]

    return masks[:, places(0)[:, None], places(1)]


def place_boxes(
    boxes: Float[np.ndarray, "n 4"], size: Size, placing: Placing
) -> tuple[Float[np.ndarray, "m 4"], Bool[np.ndarray, " n"]]:
    """Places boxes, and clips them to the image.

    Args:
        boxes: x1 y1 x2 y2 in pixels of the image.
        size: of the image.
        placing: of the image.

    Returns:
        The boxes that have an area, and their mask among `boxes`.
    """
    sides = (size, *placing[:5])
    size, resized, corner, part, scaled, offset = (np.array(x[::-1] * 2, float) for x in sides)
    placed = (boxes * resized / size - corner) * scaled / part - offset
    return clip_boxes(placed, placing.extent)


def clip_boxes(
    boxes: Float[np.ndarray, "n 4"], size: Size
) -> tuple[Float[np.ndarray, "m 4"], Bool[np.ndarray, " n"]]:
    """Clips boxes to an image; returns those that still have an area, and their mask."""
    inside = np.clip(boxes, 0, np.array(size[::-1] * 2, float))
    kept = (inside[:, 2:] - inside[:, :2] > _LEAST).all(axis=1)
    return inside[kept], kept


def flip_boxes(
    boxes: Float[np.ndarray, "B n 4"],
    width: int,
    draws: UInt64[np.ndarray, " B"],
    *,
    p: float = 0.5,
) -> Float[np.ndarray, "B n 4"]:
    """Moves the boxes of images of this width as `flip` moves pixels, for the same draws."""
    turned = boxes[..., [2, 1, 0, 3]] * [-1, 1, -1, 1] + [width, 0, width, 0]
    return np.where(mirror_mask(draws, p)[:, None, None], turned, boxes)


def smallest_canvas(extents: Int[np.ndarray, "b 2"], canvases: Sequence[Size]) -> Size:
    """The smallest canvas that holds all images of a batch.

    >>> smallest_canvas(np.array([[480, 640], [640, 400]]), [(480, 640), (640, 640), (800, 1344)])
    (640, 640)

    Args:
        extents: rows and columns of the images.
        canvases: (height, width) of each.

    Raises:
        ValueError: none holds them.
    """
    height, width = extents.max(axis=0).tolist()
    fitting = [size for size in canvases if height <= size[0] and width <= size[1]]
    if not fitting:
        sizes = ", ".join(f"{a}x{b}" for a, b in canvases)
        raise ValueError(
            f"the images of a batch may need {height}x{width} pixels, but the canvases are "
            f"{sizes}: add one that is as large"
        )
    return min(fitting, key=math.prod)
