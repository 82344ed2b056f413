"""Mask2Former's loss against definitions in NumPy, in float64."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from rope_jax.models.heads.mask2former import loss as ml
from tests.devices import environment
from tests.models.definition import bilinear, softmax

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
uncertain_points = jax.jit(ml.uncertain_points, static_argnums=1)


def sample(image, points):
    return np.array([bilinear(image, x, y) for x, y in points])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def entropy(logits, mask):
    p = sigmoid(logits)
    return -(mask * np.log(p) + (1 - mask) * np.log(1 - p)).mean()


def dice(logits, mask):
    p = sigmoid(logits)
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def scene(*, batch=2, size=(6, 9), classes=4):
    """Labels of rectangles, a part of them without a class."""
    labels = RNG.integers(0, classes, (batch, 2, 3)).repeat(size[0] // 2, 1).repeat(size[1] // 3, 2)
    labels[0, 0, :4] = 255
    return labels.astype(np.uint8)


@pytest.mark.parametrize("shared", [True, False])
def test_maps_and_masks_are_interpolated(shared):
    maps, labels = RNG.standard_normal((2, 3, 5, 4)), scene()
    points = RNG.random((2, 7, 1 if shared else 4, 2))
    points[:, 0] = 0.0  # a corner of the image, where three of four pixels are outside
    targets = np.array([[0, 1, 2, 3], [3, 1, 0, 2]])
    values = jax.jit(ml.sample_maps)(maps, points)
    masks = jax.jit(ml.sample_masks)(labels, targets, points)
    for image, channel in np.ndindex(2, 4):
        places = points[image, :, 0 if shared else channel]
        expected = sample(maps[image, :, :, channel], places)
        np.testing.assert_allclose(values[image, :, channel], expected, atol=1e-12)
        expected = sample(1.0 * (labels[image] == targets[image, channel]), places)
        np.testing.assert_allclose(masks[image, :, channel], expected, atol=1e-12)


def test_targets_are_the_classes_that_occur():
    labels = np.array([[[3, 0], [255, 3]], [[255, 255], [255, 255]], [[1, 2], [0, 3]]], np.uint8)
    targets, real = map(np.asarray, jax.jit(ml.find_targets, static_argnums=(1, 2))(labels, 5, 3))
    classes = [row[is_real].tolist() for row, is_real in zip(targets, real, strict=True)]
    assert classes == [[0, 3], [], [0, 1, 2]]


def test_matching_costs_combine_class_mask_and_dice():
    logits, masks, labels = (
        RNG.standard_normal((2, 5, 5)),
        RNG.standard_normal((2, 3, 5, 5)),
        scene(),
    )
    points, targets = RNG.random((2, 50, 1, 2)), np.array([[0, 3, 1], [2, 1, 3]])
    costs = jax.jit(ml.matching_costs)(logits, masks, labels, targets, points)
    for image, target, query in np.ndindex(2, 3, 5):
        places, k = points[image, :, 0], targets[image, target]
        mask = sample(masks[image, :, :, query], places)
        target_mask = sample(1.0 * (labels[image] == k), places)
        cost = 5 * entropy(mask, target_mask) + 5 * dice(mask, target_mask)
        cost -= 2 * softmax(logits[image, query])[k]
        np.testing.assert_allclose(costs[image, target, query], cost, rtol=1e-10)


def test_three_quarters_of_the_points_are_uncertain():
    """On a ramp from -1 to 1, a quarter of random points is nearer to 0 than about 1/4."""
    masks = np.broadcast_to(np.linspace(-1, 1, 401)[:, None], (1, 200, 401, 2))
    points = np.asarray(uncertain_points(masks, 4000, jax.random.key(0)))
    assert points.shape == (1, 4000, 2, 2)
    certainty = np.abs(2 * points[..., 0] - 1)
    # All but a few at the image's border, which is less certain as maps are 0 outside.
    assert abs(np.quantile(certainty[:, :3000], 0.99) - 0.25) < 0.02
    assert abs(certainty[:, 3000:].mean() - 0.5) < 0.05
    assert np.abs(points[:, :, 0] - points[:, :, 1]).mean() > 0.05  # drawn for each mask


def definition(classes, embeddings, pixels, labels, number, key):
    """The loss of all layers, with SciPy's matches; points are drawn as by the code."""
    layers, batch, queries, outputs = classes.shape
    keys = jax.random.split(key, (2, layers))
    present = [[k for k in np.unique(image_labels) if k != 255] for image_labels in labels]
    total, rows = 0.0, min(outputs - 1, queries)
    for layer in range(layers):
        shared = np.asarray(jax.random.uniform(keys[0][layer], (batch, number, 1, 2)))
        masks = np.einsum("bhwc,bqc->bqhw", pixels, embeddings[layer])
        pairs = []
        for image, classes_present in enumerate(present):
            costs = np.zeros((len(classes_present), queries))
            for row, query in np.ndindex(*costs.shape):
                matched_masks = shared[image, :, 0]
                mask = sample(masks[image, query], matched_masks)
                target_mask = sample(1.0 * (labels[image] == classes_present[row]), matched_masks)
                costs[row, query] = 5 * entropy(mask, target_mask) + 5 * dice(mask, target_mask)
                costs[row, query] -= 2 * softmax(classes[layer, image, query])[classes_present[row]]
            pairs.append(scipy.optimize.linear_sum_assignment(costs)[1])
        # The matched masks, in rows as the code has them, for the same points.
        matched_masks = np.zeros((batch, *pixels.shape[1:3], rows))
        for image, matched in enumerate(pairs):
            matched_masks[image, :, :, : len(matched)] = np.moveaxis(masks[image, matched], 0, -1)
        points = np.asarray(uncertain_points(matched_masks, number, keys[1][layer]))
        count, weights, losses, parts = sum(map(len, present)), 0.0, 0.0, 0.0
        for image, (classes_present, matched) in enumerate(zip(present, pairs, strict=True)):
            goal = dict(zip(matched.tolist(), classes_present, strict=True))
            for query in range(queries):
                weight = 1.0 if query in goal else 0.1
                probability = softmax(classes[layer, image, query])[goal.get(query, outputs - 1)]
                losses, weights = losses - weight * np.log(probability), weights + weight
            for row, k in enumerate(classes_present):
                mask = sample(matched_masks[image, :, :, row], points[image, :, row])
                target_mask = sample(1.0 * (labels[image] == k), points[image, :, row])
                parts += 5 * entropy(mask, target_mask) + 5 * dice(mask, target_mask)
        total += 2 * losses / weights + parts / max(count, 1)
    return total


