"""Average precision of detections, as COCO defines it and pycocotools computes it.

A detection is right if its box overlaps that of an object of its class in its image, by at least a
threshold of intersection over union; each object counts for one detection, and the detections of
higher scores choose first. Objects that are left out (crowds, and those outside a range of areas)
are neither missed nor found: a detection that matches one of them, and no other, does not count. A
crowd is matched by its share of the detection's area, and by any number of them.

Source: Lin et al., Microsoft COCO (arXiv 1405.0312), and its evaluation code.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from rope_jax.data import Truth

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)  # at which precision is averaged
AREAS = {  # square pixels; bounds included
    "ap": (0.0, 1e10),
    "ap_small": (0.0, 32.0**2),
    "ap_medium": (32.0**2, 96.0**2),
    "ap_large": (96.0**2, 1e10),
}
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
MOST = 100  # detections of a class in an image
_LIMITS = np.minimum(THRESHOLDS, 1 - 1e-10)  # of the overlap that counts
_LOW, _HIGH = np.array([*AREAS.values()]).T[..., None]


class Found(NamedTuple):
    """The detections of an image, in any order: corners x1, y1, x2, y2, scores and classes."""

    boxes: Float[np.ndarray, "D 4"]
    scores: Float[np.ndarray, " D"]
    classes: Int[np.ndarray, " D"]


class _Matches(NamedTuple):
    """Those of a class in an image, for each range of areas and threshold."""

    scores: Float[np.ndarray, " D"]
    right: Bool[np.ndarray, "A T D"]
    wrong: Bool[np.ndarray, "A T D"]
    objects: Int[np.ndarray, " A"]


def average_precision(
    found: Sequence[Found], truths: Sequence[Truth], classes: int
) -> Mapping[str, Any]:
    """Average precision of the detections of a set of images.

    >>> box, label = np.array([[0.0, 0, 10, 10]]), np.int32([0])
    >>> objects = Truth(box, label, crowd=np.array([False]), area=np.array([100.0]))
    >>> boxes = np.array([[50.0, 50, 60, 60], [0, 0, 8, 10]])  # elsewhere, and four fifths of it
    >>> one = Found(boxes, np.array([0.9, 0.8]), np.array([0, 0]))
    >>> result = average_precision([one], [objects], classes=1)
    >>> round(result["ap"], 2), round(result["ap50"], 2), result["ap_large"]
    (0.35, 0.5, None)

    Where scores are equal, the earlier image and the earlier detection come first: for the numbers
    of pycocotools, images are in the order of their ids.

    Args:
        found: detections of each image; of a class, the 100 of the highest scores count.
        truths: objects of each image.
        classes: number of classes.

    Returns:
        Fractions, or None where there is no object: `ap`, the mean over thresholds from .5 to .95
        and over classes; `ap50` and `ap75` at one threshold; `ap_small`, `ap_medium` and `ap_large`
        of objects of up to 32^2 pixels, up to 96^2 and above; `class_ap`, a list with the mean over
        thresholds of each class.
    """
    matches: list[list[_Matches]] = [[] for _ in range(classes)]
    for one, truth in zip(found, truths, strict=True):
        for k in np.union1d(one.classes, truth.labels).tolist():
            own, there = one.classes == k, truth.labels == k
            objects = Truth(*(values[there] for values in truth))
            matches[k].append(_match(one.boxes[own], one.scores[own], objects))
    table = np.stack([_precision(own) for own in matches], axis=-1)  # [A, T, K]
    scores = {name: _mean(own) for name, own in zip(AREAS, table, strict=True)}
    scores |= {"ap50": _mean(table[0, 0]), "ap75": _mean(table[0, 5])}
    by_class = [_mean(own) for own in table[0].T]
    return {name: scores[name] for name in NAMES} | {"class_ap": by_class}


def precision_by_pycocotools(
    found: Sequence[Found], truths: Sequence[Truth], classes: int
) -> Mapping[str, Any]:
    """The same by pycocotools. Arguments and result as of `average_precision`.

    Raises:
        ValueError: pycocotools is not installed.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ModuleNotFoundError:
        raise ValueError(
            "pycocotools is not installed: pip install 'rope_jax[coco]', or leave it out for the "
            "same numbers"
        ) from None
    objects = [
        {"image_id": image, "bbox": box, "category_id": k, "iscrowd": crowd, "area": area}
        for image, truth in enumerate(truths)
        for box, k, crowd, area in _rows(*truth)
    ]
    detections = [
        {"image_id": image, "bbox": box, "category_id": k, "score": score, "area": box[2] * box[3]}
        for image, one in enumerate(found)
        for box, score, k in _rows(*one)
    ]

    def indexed(entries: list[dict[str, Any]]) -> Any:
        made = COCO()
        made.dataset = {
            "images": [{"id": image} for image in range(len(truths))],
            "categories": [{"id": k} for k in range(classes)],
            "annotations": [one | {"id": number} for number, one in enumerate(entries, 1)],
        }
        made.createIndex()
        return made

    with contextlib.redirect_stdout(io.StringIO()):
        judge = COCOeval(indexed(objects), indexed(detections), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    by_class = judge.eval["precision"][..., 0, -1].mean(axis=(0, 1)).tolist()
    none = lambda x: None if x == -1 else x
    scores = dict(zip(NAMES, map(none, judge.stats.tolist()), strict=False))
    return scores | {"class_ap": list(map(none, by_class))}


def _rows(boxes: Float[np.ndarray, "N 4"], *others: np.ndarray) -> Iterator[tuple]:
    """Each box as a corner and the sides, with its other entries."""
    return zip(_with_sides(boxes).tolist(), *(values.tolist() for values in others), strict=True)


def _mean(values: Float[np.ndarray, "..."]) -> float | None:
    """The mean where there are objects; elsewhere values are NaN."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else None


def _match(
    boxes: Float[np.ndarray, "D 4"], scores: Float[np.ndarray, " D"], truth: Truth
) -> _Matches:
    """The detections of a class in an image that are right and wrong, by descending score."""
    order = np.argsort(-scores, kind="stable")[:MOST]
    boxes, scores = _with_sides(boxes[order]), scores[order]
    left_out = truth.crowd | (truth.area < _LOW) | (truth.area > _HIGH)  # [A, G]
    shape = (len(AREAS), len(THRESHOLDS))
    hit, ignored = np.zeros((2, *shape, len(boxes)), bool)
    taken = np.zeros((*shape, len(truth.labels)), bool)
    overlaps = _overlaps(boxes, _with_sides(truth.boxes), truth.crowd)
    for d in np.flatnonzero(overlaps.max(axis=1, initial=0) >= _LIMITS[0]):
        free = (overlaps[d] >= _LIMITS[:, None]) & (~taken | truth.crowd)
        counted = free & ~left_out[:, None]
        choice = np.where(counted.any(-1, keepdims=True), counted, free)
        # Of equal overlaps the last.
        best = choice.shape[-1] - 1 - np.where(choice, overlaps[d], -1)[..., ::-1].argmax(-1)
        hit[..., d] = choice.any(-1)
        ignored[..., d] = hit[..., d] & np.take_along_axis(left_out, best, axis=1)
        area, threshold = np.nonzero(hit[..., d])
        taken[area, threshold, best[area, threshold]] = True
    size = boxes[:, 2] * boxes[:, 3]
    ignored |= ~hit & ((size < _LOW) | (size > _HIGH))[:, None]
    return _Matches(scores, hit & ~ignored, ~hit & ~ignored, (~left_out).sum(axis=1))


def _with_sides(corners: Float[np.ndarray, "N 4"]) -> Float[np.ndarray, "N 4"]:
    """Boxes as the first corner and the sides, in float64."""
    corners = np.asarray(corners, np.float64)
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)


def _overlaps(
    found: Float[np.ndarray, "D 4"], there: Float[np.ndarray, "G 4"], crowd: Bool[np.ndarray, " G"]
) -> Float[np.ndarray, "D G"]:
    """Intersection over union, with crowds over the area of the detection. Boxes have sides."""
    first = np.maximum(found[:, None, :2], there[:, :2])
    last = np.minimum((found[:, :2] + found[:, 2:])[:, None], there[:, :2] + there[:, 2:])
    sides = last - first
    shared = np.where((sides > 0).all(-1), sides[..., 0] * sides[..., 1], 0)
    own, other = found[:, 2:3] * found[:, 3:], there[:, 2] * there[:, 3]
    union = np.where(crowd, own, own + other - shared)
    return np.divide(shared, union, out=np.zeros_like(shared), where=shared > 0)


def _precision(matches: Sequence[_Matches]) -> Float[np.ndarray, "A T"]:
    """Mean precision over recalls of one class over all images; NaN where there is no object."""
    result = np.full((len(AREAS), len(THRESHOLDS)), np.nan)
    if not matches:
        return result
    scores, right, wrong = (
        np.concatenate(x, axis=-1) for x in list(zip(*matches, strict=True))[:3]
    )
    objects = np.sum([one.objects for one in matches], axis=0)
    order = np.argsort(-scores, kind="stable")
    right, wrong = (np.cumsum(x[..., order], axis=-1, dtype=np.float64) for x in (right, wrong))
    precision = right / (right + wrong + np.spacing(1))
    # The best precision at this recall or a higher one, and 0 at recalls that are not reached.
    precision = np.maximum.accumulate(precision[..., ::-1], axis=-1)[..., ::-1]
    precision = np.pad(precision, [(0, 0), (0, 0), (0, 1)])
    for area in np.flatnonzero(objects):
        for threshold, found in enumerate(right[area] / objects[area]):
            places = np.searchsorted(found, RECALLS, side="left")
            result[area, threshold] = precision[area, threshold, places].mean()
    return result
