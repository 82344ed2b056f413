"""Masks of objects as COCO's run lengths, by pycocotools.

A mask is {"size": [rows, columns], "counts": bytes}, as pycocotools has it.
"""

import re
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
        ValueError: damaged run lengths, or those of another size.
    """
    from pycocotools import mask

    if not isinstance(outline, dict):
        return mask.merge(mask.frPyObjects(outline, *size))["counts"]
    counts = outline.get("counts")
    runs = _read_runs(counts) if isinstance(counts, str) else counts
    # pycocotools would not notice other numbers.
    whole = isinstance(runs, list) and all(type(run) is int and run >= 0 for run in runs)
    if not whole or outline.get("size") != [*size] or sum(runs) != size[0] * size[1]:
        raise ValueError(f"run lengths are not those of an image of {size[0]}x{size[1]} pixels")
    return mask.frPyObjects({"size": [*size], "counts": runs}, *size)["counts"]


def _read_runs(text: str) -> list[int]:
    """The run lengths of compressed text; none if it is damaged.

    >>> _read_runs("52203")
    [5, 2, 2, 2, 5]

    A number is groups of 5 bits, the lowest first, each + 48 as a character, which has bit 5 set
    unless it is the last; from the fourth number on, it is the difference to the last but one.
    """
    numbers, runs = re.findall("[P-o]{0,6}[0-O]", text), []
    for number in numbers:
        groups = [ord(character) - 48 & 31 for character in number]
        value = sum(group << 5 * place for place, group in enumerate(groups))
        value -= (groups[-1] & 16) << 5 * len(groups) - 4  # the sign
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    return runs if "".join(numbers) == text else []


def encode_mask(mask: Bool[np.ndarray, "h w"] | UInt8[np.ndarray, "h w"]) -> Mask:
    """A mask of the given pixels, 1 inside; uint8 by columns is not copied."""
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