@pytest.mark.parametrize("queries", [6, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loss_sums_matched_queries_over_layers(queries):
    """Also with an image without labels, and with fewer queries than classes."""
    classes, embeddings = (RNG.standard_normal((3, 3, queries, n)) for n in (6, 4))
    pixels, labels = RNG.standard_normal((3, 4, 6, 4)), scene(batch=3, classes=3)
    labels[1] = 255
    key = jax.random.key(3)

    @jax.jit
    def loss(classes, embeddings, pixels):
        return ml.set_loss(classes, embeddings, pixels, jnp.asarray(labels), points=40, key=key)

    result = loss(classes, embeddings, pixels)
    expected = definition(classes, embeddings, pixels, labels, 40, key)
    np.testing.assert_allclose(result, expected, rtol=1e-9)


@pytest.mark.slow
def test_without_labels_only_classes_have_a_loss():
    """Its gradient teaches every query that there is no object."""
    classes, embeddings = (RNG.standard_normal((2, 1, 4, n)) for n in (3, 4))
    pixels, labels = RNG.standard_normal((1, 4, 4, 4)), np.full((1, 8, 8), 255, np.uint8)

    def loss(*inputs):
        return ml.set_loss(*inputs, jnp.asarray(labels), points=8, key=jax.random.key(0))

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(
        classes, embeddings, pixels
    )
    expected = -2 * np.log(softmax(np.asarray(classes))[..., -1]).mean((1, 2)).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    assert (np.asarray(gradients[0])[..., -1] < 0).all()
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients[1:])


_DEVICES = """
import re
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rope_jax.models.heads.mask2former.loss import set_loss
from rope_jax.system.sharding import make_mesh, split_batch, use_mesh

mesh, rng = make_mesh(), np.random.default_rng(0)
layers, images = NamedSharding(mesh, P(None, ("data", "fsdp"))), split_batch(mesh)
shapes = {(2, 4, 5, 4): layers, (2, 4, 5, 3): layers, (4, 4, 6, 3): images}
inputs = [rng.standard_normal(shape, np.float32) for shape in shapes]
inputs.append(rng.integers(0, 3, (4, 8, 12), np.uint8))
loss = lambda *inputs: set_loss(*inputs, points=16, key=jax.random.key(0))
alone = jax.jit(loss)(*inputs)
inputs = [jax.device_put(x, s) for x, s in zip(inputs, [*shapes.values(), images], strict=True)]
with use_mesh(mesh):
    compiled = jax.jit(loss).lower(*inputs).compile()
print(float(alone), float(compiled(*inputs)))
print(len(re.findall(r"= pred[[][]] all-reduce", compiled.as_text())), mesh.size)
"""


@pytest.mark.process
def test_devices_match_independently():
    """The loss is that of one device, and no loop waits for all devices at each step."""
    output = subprocess.run(
        [sys.executable, "-c", _DEVICES],
        env=os.environ | environment(2),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    alone, divided = map(float, output[-2].split())
    assert divided == pytest.approx(alone, rel=1e-5)
    assert output[-1] == "0 2"
