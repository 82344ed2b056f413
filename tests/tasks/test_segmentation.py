import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.config import ConfigError, resolve
from rope_jax.data.sources.scenes import LabelMaps
from rope_jax.models.heads import PixelLogits, SegmentationHead
from rope_jax.models.heads.pixels import pixel_loss
from rope_jax.tasks import TASKS
from rope_jax.tasks.segments import count_pixels
from tests.tasks.iou import assert_scores

task = TASKS["segmentation"]


def some_maps(classes):
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    return LabelMaps(pixels, np.zeros((1, 4, 4), np.uint8), "own", "test", classes)


class Constant(SegmentationHead):
    """A model, and its head, with fixed predictions."""

    def __init__(self, predictions):
        self.predictions = nnx.data(predictions)

    @property
    def head(self):
        return self

    def __call__(self, images, *, train, key):
        assert train
        return self.predictions

    predict = __call__


def test_the_auxiliary_loss_has_its_weight():
    rng = np.random.default_rng(0)
    logits, other = (jnp.asarray(rng.standard_normal((1, 2, 2, 3)), jnp.float32) for _ in range(2))
    labels = jnp.asarray(rng.integers(0, 3, (1, 4, 4)), jnp.uint8)
    config, batch = resolve({}), {"image": jnp.zeros((1, 4, 4, 3)), "label": labels}
    model = Constant(PixelLogits(logits, other, 0.4))
    loss, accuracy = task.loss(model, batch, config, key=jax.random.key(0))
    expected = pixel_loss(logits, labels) + 0.4 * pixel_loss(other, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    expected = (logits.argmax(-1) == labels[:, 1::2, 1::2]).mean()
    np.testing.assert_allclose(accuracy, expected, rtol=1e-6)


def test_scores_match_the_definition_over_a_set():
    """Intersections and unions are summed over all images before they are divided."""
    rng = np.random.default_rng(0)
    classes, parts = 6, []
    predicted = rng.integers(0, classes - 1, (9, 11, 13))
    label = rng.integers(0, classes - 1, (9, 11, 13)).astype(np.uint8)
    label[rng.random(label.shape) < 0.2] = 255
    label[label == 2] = 1  # predicted, but not there: counts with 0
    padded = [jnp.asarray(np.pad(x, [(0, 3), (0, 0), (0, 0)])) for x in (predicted, label)]
    for first in range(0, 12, 4):  # the last batch has one image and three of padding
        batch = [x[first : first + 4] for x in padded]
        counts = count_pixels(*batch, first + jnp.arange(4) < 9, classes)
        parts.append(np.asarray(counts))
    scores = task.scores(parts, some_maps(classes))
    assert (scores["iou"][2], scores["iou"][-1]) == (0, None)  # the last is in no image
    assert_scores(scores, predicted, label, classes)


def test_sets_without_usable_images_score_zero():
    assert task.scores([], some_maps(2)) == {"miou": 0.0, "accuracy": 0.0, "iou": [None, None]}


def test_padding_is_zero_after_normalisation():
    """Padding is 0 for the model, not a pixel value; its labels are 255 from the loader."""
    batch = {
        "image": jnp.full((2, 4, 4, 3), 200, jnp.uint8),
        "label": jnp.zeros((2, 4, 4), jnp.uint8),
        "extent": jnp.array([[2, 3], [4, 4]]),
        "epoch": jnp.zeros(2, jnp.int32),
        "index": jnp.arange(2),
    }
    pixels = task.prepare_batch(batch, resolve({}), seed=0, key=jax.random.key(0))["image"]
    inside = np.zeros((2, 4, 4), bool)
    inside[0, :2, :3] = inside[1] = True
    np.testing.assert_array_equal(np.asarray(pixels != 0).all(-1), inside)
    np.testing.assert_array_equal(np.asarray(pixels == 0).all(-1), ~inside)


@pytest.mark.parametrize(
    ("classes", "changes", "message"),
    [
        (12, {}, "num_classes=12, but mine has 11 classes: use 11"),
        (10, {}, "num_classes=10, but mine has 11 classes: use 11"),
        (
            11,
            {"accumulate": 2, "loss_pixels": "valid"},
            "accumulate=2 cannot be combined with --config.loss_pixels=valid",
        ),
        (
            11,
            {"accumulate": 2, "model": {"head": "mask2former(queries=9)", "num_classes": 11}},
            r"accumulate=2 .*head=mask2former\(queries=9\)",
        ),
    ],
)
def test_unsuitable_settings_are_refused(classes, changes, message):
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    images = LabelMaps(pixels, pixels[..., 0], "mine", "train", classes=11)
    model = {"head": "linear", "num_classes": 11}
    config = resolve({"model": model})
    task.check(config, images)
    task.check(dataclasses.replace(config, accumulate=2), images)
    with pytest.raises(ConfigError, match=message):
        task.check(resolve({"model": model | {"num_classes": classes}} | changes), images)
