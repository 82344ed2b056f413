"""Pictures of segmented images."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from rope_jax.models.heads.pixels import IGNORED
from rope_jax.tasks.sheets import Panel, class_colours, draw_sheet, enlarge

_SIDE = 256  # pixels: of a panel
_LISTED = 48  # largest number of classes in a legend


class Segmented(NamedTuple):
    """An image, and the classes of its pixels; 255 for none."""

    image: UInt8[np.ndarray, "H W 3"]
    classes: UInt8[np.ndarray, "H W"]
    predicted: UInt8[np.ndarray, "H W"]


def draw_pictures(
    images: Sequence[Segmented], class_names: Sequence[str] | None, classes: int, path: Path
) -> None:
    """Writes a picture: in each row an image, its classes, and the predicted ones.

    Pixels without a class are black. The classes in the picture are listed below, if they are few.

    Args:
        images: at least one image.
        class_names: in their order; None for numbers.
        classes: number of classes.
        path: of the PNG.
    """
    table = np.zeros((256, 3), np.uint8)
    table[:classes] = class_colours(classes)
    names = [str(k) for k in range(classes)] if class_names is None else class_names
    present = {
        int(k) for image in images for x in (image.classes, image.predicted) for k in np.unique(x)
    }
    listed = sorted(k for k in present if k < classes) if len(present) <= _LISTED else []
    rows = []
    for image in images:
        pixels = (image.image, table[image.classes], table[image.predicted])
        captions = ("{} x {} pixels".format(*image.classes.shape), "", _describe_accuracy(image))
        rows.append(
            [Panel(enlarge(x, _SIDE), text) for x, text in zip(pixels, captions, strict=True)]
        )
    legend = [(names[k], tuple(table[k].tolist())) for k in listed]
    draw_sheet(("image", "classes", "predicted"), rows, path, legend)


def _describe_accuracy(image: Segmented) -> str:
    labelled = image.classes != IGNORED
    correct = (image.classes == image.predicted)[labelled].mean() if labelled.any() else 0.0
    return f"{100 * correct:.1f} % of the pixels are correct"
