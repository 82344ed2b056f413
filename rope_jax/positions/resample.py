"""Resampling of learned position tables to another grid."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@functools.cache
def bicubic_matrix(before: int, after: int) -> np.ndarray:
    """The matrix [after, before] of torch's `interpolate(mode="bicubic", align_corners=False)` along one axis.

    Cubic convolution with a = -0.75, four taps, indices clamped at the border, no antialiasing: what DeiT, Swin and RoPE-ViT do to
    their tables. `jax.image.resize` has no equal (a = -0.5 there).
    """
    return _clamped(before, after, (-1, 0, 1, 2), functools.partial(_cubic, a=-0.75))


@functools.cache
def dinov2_matrix(before: int, after: int) -> np.ndarray:
    """The same as DINOv2 asks for it, by `scale_factor=(after + 0.1) / before`, which stretches the grid a little."""
    return _clamped(before, after, (-1, 0, 1, 2), functools.partial(_cubic, a=-0.75), extra=0.1)


@functools.cache
def bilinear_matrix(before: int, after: int) -> np.ndarray:
    """The same of `interpolate(mode="bilinear", align_corners=False)`, two taps: what the CCT family does."""
    return _clamped(before, after, (0, 1), lambda t: 1 - np.abs(t))


@functools.cache
def antialias_matrix(before: int, after: int) -> np.ndarray:
    """The same of `interpolate(mode="bicubic", antialias=True)`, a = -0.5: what timm does.

    Towards fewer tokens the kernel is stretched by the ratio; taps beyond the border are left out, and the rest add up to 1.
    """
    centre = (np.arange(after) + 0.5) * before / after - 0.5
    stretch = max(before / after, 1.0)
    matrix = _cubic((np.arange(before) - centre[:, None]) / stretch, a=-0.5)
    return matrix / matrix.sum(axis=1, keepdims=True)


def _clamped(before: int, after: int, taps: tuple[int, ...], kernel: Callable[[np.ndarray], np.ndarray], extra: float = 0.0) -> np.ndarray:
    centre = (np.arange(after) + 0.5) * before / (after + extra) - 0.5
    left = np.floor(centre).astype(int)
    matrix = np.zeros((after, before))
    for tap in taps:
        np.add.at(matrix, (np.arange(after), np.clip(left + tap, 0, before - 1)), kernel(centre - left - tap))
    return matrix


def _cubic(t: np.ndarray, a: float) -> np.ndarray:
    t = np.abs(t)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * (t**3 - 5 * t**2 + 8 * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def bicubic(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """Resamples maps [..., h, w] to [..., *size] as torch does (see `bicubic_matrix`); equal sizes are returned as they are."""
    return _resampled(maps, size, bicubic_matrix)


def dinov2(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """The same with `dinov2_matrix`."""
    return _resampled(maps, size, dinov2_matrix)


def bilinear(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """The same with `bilinear_matrix`."""
    return _resampled(maps, size, bilinear_matrix)


def antialias(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Float[Array, "... h2 w2"]:
    """The same with `antialias_matrix`."""
    return _resampled(maps, size, antialias_matrix)


def _resampled(maps: Array, size: tuple[int, int], matrix: Callable[[int, int], np.ndarray]) -> Array:
    if maps.shape[-2:] == tuple(size):
        return maps
    rows, columns = (jnp.asarray(matrix(before, after), maps.dtype) for before, after in zip(maps.shape[-2:], size, strict=True))
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


RESAMPLERS: dict[str, Callable[[Array, tuple[int, int]], Array]] = {
    "bicubic": bicubic,
    "antialias": antialias,
    "dinov2": dinov2,
    "bilinear": bilinear,
    "pad": crop_or_pad,
    "crop": crop_or_pad,
}
"""By the names that options give them. "pad" and "crop" are one rule, named for what it does to a smaller and to a larger table."""
