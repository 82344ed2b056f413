"""Masks of detections, from the cells of their boxes to the pixels of an image."""

import numpy as np
from jaxtyping import Float


def paste(
    mask: Float[np.ndarray, "S S"], box: Float[np.ndarray, " 4"], size: tuple[int, int]
) -> Float[np.ndarray, "H W"]:
    """Pastes a mask into an image: bilinear between the centres of its cells, 0 outside them.

    >>> paste(np.ones((2, 2)), np.array([1.0, 0, 3, 1]), (1, 4)).tolist()
    [[0.0, 1.0, 1.0, 0.0]]

    Source: mmdetection, with torch's `grid_sample` (align_corners=False). There, a box without
    width has the middle of its mask in all columns; likewise without height.

    Args:
        mask: probabilities of the cells.
        box: corners in pixels of the image.
        size: (H, W) of the image.

    Returns:
        Probabilities of the pixels, which belong to the object from 0.5 on.
    """
    left, top, right, bottom = box.astype(float)

    def weights(count: int, low: float, high: float, cells: int) -> Float[np.ndarray, "n S"]:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = (np.arange(count) + 0.5 - low) / (high - low)
        place = np.where(np.isinf(place), 0.5, place) * cells - 0.5
        return np.clip(1 - np.abs(place[:, None] - np.arange(cells)), 0, 1)

    rows = weights(size[0], top, bottom, mask.shape[0])
    columns = weights(size[1], left, right, mask.shape[1])
    pasted = np.zeros(size)
    inside = np.ix_(rows.any(axis=1), columns.any(axis=1))
    pasted[inside] = rows[rows.any(axis=1)] @ mask @ columns[columns.any(axis=1)].T
    return pasted
