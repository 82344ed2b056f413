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


def resize_and_crop(image: UInt8[np.ndarray, "H W 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "h w 3"]:
    """Resizes until the image just covers `size`, keeping its aspect (short side first), and keeps the centre.

    Args:
        image: uint8 [H, W, 3].
        size: (h, w) in pixels.

    Returns:
        uint8 [h, w, 3].

    Raises:
        ValueError: where a side of `size` is below 1.
    """
    height, width = check_size(size)
    rows, columns = image.shape[:2]
    # Only what will be kept is resized: the uncropped result of a strip of 1 x 65,535 pixels would not fit into memory.
    scale = min(rows / height, columns / width)
    top, left = (rows - height * scale) / 2, (columns - width * scale) / 2
    box = (max(left, 0.0), max(top, 0.0), min(left + width * scale, columns), min(top + height * scale, rows))
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, box=box))


def check_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size itself, or ValueError where it is not two whole numbers of at least 1."""
    if len(size) != 2 or not all(isinstance(side, int) and side >= 1 for side in size):
        raise ValueError(f"image size {size!r} is not (height, width) in pixels, each at least 1")
    return size
