import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.config import resolve
from rope_jax.data import Truth
from rope_jax.tasks import TASKS
from rope_jax.tasks.average_precision import NAMES, ImageDetections, average_precision
from rope_jax.tasks.pasting import paste

task = TASKS["detection"]


def some_batch():
    return {
        "image": jnp.full((2, 8, 12, 3), 51, jnp.uint8),
        "extent": jnp.array([[8, 10], [4, 12]], jnp.int32),
        "boxes": jnp.array(
            [[[0, 2, 5, 8], [0, 0, 0, 0]], [[6, 1, 12, 3], [0, 0, 3, 4]]], jnp.float32
        ),
        "label": jnp.array([[3, -1], [0, 9]], jnp.int32),
        "epoch": jnp.zeros(2, jnp.int32),
        "index": jnp.arange(2),
    }


def test_boxes_are_scaled_by_the_extent_and_padding_is_zero():
    config = resolve({"data": {"mean": (0.2, 0.2, 0.2), "std": (0.5, 0.25, 0.1)}})
    prepared = task.prepare_batch(some_batch(), config, seed=0, key=jax.random.key(0))
    expected = [
        [[0.25, 5 / 8, 0.5, 6 / 8], [0] * 4],
        [[0.75, 0.5, 0.5, 0.5], [1 / 8, 0.5, 0.25, 1]],
    ]
    np.testing.assert_allclose(prepared["boxes"], expected, atol=1e-6)
    np.testing.assert_array_equal(prepared["label"], some_batch()["label"])
    # Three boxes in two images.
    np.testing.assert_allclose(prepared["share"], [2 / 3] * 2, rtol=1e-6)
    np.testing.assert_allclose(prepared["image"], 0, atol=1e-6)  # 51 / 255 is the mean
    bright = some_batch() | {"image": jnp.full((2, 8, 12, 3), 255, jnp.uint8)}
    pixels = task.prepare_batch(bright, config, seed=0, key=jax.random.key(0))["image"]
    np.testing.assert_allclose(pixels[0, :, :10], [[[1.6, 3.2, 8.0]] * 10] * 8, rtol=1e-5)
    assert not np.any(pixels[0, :, 10:])
    assert not np.any(pixels[1, 4:])
    assert np.all(pixels[1, :4])


@pytest.mark.parametrize("edges", ["inside", "outside", "half", "empty"])
def test_an_image_shows_its_part_of_a_larger_one(edges):
    """A mask that reaches beyond an image is cut off there; nothing else has a probability."""
    rng, size, around = np.random.default_rng(0), (20, 30), (60, 90)
    for _ in range(50):
        mask = rng.random((7, 7))
        first, second = rng.random((2, 2)) * [size[::-1]] * 2 - (np.array(size[::-1]) / 2)
        box = np.concatenate([np.minimum(first, second), np.maximum(first, second)])
        if edges == "inside":
            box = np.clip(box, 0, size[::-1] * 2)
        elif edges == "half":
            box = np.round(2 * box) / 2
        elif edges == "empty":
            box[2] = box[0]
        whole, image = np.zeros(around), np.zeros(size)
        for canvas, corner in ((whole, [30, 20]), (image, [0, 0])):
            part, place = paste(mask, box + corner * 2, canvas.shape)
            canvas[place] = part
        np.testing.assert_allclose(image, whole[20:40, 30:60], atol=1e-9)
        np.testing.assert_array_equal(image >= 0.5, whole[20:40, 30:60] >= 0.5)


def test_a_box_elsewhere_is_not_pasted():
    part, place = paste(np.ones((2, 2)), np.array([50.0, 0, 60, 10]), (10, 20))
    assert part.size == 0
    assert np.zeros((10, 20))[place].size == 0


def truth(*boxes, labels=None):
    """Objects whose boxes are x1, y1, x2, y2; of class 0, as large as their boxes."""
    boxes = np.array(boxes, float).reshape(-1, 4)
    labels = np.zeros(len(boxes), np.int32) if labels is None else np.int32(labels)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return Truth(boxes, labels, np.zeros(len(boxes), bool), area)


def detections(*boxes, scores):
    """Detections of class 0."""
    boxes = np.array(boxes, float).reshape(-1, 4)
    return ImageDetections(boxes, np.array(scores, float), np.zeros(len(boxes), int))


def test_the_mean_covers_recalls_thresholds_and_classes_with_objects():
    """One of two objects is detected at .5 and .55: 51 of 101 recalls are reached there."""
    objects = truth((0, 0, 10, 10), (40, 40, 50, 50), (0, 40, 10, 50), labels=[0, 0, 2])
    scores = average_precision([detections((0, 0, 5.7, 10), scores=[0.5])], [objects], 4)
    assert scores["class_ap"] == [pytest.approx(51 / 101 * 2 / 10, abs=1e-12), None, 0.0, None]
    assert scores["ap"] == pytest.approx(51 / 101 / 10, abs=1e-12)
    assert scores["ap50"] == pytest.approx(51 / 101 / 2, abs=1e-12)
    assert scores["ap75"] == 0


def test_sets_without_detections_or_without_objects():
    nothing, box = detections(scores=()), truth((0, 0, 10, 10))
    assert average_precision([nothing, nothing], [box, truth()], 1)["ap"] == 0
    scores = average_precision([detections((0, 0, 10, 10), scores=[0.5])], [truth()], 1)
    assert scores == dict.fromkeys(NAMES) | {"class_ap": [None]}


def scene(rng, *, classes, crowds, steps):
    """An image's objects, and boxes near them and elsewhere; scores of `steps` values are equal."""
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
    scores = rng.random(len(kinds))
    if steps is not None:
        scores = np.round(scores * steps) / steps
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
    pairs = [scene(rng, classes=4, crowds=crowds, steps=(None, 5)[seed % 2]) for _ in range(12)]
    pairs += [(detections(scores=()), truth()), (detections(scores=()), pairs[0][1])]
    pairs += [(pairs[1][0], truth())]
    scores = average_precision(*zip(*pairs, strict=True), 5)
    expected = RANDOM_SETS[seed, crowds]
    np.testing.assert_allclose([scores[name] for name in NAMES], expected, atol=2e-9)
    assert scores["class_ap"][4] is None
    assert np.mean(scores["class_ap"][:4]) == pytest.approx(scores["ap"], abs=1e-9)
