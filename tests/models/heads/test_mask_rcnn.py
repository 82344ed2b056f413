"""Mask R-CNN: samples, padding, and a model of a whole; tests/parity has the other choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rope_jax
from rope_jax.config import resolve
from rope_jax.models.heads.boxes import suppress
from rope_jax.models.heads.detection import Targets
from rope_jax.models.heads.mask_rcnn.choices import Samples, SampleTargets, detect, sample
from rope_jax.models.heads.mask_rcnn.losses import TrainPredictions, region_losses
from rope_jax.tasks import TASKS
from tests.models.small import (
    check_gradients,
    compile_gradient,
    make_filled_model,
)

SMALL = {
    "width": 8,
    "hidden": 8,
    "anchor_samples": 8,
    "box_samples": 8,
    "train_candidates": 6,
    "candidates": 5,
    "proposals": 9,
    "detections": 7,
}
HEAD = f"mask_rcnn({','.join(f'{name}={value}' for name, value in SMALL.items())})"
SWIN = {"width": 8, "heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "image_size": 64}
CLASSES = 3


@pytest.mark.parametrize(("first", "kept"), [(True, [0, 2]), (False, [1])])
def test_only_valid_boxes_that_are_kept_suppress_others(first, kept):
    """The second of three boxes overlaps both others by 0.6."""
    boxes = np.float32([[0, 0, 4, 4], [1, 0, 5, 4], [2, 0, 6, 4]])
    result = jax.jit(suppress, static_argnums=2)(boxes, np.array([first, True, True]), 0.5)
    assert np.flatnonzero(result).tolist() == kept


@pytest.mark.parametrize(("objects", "background"), [(30, 30), (2, 30), (2, 3), (30, 2), (0, 3)])
def test_samples_are_drawn_without_replacement(objects, background):
    rng = np.random.default_rng(2)
    owners = np.concatenate([1 + rng.integers(0, 5, objects), np.zeros(background, int), [-1] * 4])
    owners = rng.permutation(owners)
    draws = rng.random(len(owners)).astype(np.float32)
    drawn = jax.jit(sample, static_argnums=(2, 3))(owners, draws, 16, 8)
    owner = np.asarray(drawn.owner)
    positive, negative = owner > 0, owner == 0
    count = min(objects, 8)
    assert (positive.sum(), negative.sum()) == (count, min(background, 16 - count))
    assert positive[:count].all()
    index = np.asarray(drawn.index)[positive | negative]
    assert len(set(index.tolist())) == len(index)
    np.testing.assert_array_equal(owners[index], owner[positive | negative])


def test_samples_that_are_padding_have_no_loss():
    """Nor do the masks of background, and the steps of either."""
    zeros = lambda *shape: np.zeros((1, 3, *shape), np.float32)
    samples = Samples(np.zeros((1, 3), np.int32), np.int32([[1, 0, -1]]))
    labels, masks = np.int32([[1, 3, -1]]), np.zeros((1, 3, 28, 28), bool)
    parts = (samples, zeros(4), zeros(4), labels, zeros(4), masks)
    targets = SampleTargets(*jax.device_put(parts))
    losses = []
    for size in (0, 5):
        arrays = [zeros(), zeros(4), zeros(4), zeros(4), zeros(28, 28)]
        for array, first in zip(arrays, (2, 1, 2, 1, 1), strict=True):
            array[:, first:] = size * np.arange(array[0, 0].size).reshape(array.shape[2:]) + size
        losses.append(jax.jit(region_losses)(TrainPredictions(targets, *jax.device_put(arrays))))
    assert losses[0] == losses[1]


def test_rows_without_a_detection_are_zero():
    """Of three proposals and four classes, one pair scores high enough."""
    probabilities = np.full((3, 4), 0.04, np.float32)
    probabilities[1, 2] = 0.9
    proposals = np.float32([[0, 0, 9, 9], [2, 2, 8, 6], [4, 4, 9, 9]])
    steps, limits = np.zeros((3, 4, 4), np.float32), np.full(4, 9, np.float32)
    run = jax.jit(detect, static_argnums=4)
    boxes, scores, classes = run(proposals, probabilities, steps, limits, 5)
    np.testing.assert_allclose(boxes, [[2, 2, 8, 6]] + [[0] * 4] * 4, atol=1e-6)
    np.testing.assert_allclose(scores, [0.9, 0, 0, 0, 0])
    assert classes.tolist() == [2, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def model():
    return make_filled_model("swin_t", head=HEAD, num_classes=CLASSES, **SWIN)


def some_batch(size=(64, 64)):
    """Two images with padding of different kinds, the second without objects."""
    rng = np.random.default_rng(3)
    boxes = np.zeros((2, 4, 4), np.float32)
    boxes[0, :2] = [[4, 6, 30, 40], [20, 2, 44, 20]]
    masks = np.zeros((2, 4, *size), bool)
    masks[0, 0, 6:40, 4:30] = masks[0, 1, 2:20, 20:44] = True
    return {
        "image": jnp.asarray(rng.integers(0, 256, (2, *size, 3)), jnp.uint8),
        "extent": jnp.array([[48, 50], [40, 64]]),
        "boxes": jnp.asarray(boxes),
        "label": jnp.array([[1, 2, -1, -1], [-1] * 4]),
        "masks": jnp.packbits(masks, axis=-1),
        "epoch": jnp.zeros(2, jnp.int32),
        "index": jnp.arange(2),
    }


def test_losses_are_finite_and_reach_every_parameter(model):
    task, config = TASKS["instances"], resolve({})

    def loss(model, batch, key):
        prepared = task.prepare_batch(batch, config, seed=0, key=key)
        return task.loss(model, prepared, config, key=key)

    run = compile_gradient(model, loss, has_aux=True)
    (value, _), gradients = run(some_batch(), jax.random.key(0))
    assert np.isfinite(value)
    heads = [("head", part) for part in ("anchor_head", "box_head", "mask_head")]
    check_gradients(gradients, silent=lambda path: path[:2] not in heads)


def test_an_exported_program_takes_any_number_of_images(model, tmp_path):
    rope_jax.export(model, tmp_path / "model.bin", resolution=64, platforms=("cpu",))
    program = rope_jax.load_exported(tmp_path / "model.bin")
    shapes = jax.tree.unflatten(program.out_tree, [x.shape for x in program.out_avals])
    batch = program.in_avals[-1].shape[0]
    assert not isinstance(batch, int)
    assert shapes["masks"] == (batch, 7, 28, 28)


def test_unsuitable_maps_and_targets_are_refused(model):
    maps = [jnp.zeros((2, side, side, 8)) for side in (16, 8, 4, 2)]
    for image_size in ((56, 56), (8, 8), (64, 60)):  # of strides of 3.5, 1/2, 4 and 3.75
        with pytest.raises(ValueError, match=f"{'x'.join(map(str, image_size))} pixels .* 16x16"):
            model.head(maps, image_size=image_size)
    boxes, labels, masks = jnp.zeros((2, 4, 4)), jnp.zeros((2, 4), int), some_batch()["masks"]
    without_masks, complete = Targets(boxes, labels), Targets(boxes, labels, masks)
    for targets, key in ((without_masks, jax.random.key(0)), (complete, None)):
        with pytest.raises(ValueError, match=r"need masks, and a key: .*Targets\(boxes, labels, m"):
            model.head(maps, image_size=(64, 64), targets=targets, key=key)
