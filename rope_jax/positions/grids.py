"""Coordinates of the tokens of a map. Each function takes grid = (H, W) and returns float64 [H, W, A]; axis 0 is y, axis 1 is x."""

import numpy as np

Grid = tuple[int, int]
Video = tuple[int, int, int]


def _stack(*axes: np.ndarray) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


def raster(grid: Grid) -> np.ndarray:
    """The index of a token in reading order, y * W + x, in patches: [H, W, 1]."""
    return np.arange(grid[0] * grid[1], dtype=np.float64).reshape(*grid, 1)


def absolute(grid: Grid | Video) -> np.ndarray:
    """Row and column, in patches from 0; of a video of grid = (T, H, W), frame, row and column: [T, H, W, 3]."""
    return _stack(*[np.arange(n, dtype=np.float64) for n in grid])


def centres(grid: Grid) -> np.ndarray:
    """Centres of the patches in a box whose long side is [-1, 1]; the short side keeps the spacing (HDiT `make_axial_pos`)."""
    return _stack(*[(2 * np.arange(n) + 1 - n) / max(grid) for n in grid])


def endpoints(grid: Grid) -> np.ndarray:
    """Like `centres`, but the first and the last patch lie on the border of the box (thesis section 3.3, read literally).

    The spacing is then 2 n / (max(H, W) (n - 1)) along an axis of n patches: not quite the same along both where H and W differ.
    """
    return _stack(*[np.linspace(-1, 1, n) * n / max(grid) if n > 1 else np.zeros(1) for n in grid])
