"""Boxes of images that lie on the device, resized to the size of the whole: Pillow's resizing, bit for bit.

A box is decided on the host (`rope_jax.data.frames`) and travels as one 64-bit number; the pixels are cut in the jitted step.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8, UInt32
from PIL import Image

from rope_jax.data.frames import Cut

_BITS = 22  # of the fractions that Pillow's resizing of bytes counts in: 32, less 8 for a byte and 2 for sums that exceed it
_TAPS = 5  # pixels that a pixel of a result no smaller than the box may be made of
_SIDE = 15  # bits of a number in a packed box
_FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


def pack(cut: Cut) -> int:
    """A cut as one number of 64 bits.

    Args:
        cut: of whole pixels, bilinear or bicubic, each number below 2**15.

    Raises:
        ValueError: for other cuts.
    """
    left, top, right, bottom = cut.box
    numbers = (left, top, right - left, bottom - top)
    if not cut.alone or cut.interpolation not in _FILTERS or max(numbers) >= 2**_SIDE:
        raise ValueError(f"{cut} cannot be cut on the device: boxes are of whole pixels below {2**_SIDE}, bilinear or bicubic")
    packed = _FILTERS.index(cut.interpolation)
    for number in numbers:
        packed = packed << _SIDE | number
    return packed


def cut_and_resize(image: UInt8[Array, "H W 3"], words: UInt32[Array, "2"]) -> UInt8[Array, "H W 3"]:
    """What a box holds, at the size of the image.

    Args:
        image: uint8 [H, W, 3].
        words: of `pack`, the high one first.

    Returns:
        uint8 [H, W, 3], what Pillow makes of the box alone.
    """
    high, low = words
    mask = 2**_SIDE - 1
    # The four numbers lie in bits 59 to 45, 44 to 30, 29 to 15 and 14 to 0; the second in both words.
    left, top = (high >> 13) & mask, ((high << 2) | (low >> 30)) & mask
    width, height, cubic = (low >> _SIDE) & mask, low & mask, high >> 28
    pixels = image.astype(jnp.int32)
    for axis, start, length in ((1, left, width), (0, top, height)):  # columns first, and bytes in between, as Pillow
        first, weights = (jnp.asarray(table)[cubic, length - 1] for table in _taps(image.shape[axis]))
        place = start.astype(jnp.int32) + jnp.minimum(first[:, None] + jnp.arange(_TAPS), length.astype(jnp.int32) - 1)
        weights = weights.reshape(*weights.shape, *(1,) * (2 - axis))
        taken = jnp.take(pixels, place, axis=axis) * weights
        pixels = jnp.clip((taken.sum(axis + 1) + 2 ** (_BITS - 1)) >> _BITS, 0, 255)
    return pixels.astype(jnp.uint8)


@functools.lru_cache(maxsize=8)
def _taps(side: int) -> tuple[Int[np.ndarray, "2 side side"], Int[np.ndarray, "2 side side taps"]]:
    """For both filters and boxes of 1 to `side` pixels: of each pixel of a result of `side`, the first of the box, and how much of which.

    What is counted in is 2**-22. Antialiasing has no part in it: no result is smaller than its box.
    """
    first, weights = np.zeros((2, side, side), np.int32), np.zeros((2, side, side, _TAPS), np.int32)
    for kernel, (shape, support) in enumerate(((_triangle, 1.0), (_cubic, 2.0))):
        for length in range(1, side + 1):
            for place in range(side):
                centre = (place + 0.5) * (length / side)
                low, high = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), length)
                shares = [shape(x - centre + 0.5) for x in range(low, high)]
                first[kernel, length - 1, place] = low
                for tap, share in enumerate(shares):
                    weights[kernel, length - 1, place, tap] = math.trunc(share / sum(shares) * 2**_BITS + math.copysign(0.5, share))
    return first, weights


def _triangle(x: float) -> float:
    return max(1 - abs(x), 0.0)


def _cubic(x: float, a: float = -0.5) -> float:
    """Keys' kernel (IEEE Transactions on Acoustics, Speech, and Signal Processing 29, 1981)."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0
