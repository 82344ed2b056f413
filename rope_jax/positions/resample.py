"""Resampling of learned position tables to another grid."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Matrix = Float[np.ndarray, "after before"]


def bilinear_matrix(before: int, after: int) -> Matrix:
    """`interpolate(mode="bilinear", align_corners=False)`, two taps: the CCT family."""
    return _clamped_matrix(before, after, (0, 1), lambda t: 1 - np.abs(t))


def antialias_matrix(before: int, after: int) -> Matrix:
    """`interpolate(mode="bicubic", antialias=True)`, a = -0.5: timm.

    For downsampling the kernel is stretched by the ratio; taps beyond the border are dropped and
    the remaining weights scaled to sum to 1.
    """
    centre = (np.arange(after) + 0.5) * before / after - 0.5
    stretch = max(before / after, 1.0)
    matrix = _cubic((np.arange(before) - centre[:, None]) / stretch, a=-0.5)
    return matrix / matrix.sum(axis=1, keepdims=True)


def geometric_matrix(before: int, after: int) -> Matrix:
    """BEiT's resampling of a bias along one axis of offsets, both lengths odd.

    (`run_class_finetuning.py` of its code.) The old offsets are placed at sums of a geometric
    progression, +-(1 + q + q**2 + ...), the last of them at the largest new offset, with
    1.01 <= q <= 1.5: near 0 they keep their places. A cubic spline through them, not-a-knot, is
    read at the new offsets, and is constant beyond its ends.
    """
    from scipy.interpolate import make_interp_spline  # a dependency of jax, and slow to import

    if before == after:
        return np.eye(before)
    reach, target = before // 2, after // 2
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (ratio**reach - 1) / (ratio - 1) > target:
            high = ratio
        else:
            low = ratio
    sums = np.cumsum(ratio ** np.arange(reach))
    places = np.concatenate([-sums[::-1], [0.0], sums])
    spline = make_interp_spline(places, np.eye(before), k=min(3, before - 1))
    return spline(np.clip(np.arange(-target, target + 1), places[0], places[-1]))


def _clamped_matrix(
    before: int,
    after: int,
    taps: Sequence[int],
    kernel: Callable[[np.ndarray], np.ndarray],
    extra: float = 0.0,
) -> Matrix:
    centre = (np.arange(after) + 0.5) * before / (after + extra) - 0.5
    left = np.floor(centre).astype(int)
    matrix = np.zeros((after, before))
    for tap in taps:
        columns = np.clip(left + tap, 0, before - 1)
        np.add.at(matrix, (np.arange(after), columns), kernel(centre - left - tap))
    return matrix


def _cubic(t: np.ndarray, a: float = -0.75) -> np.ndarray:
    t = np.abs(t)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * (t**3 - 5 * t**2 + 8 * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _crop_or_pad(maps: Float[Array, "... h w"], size: tuple[int, int]) -> Array:
    """Keeps the centre, cropped to `size` or padded with zeros along each axis."""
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


_FOUR = {"taps": (-1, 0, 1, 2), "kernel": _cubic}
MATRICES: Mapping[str, Callable[[int, int], Matrix]] = {
    # torch's `interpolate(mode="bicubic", align_corners=False)`: DeiT, Swin and RoPE-ViT. Cubic
    # convolution with a = -0.75, four taps, indices clamped at the border; `jax.image.resize` has
    # no equivalent (a = -0.5 there).
    "bicubic": functools.partial(_clamped_matrix, **_FOUR),
    # With DINOv2's `scale_factor=(after + 0.1) / before`.
    "dinov2": functools.partial(_clamped_matrix, **_FOUR, extra=0.1),
    "antialias": antialias_matrix,
    "bilinear": bilinear_matrix,
    "geometric": geometric_matrix,
}


def resample(
    maps: Float[Array, "... h w"], size: tuple[int, int], rule: str
) -> Float[Array, "... h2 w2"]:
    """Resamples maps to another size, as torch does; maps of that size are returned unchanged.

    Args:
        maps: tables, with any batch axes.
        size: (h2, w2).
        rule: a key of `MATRICES`, or "pad" or "crop" (one rule under two names): the centre is
            cropped to `size` or padded with zeros along each axis.
    """
    if maps.shape[-2:] == tuple(size):
        return maps
    if rule in ("pad", "crop"):
        return _crop_or_pad(maps, size)
    rows, columns = (
        MATRICES[rule](before, after).astype(maps.dtype)
        for before, after in zip(maps.shape[-2:], size, strict=True)
    )
    # Full precision: a GPU's default for matrix products would move the table by 1e-3.
    return jnp.einsum("yh,...hw,xw->...yx", rows, maps, columns, precision="highest")
