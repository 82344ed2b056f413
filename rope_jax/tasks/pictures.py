"""Pictures of segmented images."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from rope_jax.models.heads.pixels import IGNORED
from rope_jax.tasks.sheets import Panel, class_colours, draw_sheet, enlarged

_SIDE = 256  # pixels: of a panel
_LISTED = 48  # classes that a legend has room for


class Segmented(NamedTuple):
    """An image, and the classes of its pixels; 255 for none."""

    image: UInt8[np.ndarray, "H W 3"]
    classes: UInt8[np.ndarray, "H W"]
    predicted: UInt8[np.ndarray, "H W"]


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
