"""Pictures of what models predict: of segmented images, and at the end of a run."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, UInt8

from rope_jax import seeds
from rope_jax.data.images.device import normalise
from rope_jax.data.sources.index import BadImages
from rope_jax.evaluate.accuracy import at_resolution, resolutions, rules
from rope_jax.evaluate.box_pictures import draw_detections, first_detected
from rope_jax.evaluate.sheets import Panel, class_colours, draw_sheet, enlarged
from rope_jax.sharding import use_mesh
from rope_jax.tasks.segmentation import IGNORED
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
