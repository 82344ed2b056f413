"""Average precision of detections, as COCO defines it, by pycocotools.

A detection is correct if its box or mask overlaps that of an object of its class in its image,
by at least a threshold of intersection over union; each object counts for one detection, and
detections with higher scores choose first. Objects that are left out (crowds, and those outside a
range of areas) count neither as missed nor as found: a detection that matches only one of them does
not count. A crowd is matched by the fraction of the detection's area that it covers, and by any
number of them.

Source: Lin et al., Microsoft COCO (arXiv 1405.0312), and its evaluation code.
"""

import contextlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from rope_jax.config import ConfigError
from rope_jax.data import Truth
from rope_jax.data.images.masks import Mask

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


class ImageDetections(NamedTuple):
    """The detections of an image, in any order: corners x1, y1, x2, y2, scores and classes.

    Masks are as in `rope_jax.data.images.masks`; None for boxes alone.
    """

    boxes: Float[np.ndarray, "D 4"]
    scores: Float[np.ndarray, " D"]
    classes: Int[np.ndarray, " D"]
    masks: Sequence[Mask] | None = None


def require_pycocotools() -> None:
    """Raises ConfigError, with the command that installs it, if pycocotools is missing."""
    if importlib.util.find_spec("pycocotools") is None:
        raise ConfigError(
            "detections are scored by pycocotools, which is not installed: "
            "pip install 'rope_jax[coco]'"
        )


def average_precision(
    predictions: Sequence[ImageDetections],
    truths: Sequence[Truth],
    classes: int,
    *,
    overlap: Literal["boxes", "masks"] = "boxes",
) -> Mapping[str, Any]:
    """Average precision of the detections of a set of images.

    >>> box, label = np.array([[0.0, 0, 10, 10]]), np.int32([0])
    >>> objects = Truth(box, label, crowd=np.array([False]), area=np.array([100.0]))
    >>> boxes = np.array([[50.0, 50, 60, 60], [0, 0, 8, 10]])  # elsewhere, and four fifths of it
    >>> detections = ImageDetections(boxes, np.array([0.9, 0.8]), np.array([0, 0]))
    >>> result = average_precision([detections], [objects], classes=1)
    >>> round(result["ap"], 2), round(result["ap50"], 2), result["ap_large"]
    (0.35, 0.5, None)

    Where scores are equal, the earlier image and the earlier detection come first.

    Args:
        predictions: detections of each image; of a class, the 100 highest-scoring ones count.
        truths: objects of each image.
        classes: number of classes.
        overlap: what is compared. The area of a detection is that of its box or its mask.

    Returns:
        Fractions, or None where there is no object: `ap`, the mean over thresholds from .5 to .95
        and over classes; `ap50` and `ap75` at one threshold; `ap_small`, `ap_medium` and `ap_large`
        of objects of up to 32^2 pixels, up to 96^2 and above; `class_ap`, a list with the mean over
        thresholds of each class.
    """
    from pycocotools import mask
    from pycocotools.cocoeval import COCOeval

    objects, detections = [], []
    for image, (truth, prediction) in enumerate(zip(truths, predictions, strict=True)):
        boxes, labels, crowd, area, masks = truth
        columns = {"category_id": labels, "iscrowd": crowd, "area": area}
        objects += _entries(image, boxes, columns, masks)
        boxes, scores, kinds, masks = prediction
        area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        if overlap == "masks":
            area = np.array([mask.area(x) for x in masks], int)
        columns = {"category_id": kinds, "score": scores, "area": area}
        detections += _entries(image, boxes, columns, masks)
    with contextlib.redirect_stdout(io.StringIO()):
        annotated, detected = (
            _index(entries, len(truths), classes) for entries in (objects, detections)
        )
        judge = COCOeval(annotated, detected, {"boxes": "bbox", "masks": "segm"}[overlap])
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    by_class = judge.eval["precision"][..., 0, -1].mean(axis=(0, 1)).tolist()
    none = lambda x: None if x == -1 else x
    scores = dict(zip(NAMES, map(none, judge.stats.tolist()), strict=False))
    return scores | {"class_ap": list(map(none, by_class))}


def _entries(
    image: int,
    boxes: Float[np.ndarray, "N 4"],
    columns: Mapping[str, np.ndarray],
    masks: Sequence[Mask] | None,
) -> list[dict[str, Any]]:
    """Objects or detections of an image as entries of pycocotools: boxes as corner and sides."""
    corners = np.asarray(boxes, np.float64)
    sides = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    lists = {name: values.tolist() for name, values in {**columns, "bbox": sides}.items()}
    if masks is not None:
        lists["segmentation"] = masks
    rows = zip(*lists.values(), strict=True)
    return [{"image_id": image, **dict(zip(lists, row, strict=True))} for row in rows]


def _index(entries: Sequence[Mapping[str, Any]], images: int, classes: int) -> Any:
    """Creates a set of pycocotools with these entries."""
    from pycocotools.coco import COCO

    dataset = COCO()
    dataset.dataset = {
        "images": [{"id": image, "height": 0, "width": 0} for image in range(images)],
        "categories": [{"id": k} for k in range(classes)],
        "annotations": [{**entry, "id": number} for number, entry in enumerate(entries, 1)],
    }
    dataset.createIndex()
    return dataset
