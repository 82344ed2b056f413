"""Pictures of what models predict: of segmented images, and at the end of a run."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, UInt8

from rope_jax.data.images.device import normalise
from rope_jax.data.sources.index import BadImages
from rope_jax.evaluate.accuracy import applied
from rope_jax.evaluate.box_pictures import draw_detections, first_detected, sizes_of_pictures
from rope_jax.evaluate.sheets import Panel, class_colours, draw_sheet, enlarged
from rope_jax.tasks.segmentation import IGNORED
from rope_jax.training import seeds
from rope_jax.training.setup import Setup, State, load_split

_SIDE = 256  # pixels: of a panel
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
    config = setup.config
    apply, weights = applied(setup, state)
    weights = seeds.take(weights, config.seeds)

    @jax.jit
    def predict(weights: Any, images: UInt8[Array, "B H W 3"]) -> UInt8[Array, "B H W"]:
        logits = apply(weights, normalise(images, config.data.mean, config.data.std))
        return logits.argmax(-1).astype(np.uint8)

    segmented = []
    for size in sizes_of_pictures(config):
        images = load_split(config, "test", size)
        drawn: list[dict[str, np.ndarray]] = []
        for number in range(len(images.labels)):
            with contextlib.suppress(BadImages):  # where the run skips them
                drawn.append(images.example(number))
            if len(drawn) == count:
                break
        found = np.asarray(predict(weights, np.stack([one["image"] for one in drawn])))
        segmented += [
            Segmented(one["image"], one["label"], classes)
            for one, classes in zip(drawn, found, strict=True)
        ]
    return segmented


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
    rows = []
    for one in found:
        pixels = (one.image, table[one.classes], table[one.predicted])
        captions = ("{} x {} pixels".format(*one.classes.shape), "", _share_right(one))
        rows.append(
            [Panel(enlarged(x, _SIDE), text) for x, text in zip(pixels, captions, strict=True)]
        )
    legend = [(names[k], tuple(table[k].tolist())) for k in listed]
    draw_sheet(("image", "classes", "predicted"), rows, path, legend)


def _share_right(one: Segmented) -> str:
    known = one.classes != IGNORED
    right = (one.classes == one.predicted)[known].mean() if known.any() else 0.0
    return f"{100 * right:.1f} % of the pixels are right"


# Of runs by what the labels of their images are of: a file, and the functions for its images.
RUN_PICTURES: dict[str, tuple[str, Callable[..., Any], Callable[..., None]]] = {
    "pixels": ("segments.png", first_images, draw_pictures),
    "boxes": ("detections.png", first_detected, draw_detections),
}
