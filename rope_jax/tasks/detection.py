"""Object detection: boxes with classes, scored by average precision.

An evaluation batch has `image`, padded at the bottom and on the right; `extent` [B, 2], the rows
and columns before padding; `original` [B, 2], those of the image as it is stored; `index` and
`mask`. The objects themselves are read from the images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rope_jax.data import Images, Streamed
from rope_jax.tasks.average_precision import Found, average_precision

Batch = dict[str, Array]


def count(outputs: Any, batch: Batch, images: Images | Streamed) -> dict[str, Array]:
    """The detections of an evaluation batch, in pixels of the images as they are stored.

    Args:
        outputs: `Detections` of the batch.
        batch: with `extent`, `original`, `index` and `mask`.
        images: the set; its classes are those of the model.

    Returns:
        `boxes` [B, D, 4], corners x1, y1, x2, y2 within the image; `scores`, `classes` [B, D];
        `index` and `mask` [B].
    """
    ends = batch["original"][:, None, ::-1].astype(jnp.float32)  # width, height
    corners = outputs.boxes.reshape(*outputs.boxes.shape[:2], 2, 2)
    corners = corners * (ends / batch["extent"][:, None, ::-1])[:, :, None]
    boxes = jnp.clip(corners, 0, ends[:, :, None]).reshape(outputs.boxes.shape)
    own = {"boxes": boxes, "scores": outputs.scores, "classes": outputs.classes}
    return own | {"index": batch["index"], "mask": batch["mask"]}


def found_in(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[int, Found]:
    """The detections of each image, by its number: those of `count` that have an area.

    Args:
        parts: from `count`, of the batches of a set.
    """
    found = {}
    for part in parts:
        for row in np.flatnonzero(part["mask"]):
            boxes = part["boxes"][row]
            there = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
            one = (boxes, part["scores"][row], part["classes"][row])
            found[int(part["index"][row])] = Found(*(values[there] for values in one))
    return found


def scores(
    parts: Sequence[Mapping[str, np.ndarray]], images: Images | Streamed
) -> Mapping[str, Any]:
    """Average precision of a set, see `rope_jax.tasks.average_precision`, and `count` of images.

    Args:
        parts: from `count`, of the batches of the set.
        images: the set, whose objects are those that are annotated, crowds included.
    """
    found = found_in(parts)
    truths = [images.truth(index) for index in found]
    precision = average_precision(list(found.values()), truths, images.classes)
    return {**precision, "count": len(found)}
