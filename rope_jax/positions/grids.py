"""Coordinates of the tokens of a map in float64; grid = (H, W), axis 0 is y, axis 1 is x."""

import numpy as np
from jaxtyping import Float

Grid = tuple[int, int]
Video = tuple[int, int, int]


def _stack(*axes: np.ndarray) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


def raster(grid: Grid) -> Float[np.ndarray, "H W 1"]:
    """Token index in reading order, y * W + x, in patches.

    >>> raster((2, 3))[..., 0].tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    return np.arange(grid[0] * grid[1], dtype=np.float64).reshape(*grid, 1)


def absolute(grid: Grid | Video) -> Float[np.ndarray, "... A"]:
    """Row and column in patches from 0, [H, W, 2]; of a video, frame, row and column.

    >>> absolute((2, 3))[1].tolist()
    [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    """
    return _stack(*[np.arange(n, dtype=np.float64) for n in grid])


def centres(grid: Grid) -> Float[np.ndarray, "H W 2"]:
    """Centres of the patches in a box whose long side is [-1, 1] (HDiT `make_axial_pos`).

    Both axes have the same spacing, so the short side is shorter.

    >>> centres((2, 4))[0].tolist()
    [[-0.25, -0.75], [-0.25, -0.25], [-0.25, 0.25], [-0.25, 0.75]]
    """
    return _stack(*[(2 * np.arange(n) + 1 - n) / max(grid) for n in grid])


def endpoints(grid: Grid) -> Float[np.ndarray, "H W 2"]:
    """Like `centres`, with the first and last patch on the border (thesis section 3.3, literally).

    The spacing is 2 n / (max(H, W) (n - 1)) along an axis of n patches, which differs slightly
    between the axes if H and W differ.

    >>> endpoints((1, 3))[0].tolist()
    [[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]]
    """
    return _stack(*[np.linspace(-1, 1, n) * n / max(grid) if n > 1 else np.zeros(1) for n in grid])
