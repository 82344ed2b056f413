"""Average precision of detections, as COCO defines it, by pycocotools.

A detection is correct if its box overlaps that of an object of its class in its image, by at least
a threshold of intersection over union; each object counts for one detection, and detections with
higher scores choose first. Objects that are left out (crowds, and those outside a range of areas)
count neither as missed nor as found: a detection that matches only one of them does not count. A
crowd is matched by the fraction of the detection's area that it covers, and by any number of them.

Source: Lin et al., Microsoft COCO (arXiv 1405.0312), and its evaluation code.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from rope_jax.config import ConfigError
from rope_jax.data import Truth

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


class ImageDetections(NamedTuple):
    """The detections of an image, in any order: corners x1, y1, x2, y2, scores and classes."""

    boxes: Float[np.ndarray, "D 4"]
    scores: Float[np.ndarray, " D"]
    classes: Int[np.ndarray, " D"]


def require_pycocotools() -> None:
    """Raises ConfigError, with the command that installs it, if pycocotools is missing."""
    if importlib.util.find_spec("pycocotools") is None:
        raise ConfigError(
            "detections are scored by pycocotools, which is not installed: "
            "pip install 'rope_jax[coco]'"
        )


def average_precision(
    predictions: Sequence[ImageDetections], truths: Sequence[Truth], classes: int
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

    Returns:
        Fractions, or None where there is no object: `ap`, the mean over thresholds from .5 to .95
        and over classes; `ap50` and `ap75` at one threshold; `ap_small`, `ap_medium` and `ap_large`
        of objects of up to 32^2 pixels, up to 96^2 and above; `class_ap`, a list with the mean over
        thresholds of each class.
    """
    from pycocotools.cocoeval import COCOeval

    objects = [
        {"image_id": image, "bbox": box, "category_id": k, "iscrowd": crowd, "area": area}
        for image, truth in enumerate(truths)
        for box, k, crowd, area in _rows(*truth)
    ]
    detections = [
        {"image_id": image, "bbox": box, "category_id": k, "score": score, "area": box[2] * box[3]}
        for image, prediction in enumerate(predictions)
        for box, score, k in _rows(*prediction)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        annotated, detected = (
            _index(entries, len(truths), classes) for entries in (objects, detections)
        )
        judge = COCOeval(annotated, detected, "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    by_class = judge.eval["precision"][..., 0, -1].mean(axis=(0, 1)).tolist()
    none = lambda x: None if x == -1 else x
    scores = dict(zip(NAMES, map(none, judge.stats.tolist()), strict=False))
    return scores | {"class_ap": list(map(none, by_class))}


def _rows(boxes: Float[np.ndarray, "N 4"], *others: np.ndarray) -> Iterator[tuple]:
    """Each box as a corner and the sides, with its other entries."""
    corners = np.asarray(boxes, np.float64)
    sides = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return zip(sides.tolist(), *(values.tolist() for values in others), strict=True)


def _index(entries: Sequence[Mapping[str, Any]], images: int, classes: int) -> Any:
    """Creates a set of pycocotools with these entries."""
    from pycocotools.coco import COCO

    dataset = COCO()
    dataset.dataset = {
        "images": [{"id": image} for image in range(images)],
        "categories": [{"id": k} for k in range(classes)],
        "annotations": [{**entry, "id": number} for number, entry in enumerate(entries, 1)],
    }
    dataset.createIndex()
    return dataset
