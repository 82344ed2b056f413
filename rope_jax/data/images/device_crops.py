"""The loader's augmentations on the device, for data sets kept there: same pixels, bit for bit.

Each takes one image and the loader's draw as two 32-bit words, the high one first. The box of a
crop is computed on the host (`rope_jax.data.images.crops`) and replaces the draw.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8, UInt32
from PIL import Image

from rope_jax.data.images.crops import Box

# Bits of the fractions in Pillow's resizing of bytes: 32, less 8 for a byte, 2 for sums beyond it.
_BITS = 22
_SIDE = 15  # bits of a number in a packed box
_FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


def pack(box: Box) -> int:
    """Packs a box into one 64-bit number.

    Args:
        box: with whole edges, bilinear or bicubic, each number below 2**15.

    Raises:
        ValueError: for other boxes.
    """
    left, top, right, bottom = box.edges
    numbers = (left, top, right - left, bottom - top)
    if not box.alone or box.interpolation not in _FILTERS or max(numbers) >= 2**_SIDE:
        raise ValueError(
            f"{box} cannot be cut on the device: "
            f"boxes are of whole pixels below {2**_SIDE}, bilinear or bicubic"
        )
    packed = _FILTERS.index(box.interpolation)
    for number in numbers:
        packed = packed << _SIDE | number
    return packed


def resized_crop(
    image: UInt8[Array, "H W 3"], words: UInt32[Array, "2"], size: tuple[int, int], **_: float | str
) -> UInt8[Array, "h w 3"]:
    """Crops a packed box and resizes it, rows first, as Pillow does.

    Args:
        image: uint8 [H, W, 3].
        words: of `pack`, the high one first; they already account for the options.
        size: (h, w) of the result.

    Returns:
        uint8 [h, w, 3].
    """
    high, low = words
    mask = 2**_SIDE - 1
    # Bits 59 to 45, 44 to 30 (in both words), 29 to 15 and 14 to 0.
    left, top = (high >> 13) & mask, ((high << 2) | (low >> 30)) & mask
    width, height, cubic = (low >> _SIDE) & mask, low & mask, high >> 28
    pixels = image.astype(jnp.int32)
    # Bytes in between, as Pillow.
    for axis, start, length in ((1, left, width), (0, top, height)):
        tables = _taps(image.shape[axis], size[axis])
        first, weights = (jnp.asarray(table)[cubic, length - 1] for table in tables)
        taps = first[:, None] + jnp.arange(weights.shape[1])
        taps = jnp.minimum(taps, length.astype(jnp.int32) - 1)
        weights = weights.reshape(*weights.shape, *(1,) * (2 - axis))
        products = jnp.take(pixels, start.astype(jnp.int32) + taps, axis=axis) * weights
        pixels = jnp.clip((products.sum(axis + 1) + 2 ** (_BITS - 1)) >> _BITS, 0, 255)
    return pixels.astype(jnp.uint8)


@functools.lru_cache(maxsize=8)
def _taps(
    before: int, after: int
) -> tuple[Int[np.ndarray, "2 before after"], Int[np.ndarray, "2 before after taps"]]:
    """First pixel and weights of each pixel of the result, for both filters and every box length.

    Weights are in units of 2**-22. A result that is smaller than its box is antialiased.
    """
    first = np.zeros((2, before, after), np.int32)
    weights = np.zeros((2, before, after, 2 * math.ceil(2 * max(before / after, 1)) + 1), np.int32)
    for kernel, (shape, support) in enumerate(((_triangle, 1.0), (_cubic, 2.0))):
        for length in range(1, before + 1):
            scale = length / after
            wider = max(scale, 1.0)
            for place in range(after):
                centre = (place + 0.5) * scale
                low = max(int(centre - support * wider + 0.5), 0)
                high = min(int(centre + support * wider + 0.5), length)
                samples = [shape((x - centre + 0.5) / wider) for x in range(low, high)]
                first[kernel, length - 1, place] = low
                for tap, sample in enumerate(samples):
                    scaled = sample / sum(samples) * 2**_BITS
                    rounded = math.trunc(scaled + math.copysign(0.5, sample))
                    weights[kernel, length - 1, place, tap] = rounded
    return first, weights


def _triangle(x: float) -> float:
    return max(1 - abs(x), 0.0)


def _cubic(x: float, a: float = -0.5) -> float:
    """Keys' kernel (IEEE Transactions on Acoustics, Speech, and Signal Processing 29, 1981)."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def pad_and_crop(
    image: UInt8[Array, "H W 3"], draw: UInt32[Array, "2"], *, pad: int = 4
) -> UInt8[Array, "H W 3"]:
    """`rope_jax.data.images.crops.pad_and_crop`."""
    places = 2 * pad + 1
    # draw * places / 2**32 without 64 bits
    product = (draw >> 16) * places + (((draw & 0xFFFF) * places) >> 16)
    start = (product >> 16).astype(jnp.int32)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return jax.lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape)


def flip(
    image: UInt8[Array, "H W C"], draw: UInt32[Array, "2"], *, p: float = 0.5
) -> UInt8[Array, "H W C"]:
    """`rope_jax.data.images.crops.flip`: the upper 53 bits of the draw are below p * 2**53."""
    limit = math.ceil(p * 2**53)
    high, low = draw[0] >> 11, (draw[0] << 21) | (draw[1] >> 11)
    below = (high < limit >> 32) | ((high == limit >> 32) & (low < np.uint32(limit & 0xFFFFFFFF)))
    return jnp.where(below, image[:, ::-1], image)
