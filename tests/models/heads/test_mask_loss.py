"""Mask2Former's loss against definitions in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from rope_jax.models.heads.mask2former import loss as ml
from tests.devices import run_on_devices
from tests.models.definition import bilinear, softmax

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
uncertain_points = jax.jit(ml.uncertain_points, static_argnums=1)


def scene(*, batch=2, size=(6, 9), classes=4):
    """Labels of rectangles, a part of them without a class."""
    labels = RNG.integers(0, classes, (batch, 2, 3)).repeat(size[0] // 2, 1).repeat(size[1] // 3, 2)
    labels[0, 0, :4] = 255
    return labels.astype(np.uint8)


def mask_loss(logits, labels, kind, points):
    """Cross-entropy and Dice loss of a mask's logits for the pixels of a class, at points."""
    read = lambda image: np.array([bilinear(image, x, y) for x, y in points])
    p, mask = 1 / (1 + np.exp(-read(logits))), read(1.0 * (labels == kind))
    entropy = -(mask * np.log(p) + (1 - mask) * np.log(1 - p)).mean()
    dice = 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)
    return 5 * entropy + 5 * dice


def matching_costs(logits, masks, labels, kinds, points):
    """Of the classes of an image (rows) and its queries, whose masks are [H, W, Q]."""
    costs = np.zeros((len(kinds), len(logits)))
    for row, query in np.ndindex(*costs.shape):
        costs[row, query] = mask_loss(masks[..., query], labels, kinds[row], points)
        costs[row, query] -= 2 * softmax(logits[query])[kinds[row]]
    return costs


def test_matching_costs_combine_class_mask_and_dice():
    logits, masks = (RNG.standard_normal((2, *shape)) for shape in ((5, 5), (3, 5, 5)))
    labels, points = scene(), RNG.random((2, 50, 1, 2))
    kinds = np.array([[0, 3, 1], [2, 1, 3]])
    costs = jax.jit(ml.matching_costs)(logits, masks, labels, kinds, points)
    rows = zip(logits, masks, labels, kinds, points[:, :, 0], strict=True)
    expected = [matching_costs(*row) for row in rows]
    np.testing.assert_allclose(costs, expected, rtol=1e-10)


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
        masks = np.einsum("bhwc,bqc->bhwq", pixels, embeddings[layer])
        images = zip(classes[layer], masks, labels, present, shared[:, :, 0], strict=True)
        costs = (matching_costs(*image) for image in images)
        pairs = [scipy.optimize.linear_sum_assignment(cost)[1] for cost in costs]
        # The matched masks, in rows as the code has them, for the same points.
        matched_masks = np.zeros((*masks.shape[:3], rows))
        for image, matched in enumerate(pairs):
            matched_masks[image, :, :, : len(matched)] = masks[image][..., matched]
        points = np.asarray(uncertain_points(matched_masks, number, keys[1][layer]))
        count, weights, losses, parts = sum(map(len, present)), 0.0, 0.0, 0.0
        for image, (kinds, matched) in enumerate(zip(present, pairs, strict=True)):
            goal = dict(zip(matched.tolist(), kinds, strict=True))
            for query in range(queries):
                weight = 1.0 if query in goal else 0.1
                probability = softmax(classes[layer, image, query])[goal.get(query, outputs - 1)]
                losses, weights = losses - weight * np.log(probability), weights + weight
            for row, kind in enumerate(kinds):
                matched_mask, places = matched_masks[image, :, :, row], points[image, :, row]
                parts += mask_loss(matched_mask, labels[image], kind, places)
        total += 2 * losses / weights + parts / max(count, 1)
    return total


@pytest.mark.parametrize(
    ("queries", "empty"),
    [
        (6, slice(1, 2)),
        pytest.param(3, slice(1, 2), marks=pytest.mark.slow),
        pytest.param(4, slice(0, 3), marks=pytest.mark.slow),
    ],
)
def test_the_loss_sums_matched_queries_over_layers(queries, empty):
    """Also with fewer queries than classes, and without labels in one image or in all of them."""
    classes, embeddings = (RNG.standard_normal((3, 3, queries, n)) for n in (6, 4))
    pixels, labels = RNG.standard_normal((3, 4, 6, 4)), scene(batch=3, classes=3)
    labels[empty] = 255
    key = jax.random.key(3)
    loss = lambda *inputs: ml.set_loss(*inputs, jnp.asarray(labels), points=40, key=key)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    result, gradients = run(classes, embeddings, pixels)
    expected = definition(classes, embeddings, pixels, labels, 40, key)
    np.testing.assert_allclose(result, expected, rtol=1e-9)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    if empty == slice(0, 3):  # every query learns that there is no object, masks learn nothing
        assert (gradients[0][..., -1] < 0).all()
        assert not any(gradient.any() for gradient in gradients[1:])


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
np.testing.assert_allclose(compiled(*inputs), alone, rtol=1e-5)
assert not re.findall(r"= pred[[][]] all-reduce", compiled.as_text())
assert mesh.size == 2
"""


@pytest.mark.process
def test_devices_match_independently():
    """The loss is that of one device, and no loop waits for all devices at each step."""
    run_on_devices(2, _DEVICES)
