"""Masks of objects as COCO's run lengths, by pycocotools.

A mask is {"size": [rows, columns], "counts": bytes}, as pycocotools has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

Mask = Mapping[str, Any]


def encode_outline(outline: Any, size: tuple[int, int]) -> bytes:
    """The `counts` of COCO's `segmentation` of an object.

    >>> encode_outline([[1, 1, 3, 1, 3, 3, 1, 3]], (4, 4))
    b'52203'

    Args:
        outline: polygons, of which an object is the union, or run lengths, compressed or not.
        size: rows and columns of the image.

    Raises:
        ValueError: run lengths of another size.
    """
    from pycocotools import mask

    if not isinstance(outline, dict):
        return mask.merge(mask.frPyObjects(outline, *size))["counts"]
    counts = outline["counts"]
    fits = list(outline["size"]) == [*size]
    if isinstance(counts, str):
        encoded = {"size": [*size], "counts": counts.encode()}
    else:
        fits = fits and sum(counts) == size[0] * size[1]
        encoded = mask.frPyObjects({"size": [*size], "counts": counts}, *size)
    if not fits:
        raise ValueError(f"run lengths are not those of an image of {size[0]}x{size[1]} pixels")
    mask.decode(encoded)  # raises an error for damaged text
    return encoded["counts"]


def encode_mask(mask: Bool[np.ndarray, "h w"]) -> Mask:
    """A mask of the given pixels."""
    from pycocotools import mask as masks

    return masks.encode(np.asfortranarray(mask, np.uint8))


def decode_masks(masks: Sequence[Mask], size: tuple[int, int]) -> UInt8[np.ndarray, "n h w"]:
    """The pixels of masks of images of (rows, columns): 1 inside.

    >>> decode_masks([encode_mask(np.eye(2, 3, dtype=bool))], (2, 3)).tolist()
    [[[1, 0, 0], [0, 1, 0]]]
    """
    from pycocotools import mask

    pixels = mask.decode([*masks]) if masks else np.zeros((*size, 0), np.uint8)
    return np.moveaxis(pixels, -1, 0)
