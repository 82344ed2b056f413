"""Average precision: by hand, and of random sets as computed by other code."""

import numpy as np
import pytest

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


def scene(rng, *, classes, crowds, steps):
    """An image's objects, and boxes near them and elsewhere; few `steps` make equal scores."""
    count = int(rng.integers(0, 12 + 1))
    corner, sides = rng.uniform(0, 300, (count, 2)), rng.uniform(4, 160, (count, 2))
    boxes = np.concatenate([corner, corner + sides], 1)
    labels = rng.integers(0, classes, count, np.int32)
    area = sides.prod(1) * rng.uniform(0.4, 1, count)
    objects = Truth(boxes, labels, rng.random(count) < crowds, area)
    near = np.repeat(np.arange(count), rng.integers(0, 4, count))
    others = int(rng.integers(0, 8))
    start = rng.uniform(0, 300, (others, 2))
    wild = np.concatenate([start, start + rng.uniform(1, 200, (others, 2))], axis=1)
    found_boxes = np.concatenate([boxes[near] + rng.normal(0, 4, (len(near), 4)), wild])
    kinds = np.concatenate([labels[near], rng.integers(0, classes, others)])
    scores = np.round(rng.random(len(kinds)) * steps) / steps
    order = rng.permutation(len(kinds))
    order = order[(found_boxes[:, 2:] > found_boxes[:, :2]).all(1)[order]]
    return ImageDetections(found_boxes[order], scores[order], kinds[order]), objects


# `NAMES` of another implementation, that of earlier versions.
RANDOM_SETS = {
    (0, 0.0): [0.233016133, 0.355045823, 0.266995076, 0.106850542, 0.284851762, 0.431607749],
    (0, 0.3): [0.167230538, 0.278149341, 0.173192082, 0.084655823, 0.255003637, 0.256001886],
    (1, 0.0): [0.237169715, 0.367090001, 0.245446757, 0.245434543, 0.29613312, 0.225817582],
    (1, 0.3): [0.215188332, 0.339541354, 0.216656693, 0.345764576, 0.236158632, 0.376584908],
    (3, 0.3): [0.282595441, 0.430436669, 0.325659666, 0.162376238, 0.378543509, 0.444169417],
}


@pytest.mark.parametrize(("seed", "crowds"), RANDOM_SETS)
def test_random_sets_match_recorded_scores(seed, crowds):
    """With images that are empty, objects of all sizes and ties of scores."""
    rng = np.random.default_rng(seed)
    pairs = [scene(rng, classes=4, crowds=crowds, steps=(2**53, 5)[seed % 2]) for _ in range(12)]
    pairs += [(detections(scores=()), truth()), (detections(scores=()), pairs[0][1])]
    pairs += [(pairs[1][0], truth())]
    scores = average_precision(*zip(*pairs, strict=True), 5)
    expected = RANDOM_SETS[seed, crowds]
    np.testing.assert_allclose([scores[name] for name in NAMES], expected, atol=2e-9)
    assert scores["class_ap"][4] is None
    assert np.mean(scores["class_ap"][:4]) == pytest.approx(scores["ap"], abs=1e-9)
