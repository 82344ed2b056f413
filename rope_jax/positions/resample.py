"""Resampling of learned position tables to another grid."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@functools.cache
def bicubic_matrix(before: int, after: int) -> np.ndarray:
    """The matrix [after, before] of torch's `interpolate(mode="bicubic", align_corners=False)` along one axis.

    Cubic convolution with a = -0.75, four taps, indices clamped at the border, no antialiasing: what DeiT, Swin and RoPE-ViT do to
    their tables. `jax.image.resize` has no equal (a = -0.5 there).
    """
    centre = (np.arange(after) + 0.5) * before / after - 0.5
    left = np.floor(centre).astype(int)
    matrix = np.zeros((after, before))
    for tap in (-1, 0, 1, 2):
        weight = _cubic(centre - left - tap, a=-0.75)
        np.add.at(matrix, (np.arange(after), np.clip(left + tap, 0, before - 1)), weight)
    return matrix


def _cubic(t: np.ndarray, a: float) -> np.ndarray:
    t = np.abs(t)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * (t**3 - 5 * t**2 + 8 * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def bicubic(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """Resamples maps [..., h, w] to [..., *size] as torch does (see `bicubic_matrix`); equal sizes are returned as they are."""
    if maps.shape[-2:] == tuple(size):
        return maps
    rows, columns = (jnp.asarray(bicubic_matrix(before, after), maps.dtype) for before, after in zip(maps.shape[-2:], size, strict=True))
    # Full precision: a GPU's default for matrix products would move the table by 1e-3.
    return jnp.einsum("yh,...hw,xw->...yx", rows, maps, columns, precision="highest")


def crop_or_pad(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """Keeps the centre of maps [..., h, w]: cut to `size` where that is smaller, zeros around it where it is larger."""
    for axis, target in zip((-2, -1), size, strict=True):
        missing = target - maps.shape[axis]
        if missing < 0:
            start = -missing // 2
            maps = jnp.take(maps, np.arange(start, start + target), axis=axis)
        elif missing > 0:
            widths = [(0, 0)] * maps.ndim
            widths[axis] = (missing // 2, missing - missing // 2)
            maps = jnp.pad(maps, widths)
    return maps
