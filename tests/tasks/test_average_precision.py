"""Average precision of sets without detections or objects; tests/parity has scores."""

import numpy as np

from rope_jax.data import Truth
from rope_jax.tasks.average_precision import NAMES, ImageDetections, average_precision


def truth(*boxes):
    """Objects of class 0 whose boxes are x1, y1, x2, y2, and as large as these."""
    boxes = np.array(boxes, float).reshape(-1, 4)
    labels = np.zeros(len(boxes), np.int32)
    return Truth(boxes, labels, labels > 0, (boxes[:, 2:] - boxes[:, :2]).prod(1))


def detections(*boxes, scores):
    """Detections of class 0."""
    boxes = np.array(boxes, float).reshape(-1, 4)
    return ImageDetections(boxes, np.array(scores, float), np.zeros(len(boxes), int))


def test_sets_without_detections_or_without_objects():
    nothing, box = detections(scores=()), truth((0, 0, 10, 10))
    assert average_precision([nothing, nothing], [box, truth()], 1)["ap"] == 0
    scores = average_precision([detections((0, 0, 10, 10), scores=[0.5])], [truth()], 1)
    assert scores == dict.fromkeys(NAMES) | {"class_ap": [None]}
