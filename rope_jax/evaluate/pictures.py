"""Pictures of segmented images: each with the classes of its pixels and the predicted ones."""

import colorsys
import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, UInt8
from PIL import Image, ImageDraw, ImageFont

from rope_jax import seeds
from rope_jax.data.images.device import normalise
from rope_jax.data.sources.index import BadImages
from rope_jax.evaluate.accuracy import at_resolution, resolutions, rules
from rope_jax.files import write_file
from rope_jax.sharding import use_mesh
from rope_jax.tasks.segmentation import IGNORED
from rope_jax.training.setup import Setup, State, load_split

_SIDE, _GAP, _LINE = 256, 12, 22  # pixels: of a panel, between panels, of a line of text
_LISTED = 48  # classes that a legend has room for


class Segmented(NamedTuple):
    """An image, and the classes of its pixels; 255 for none."""

    image: UInt8[np.ndarray, "H W 3"]
    classes: UInt8[np.ndarray, "H W"]
    predicted: UInt8[np.ndarray, "H W"]


def first_images(setup: Setup, state: State, *, count: int = 2) -> list[Segmented]:
    """The first test images of a run at its training resolution and at the largest.

    Of several seeds, the first one predicts.

    Args:
        setup: of a run whose images have classes of pixels.
        state: its state.
        count: of images at each resolution.
    """
    first, *others = resolutions(setup.config)
    largest = max(others, key=lambda size: size[0] * size[1], default=first)
    sizes = dict.fromkeys((first, largest))
    return [one for size in sizes for one in _predicted(setup, state, size, count)]


def _predicted(setup: Setup, state: State, size: tuple[int, int], count: int) -> list[Segmented]:
    config = setup.config
    weights = (state["ema" if config.averaged else "params"], state.get("stats", {}), setup.rest)
    weights = tuple(seeds.take(part, config) for part in weights)
    predict = _predictor(setup, size)
    images = load_split(config, "test", size)
    drawn: list[dict[str, np.ndarray]] = []
    for number in range(len(images.labels)):
        with contextlib.suppress(BadImages):  # where the run skips them
            drawn.append(images.example(number))
        if len(drawn) == count:
            break
    found = np.asarray(predict(weights, np.stack([one["image"] for one in drawn])))
    pairs = zip(drawn, found, strict=True)
    return [Segmented(one["image"], one["label"], classes) for one, classes in pairs]


def _predictor(setup: Setup, size: tuple[int, int]) -> Callable[[Any, Array], Array]:
    """A program from weights, which are arguments and not constants of it, and images to classes.

    Args:
        setup: of the run.
        size: (height, width) of the images.
    """
    config = setup.config

    @jax.jit
    def predict(weights: Any, images: UInt8[Array, "B H W 3"]) -> UInt8[Array, "B H W"]:
        model = nnx.merge(setup.graph, *weights)
        model = at_resolution(model, size, **rules(config.eval))
        with use_mesh(setup.mesh):
            logits = model(normalise(images, config.data.mean, config.data.std))
        return logits.argmax(-1).astype(np.uint8)

    return predict


def draw_pictures(
    found: Sequence[Segmented], class_names: Sequence[str] | None, classes: int, path: Path
) -> None:
    """Writes a picture: in each row an image, its classes, and the predicted ones.

    Pixels without a class are black. The classes that are there are listed below, if they are few.

    Args:
        found: at least one image.
        class_names: in their order; None for numbers.
        classes: number of classes.
        path: of the PNG.
    """
    table = np.zeros((256, 3), np.uint8)
    table[:classes] = class_colours(classes)
    names = [str(k) for k in range(classes)] if class_names is None else class_names
    there = {int(k) for one in found for x in (one.classes, one.predicted) for k in np.unique(x)}
    listed = sorted(k for k in there if k < classes) if len(there) <= _LISTED else []
    rows = [
        [_panel(x) for x in (one.image, table[one.classes], table[one.predicted])] for one in found
    ]
    width = 3 * (_SIDE + _GAP) + _GAP
    across = max(1, width // 150)
    height = _LINE + sum(row[0].height + _LINE for row in rows) + _GAP
    height += -(-len(listed) // across) * _LINE
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)

    def write(x: int, y: int, text: str) -> None:
        pen.text((x, y), text, fill="black", font=font)

    lefts = [_GAP + column * (_SIDE + _GAP) for column in range(3)]
    for left, title in zip(lefts, ("image", "classes", "predicted"), strict=True):
        write(left, 2, title)
    top = _LINE
    for one, row in zip(found, rows, strict=True):
        for left, panel in zip(lefts, row, strict=True):
            sheet.paste(panel, (left, top))
        top += row[0].height
        known = one.classes != IGNORED
        right = (one.classes == one.predicted)[known].mean() if known.any() else 0.0
        write(lefts[0], top + 1, "{} x {} pixels".format(*one.classes.shape))
        write(lefts[2], top + 1, f"{100 * right:.1f} % of the pixels are right")
        top += _LINE
    for place, k in enumerate(listed):
        x, y = _GAP + place % across * 150, top + _GAP // 2 + place // across * _LINE
        pen.rectangle((x, y + 3, x + 14, y + 17), fill=tuple(table[k].tolist()))
        write(x + 20, y + 1, names[k][:18])
    encoded = io.BytesIO()
    sheet.save(encoded, "PNG")
    write_file(path, encoded.getvalue())


def _panel(pixels: UInt8[np.ndarray, "H W 3"]) -> Image.Image:
    """Pixels resized to the width of a panel, each one visible where they are few."""
    height, width = pixels.shape[:2]
    size = (_SIDE, max(1, round(height * _SIDE / width)))
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def class_colours(count: int) -> UInt8[np.ndarray, "K 3"]:
    """A colour of each class: light grey for the first, then hues far apart, light and dark.

    >>> class_colours(3).tolist()
    [[225, 225, 225], [224, 54, 54], [38, 73, 158]]
    """
    found = [(0.0, 0.0, 225 / 255)]
    for k in range(count - 1):
        hue = k * 0.6180339887 % 1  # the golden section keeps neighbours apart
        found.append((hue, 0.76, (0.88, 0.62)[k % 2]))
    return np.rint(255 * np.array([colorsys.hsv_to_rgb(*x) for x in found])).astype(np.uint8)
