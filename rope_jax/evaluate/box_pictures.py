"""Pictures of images with boxes: those that are annotated beside those that a model finds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from rope_jax.config import Config
from rope_jax.data import Images, Streamed, Truth
from rope_jax.evaluate.accuracy import applied, counted, resolutions
from rope_jax.evaluate.sheets import Colour, Panel, class_colours, draw_sheet, text_font
from rope_jax.tasks.average_precision import Found
from rope_jax.tasks.detection import found_in
from rope_jax.training import seeds
from rope_jax.training.setup import Setup, State, load_split

SHOWN = 0.3  # least score of a box in a picture
_LEAST, _MOST, _TIMES = 480, 768, 4  # widths of panels in pixels, and of small images times theirs


class Detected(NamedTuple):
    """An image as it is stored, its objects, and those that a model finds."""

    image: UInt8[np.ndarray, "H W 3"]
    truth: Truth
    found: Found


class _Box(NamedTuple):
    """A box in pixels of the image, with its text and colour."""

    corners: list[float]
    text: str
    colour: Colour


def sizes_of_pictures(config: Config) -> list[tuple[int, int]]:
    """The training resolution and the largest, without duplicates."""
    sizes = resolutions(config)
    return list(dict.fromkeys((sizes[0], max(sizes[1:] or sizes, key=math.prod))))


def first_detected(setup: Setup, state: State, *, count: int = 2) -> list[Detected]:
    """The first test images of a run at its training resolution and at the largest.

    Of several seeds, the first one predicts. Arguments as of `pictures.first_images`.
    """
    config = setup.config
    apply, weights = applied(setup, state)
    detected = []
    for size in sizes_of_pictures(config):
        images = load_split(config, "test", size)
        (parts,), _ = counted(
            apply,
            seeds.take(weights, config.seeds),
            images,
            mean=config.data.mean,
            std=config.data.std,
            batch_size=config.eval.batch_size,  # the program of the evaluation, compiled once
            mesh=setup.mesh,
            task=setup.task,
            config=seeds.single(config),
            steps=1,
        )
        detected += detected_in(parts, images, count)
    return detected


def detected_in(
    parts: Sequence[Mapping[str, np.ndarray]], images: Images | Streamed, count: int
) -> list[Detected]:
    """The first images of a set with their detections.

    Args:
        parts: from the `count` of `rope_jax.tasks.detection`, of the set's batches.
        images: the set.
        count: of images.
    """
    first = itertools.islice(found_in(parts).items(), count)
    return [Detected(images.pixels(k), images.truth(k), found) for k, found in first]


def draw_detections(
    detected: Sequence[Detected], class_names: Sequence[str] | None, classes: int, path: Path
) -> None:
    """Writes a picture: in each row an image with its objects, and with the boxes that are found.

    Boxes have the colour and the name of their class; those that are found have their scores, and
    only those of at least 0.3 are shown.

    Args:
        detected: at least one image.
        class_names: in their order; None for numbers.
        classes: number of classes.
        path: of the PNG.
    """
    names = [str(k) for k in range(classes)] if class_names is None else class_names
    colours = [tuple(colour) for colour in class_colours(classes + 1)[1:].tolist()]
    rows = []
    for one in detected:
        there = list(_annotated(one.truth, names, colours))
        shown = list(_shown(one.found, names, colours))
        height, width = one.image.shape[:2]
        captions = (
            f"{height} x {width} pixels, boxes: {len(there)}",
            f"boxes with a score of {SHOWN} or more: {len(shown)}",
        )
        pairs = zip((there, shown), captions, strict=True)
        rows.append([Panel(_drawn(one.image, boxes), caption) for boxes, caption in pairs])
    draw_sheet(("annotated", "found"), rows, path)


def _annotated(truth: Truth, names: Sequence[str], colours: Sequence[Colour]) -> Iterator[_Box]:
    rows = zip(truth.boxes.tolist(), truth.labels.tolist(), truth.crowd.tolist(), strict=True)
    for corners, k, crowd in rows:
        yield _Box(corners, f"{names[k]} (crowd)" if crowd else names[k], colours[k])


def _shown(found: Found, names: Sequence[str], colours: Sequence[Colour]) -> Iterator[_Box]:
    """The boxes of high scores, the highest last: on top of the others."""
    order = np.argsort(found.scores, kind="stable")
    rows = zip(*(values[order].tolist() for values in found), strict=True)
    for corners, score, k in rows:
        if score >= SHOWN:
            yield _Box(corners, f"{names[k]} {score:.2f}", colours[k])


def _drawn(pixels: UInt8[np.ndarray, "H W 3"], boxes: Sequence[_Box]) -> Image.Image:
    """An image with boxes, large enough for their names."""
    height, width = pixels.shape[:2]
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
        # Above the box where there is room, else inside it; never beyond the image.
        x, y = max(0, min(left, size[0] - across)), top - high if top >= high else max(0, top)
        pen.rectangle((x, y, x + across, y + high), fill=box.colour)
        bright = np.dot(box.colour, (0.299, 0.587, 0.114)) > 140
        pen.text((x + 2, y + 1), box.text, fill="black" if bright else "white", font=font)
    return panel
