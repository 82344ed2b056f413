"""The pairs of tokens that attend, by loops that follow the patterns' definitions."""

import functools

import numpy as np

from rope_jax_kernels import Global, Neighborhood, Window


def neighbors(length, kernel, dilation, i):
    """Tokens that token i of an axis attends to."""
    r = i % dilation
    members = -(-(length - r) // dilation)
    if members <= kernel:
        return list(range(r, length, dilation))
    first = min(max(i // dilation - kernel // 2, 0), members - kernel)
    return [r + dilation * (first + t) for t in range(kernel)]


@functools.cache
def pairs(pattern, grid):
    """(query, key, index into the flattened bias) of all pairs that attend, row-major."""
    return list(find_pairs(pattern, grid))


def mask(pattern, grid):
    """The pairs that attend, [L, L]."""
    allowed = np.zeros((grid[0] * grid[1],) * 2, bool)
    allowed[*np.array(pairs(pattern, grid)).T[:2]] = True
    return allowed


def find_pairs(pattern, grid):
    height, width = grid
    tokens = [(y, x) for y in range(height) for x in range(width)]
    for q, (qy, qx) in enumerate(tokens):
        for k, (ky, kx) in enumerate(tokens):
            if isinstance(pattern, Global):
                yield q, k, q * len(tokens) + k
            elif isinstance(pattern, Neighborhood):
                (kh, kw), (dy, dx) = pattern.size, pattern.dilation
                if ky in neighbors(height, kh, dy, qy) and kx in neighbors(width, kw, dx, qx):
                    yield q, k, ((ky - qy) // dy + kh - 1) * (2 * kw - 1) + (kx - qx) // dx + kw - 1
            else:
                (wy, ly), (wx, lx) = (
                    places(n, *axis) for n, axis in zip(grid, axes(pattern, grid), strict=True)
                )
                if wy[qy] == wy[ky] and wx[qx] == wx[kx]:
                    h, w = (size for size, _ in axes(pattern, grid))
                    yield q, k, (ly[qy] - ly[ky] + h - 1) * (2 * w - 1) + lx[qx] - lx[kx] + w - 1


def axes(pattern, grid):
    """(size, shift) of a window along both axes of a map."""
    return [
        (n, 0) if n <= size else (size, shift)
        for n, size, shift in zip(grid, pattern.size, pattern.shift, strict=True)
    ]


def places(length, size, shift):
    """The window of each token of an axis, and its place in the window.

    Tokens that the roll brought from the other side of the map form windows of their own.
    """
    padded = -(-length // size) * size
    rolled = [(i - shift) % padded for i in range(length)]
    return [(r // size, i < shift) for i, r in enumerate(rolled)], [r % size for r in rolled]


def token_coords(pattern, grid):
    """The row of `rotation.coords` of each token."""
    if not isinstance(pattern, Window):
        return np.arange(grid[0] * grid[1])
    (_, ly), (_, lx) = (places(n, *axis) for n, axis in zip(grid, axes(pattern, grid), strict=True))
    return np.array([y * axes(pattern, grid)[1][0] + x for y in ly for x in lx])
