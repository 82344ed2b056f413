"""Masks of detections, from the cells of their boxes to the pixels of an image."""

import numpy as np
from jaxtyping import Float


def paste(
    mask: Float[np.ndarray, "S S"], box: Float[np.ndarray, " 4"], size: tuple[int, int]
) -> tuple[Float[np.ndarray, "h w"], tuple[slice, slice]]:
    """Pastes a mask into an image: bilinear between the centres of its cells, 0 outside them.

    >>> image = np.zeros((1, 4))
    >>> probabilities, place = paste(np.ones((2, 2)), np.array([1.0, 0, 3, 1]), image.shape)
    >>> image[place] = probabilities
    >>> image.tolist()
    [[0.0, 1.0, 1.0, 0.0]]

    Source: mmdetection, with torch's `grid_sample` (align_corners=False). There, a box without
    width has the middle of its mask in all columns; likewise without height.

    Args:
        mask: probabilities of the cells.
        box: corners in pixels of the image.
        size: (H, W) of the image.

    Returns:
        Probabilities of the pixels around the box, which belong to the object from 0.5 on, and
        their rows and columns; those of all others are 0.
    """
    left, top, right, bottom = box.astype(float)

    def weights(
        count: int, low: float, high: float, cells: int
    ) -> tuple[Float[np.ndarray, "n S"], slice]:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = (np.arange(count) + 0.5 - low) / (high - low)
        place = np.where(np.isinf(place), 0.5, place) * cells - 0.5
        near = np.flatnonzero((place > -1) & (place < cells))
        part = slice(near[0], near[-1] + 1) if len(near) else slice(0)
        return np.clip(1 - np.abs(place[part, None] - np.arange(cells)), 0, 1), part

    rows, vertical = weights(size[0], top, bottom, mask.shape[0])
    columns, horizontal = weights(size[1], left, right, mask.shape[1])
    return rows @ mask @ columns.T, (vertical, horizontal)
