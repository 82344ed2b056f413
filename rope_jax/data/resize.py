"""Bicubic, antialiased resizing through Pillow: the same pixels as the reference pipelines of the field."""

import numpy as np
from jaxtyping import UInt8
from PIL import Image


def resize(images: UInt8[np.ndarray, "n H W 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "n h w 3"]:
    """Resizes every image to exactly `size`, stretching where the aspect differs; for evaluation at other resolutions.

    Args:
        images: uint8 [n, H, W, 3].
        size: (h, w) in pixels.

    Returns:
        uint8 [n, h, w, 3]; `images` itself where it has that size already.

    Raises:
        ValueError: where a side of `size` is below 1.
    """
    height, width = check_size(size)
    if images.shape[1:3] == (height, width):
        return images
    resized = np.empty((len(images), height, width, 3), np.uint8)
    for k, image in enumerate(images):
        resized[k] = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return resized


def check_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size itself, or ValueError where it is not two whole numbers of at least 1."""
    if len(size) != 2 or not all(isinstance(side, int) and side >= 1 for side in size):
        raise ValueError(f"image size {size!r} is not (height, width) in pixels, each at least 1")
    return size
