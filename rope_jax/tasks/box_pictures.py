"""Pictures of images with boxes: annotated boxes and masks next to those that a model detects."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from rope_jax.data import Truth
from rope_jax.data.images.masks import Mask, decode_masks
from rope_jax.tasks.average_precision import ImageDetections
from rope_jax.tasks.sheets import Colour, Panel, class_colours, draw_sheet, text_font

SHOWN = 0.3  # least score of a box in a picture
_LEAST, _MOST, _TIMES = 480, 768, 4  # widths of panels in pixels, and of small images times theirs


class DetectedImage(NamedTuple):
    """A stored image, its objects, and the detections of a model."""

    image: UInt8[np.ndarray, "H W 3"]
    truth: Truth
    found: ImageDetections


class _Box(NamedTuple):
    """A box in pixels of the image, with its text and colour, and its mask."""

    corners: list[float]
    text: str
    colour: Colour
    mask: Mask | None


def draw_detections(
    detected: Sequence[DetectedImage], class_names: Sequence[str] | None, classes: int, path: Path
) -> None:
    """Writes a picture: in each row an image with its objects, and with the detected boxes.

    Boxes and masks have the colour of their class, and boxes its name. Detected boxes have their
    scores, and only those of at least 0.3 are shown.

    Args:
        detected: at least one image.
        class_names: in their order; None for numbers.
        classes: number of classes.
        path: of the PNG.
    """
    names = [str(k) for k in range(classes)] if class_names is None else class_names
    colours = [tuple(colour) for colour in class_colours(classes + 1)[1:].tolist()]
    rows = []
    for item in detected:
        objects = list(_truth_boxes(item.truth, names, colours))
        detections = list(_detected_boxes(item.found, names, colours))
        height, width = item.image.shape[:2]
        captions = (
            f"{height} x {width} pixels, boxes: {len(objects)}",
            f"boxes with a score of {SHOWN} or more: {len(detections)}",
        )
        pairs = zip((objects, detections), captions, strict=True)
        rows.append([Panel(_draw_boxes(item.image, boxes), caption) for boxes, caption in pairs])
    draw_sheet(("annotated", "found"), rows, path)


def _truth_boxes(truth: Truth, names: Sequence[str], colours: Sequence[Colour]) -> Iterator[_Box]:
    columns = (truth.boxes.tolist(), truth.labels.tolist(), truth.crowd.tolist())
    masks = truth.masks or itertools.repeat(None)
    for corners, k, crowd, mask in zip(*columns, masks, strict=False):
        yield _Box(corners, f"{names[k]} (crowd)" if crowd else names[k], colours[k], mask)


def _detected_boxes(
    detections: ImageDetections, names: Sequence[str], colours: Sequence[Colour]
) -> Iterator[_Box]:
    """Yields the highest-scoring boxes, the highest last: on top of the others."""
    boxes, scores, classes, masks = detections
    for number in np.argsort(scores, kind="stable"):
        score, k = scores[number], classes[number]
        if score >= SHOWN:
            mask = None if masks is None else masks[number]
            yield _Box(boxes[number].tolist(), f"{names[k]} {score:.2f}", colours[k], mask)


def _draw_boxes(pixels: UInt8[np.ndarray, "H W 3"], boxes: Sequence[_Box]) -> Image.Image:
    """Draws boxes on an image, enlarged for their names, and masks as colours half and half."""
    pixels, (height, width) = pixels.copy(), pixels.shape[:2]
    for box in boxes:
        if box.mask is not None:
            (mask,) = decode_masks([box.mask], (height, width))
            pixels[mask > 0] = (pixels[mask > 0] + np.array(box.colour)) // 2
    scale = min(max(_LEAST, _TIMES * width), _MOST) / width
    size = (round(scale * width), max(1, round(scale * height)))
    smooth = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    panel = Image.fromarray(pixels).resize(size, smooth)
    pen, font = ImageDraw.Draw(panel), text_font()
    placed = [[round(scale * x) for x in box.corners] for box in boxes]
    for (left, top, right, bottom), box in zip(placed, boxes, strict=True):
        right, bottom = max(left, right - 1), max(top, bottom - 1)
        pen.rectangle((left, top, right, bottom), outline=box.colour, width=2)
    for (left, top, *_), box in zip(placed, boxes, strict=True):
        across, high = (round(x) + 4 for x in font.getbbox(box.text)[2:])
        # Above the box if there is room, otherwise inside it; never beyond the image.
        x, y = max(0, min(left, size[0] - across)), top - high if top >= high else max(0, top)
        pen.rectangle((x, y, x + across, y + high), fill=box.colour)
        bright = np.dot(box.colour, (0.299, 0.587, 0.114)) > 140
        pen.text((x + 2, y + 1), box.text, fill="black" if bright else "white", font=font)
    return panel
