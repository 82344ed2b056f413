"""The picture of a run of segmentation: test images, their classes, and the predicted ones."""

import colorsys
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, UInt8

from rope_jax import seeds
from rope_jax.analysis import plots
from rope_jax.data.images.device import normalise
from rope_jax.evaluate.accuracy import at_resolution, resolutions
from rope_jax.sharding import use_mesh
from rope_jax.training.setup import Setup, State, load_split

IGNORED = 255
_NAMED = 24  # classes that a legend has room for


class Segmented(NamedTuple):
    """An image, and the classes of its pixels; 255 for none."""

    image: UInt8[np.ndarray, "H W 3"]
    classes: UInt8[np.ndarray, "H W"]
    predicted: UInt8[np.ndarray, "H W"]


def segments(
    setup: Setup, state: State, path: pathlib.Path, *, count: int = 2
) -> pathlib.Path | None:
    """Draws the first test images at the training resolution and at the largest.

    Of several seeds, the first one predicts.

    Args:
        setup: of a run whose images have classes of pixels.
        state: its state.
        path: of the PNG file.
        count: of images at each resolution.

    Returns:
        The path, or None if matplotlib is not installed.
    """
    if not plots.available():
        return None
    first, *others = resolutions(setup.config)
    largest = max(others, key=lambda size: size[0] * size[1], default=first)
    found = [
        one
        for size in dict.fromkeys((first, largest))
        for one in predictions(setup, state, size, count=count)
    ]
    names = setup.held_out.class_names
    names = [str(k) for k in range(setup.held_out.classes)] if names is None else names
    return draw(found, names, path)


def predictions(
    setup: Setup, state: State, size: tuple[int, int], *, count: int
) -> list[Segmented]:
    """The first test images at a resolution, with the classes that the run's model predicts."""
    config = setup.config
    weights = (state["ema" if config.averaged else "params"], state.get("stats", {}), setup.rest)
    weights = tuple(seeds.take(part, config) for part in weights)
    scaled = config.eval.scale_windows

    @jax.jit
    def predict(images: UInt8[Array, "B H W 3"]) -> UInt8[Array, "B H W"]:
        model = at_resolution(nnx.merge(setup.graph, *weights), size, scale_windows=scaled)
        with use_mesh(setup.mesh):
            logits = model(normalise(images, config.data.mean, config.data.std))
        return logits.argmax(-1).astype(np.uint8)

    images = load_split(config, "test", size)
    drawn = [images.example(k) for k in range(min(count, len(images.labels)))]
    found = np.asarray(predict(np.stack([one["image"] for one in drawn])))
    return [
        Segmented(one["image"], one["label"], classes)
        for one, classes in zip(drawn, found, strict=True)
    ]


def draw(
    found: Sequence[Segmented], class_names: Sequence[str], path: pathlib.Path
) -> pathlib.Path:
    """Draws a row for each image: itself, its classes, and the predicted ones.

    Args:
        found: the images.
        class_names: in their order; they are listed if they are few.
        path: of the PNG file.
    """
    from matplotlib.patches import Patch

    colours = class_colours(len(class_names))
    figure = plots.figure_of(7.2, 2.1 * len(found) + 0.4)
    panels = figure.subplots(len(found), 3, squeeze=False)
    for row, one in zip(panels, found, strict=True):
        pictures = [one.image, *(_painted(x, colours) for x in (one.classes, one.predicted))]
        for axes, picture in zip(row, pictures, strict=True):
            axes.imshow(picture, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        known = one.classes != IGNORED
        right = (one.classes == one.predicted)[known].mean() if known.any() else np.nan
        height, width = one.classes.shape
        row[0].set_ylabel(f"{height}x{width} px", fontsize=9)
        row[2].set_xlabel(f"{100 * right:.1f} % of the pixels", fontsize=8)
    for axes, title in zip(panels[0], ("image", "classes", "predicted"), strict=True):
        axes.set_title(title, fontsize=10)
    shown = {int(k) for one in found for x in (one.classes, one.predicted) for k in np.unique(x)}
    named = [k for k in sorted(shown) if k < len(class_names)]
    if len(named) <= _NAMED:
        patches = [Patch(color=colours[k] / 255, label=class_names[k]) for k in named]
        figure.legend(handles=patches, loc="outside right center", frameon=False, fontsize=8)
    return plots.save(figure, path)


def class_colours(count: int) -> UInt8[np.ndarray, "K 3"]:
    """A colour of each class: light grey for the first, then hues far apart, light and dark.

    >>> class_colours(3).tolist()
    [[225, 225, 225], [224, 54, 54], [38, 77, 158]]
    """
    found = [(0.0, 0.0, 225 / 255)]
    for k in range(count - 1):
        hue = k * 0.6180339887 % 1  # the golden section keeps neighbours apart
        found.append((hue, 0.76, (0.88, 0.62)[k % 2]))
    return np.rint(255 * np.array([colorsys.hsv_to_rgb(*x) for x in found])).astype(np.uint8)


def _painted(
    classes: UInt8[np.ndarray, "H W"], colours: UInt8[np.ndarray, "K 3"]
) -> UInt8[np.ndarray, "H W 3"]:
    """The colours of classes; black where there is none."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(colours)] = colours
    return table[classes]
