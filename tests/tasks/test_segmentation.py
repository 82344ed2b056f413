import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.config import ConfigError, resolve
from rope_jax.data.sources.scenes import LabelMaps
from rope_jax.models.heads import PixelLogits
from rope_jax.models.heads.pixels import pixel_loss
from rope_jax.tasks import TASKS
from tests.models.small import create_head

task = TASKS["segmentation"]


def test_the_auxiliary_loss_has_its_weight():
    rng = np.random.default_rng(0)
    logits, other = (jnp.asarray(rng.standard_normal((1, 2, 2, 3)), jnp.float32) for _ in range(2))
    labels = jnp.asarray(rng.integers(0, 3, (1, 4, 4)), jnp.uint8)
    head = create_head("linear", channels=[1], num_classes=3)
    predictions = PixelLogits(logits, other, 0.4)
    loss, accuracy = jax.jit(
        lambda predictions: head.loss(predictions, {"label": labels}, divisor="all", key=None)
    )(predictions)
    loss_of = jax.jit(pixel_loss)
    expected = loss_of(logits, labels) + 0.4 * loss_of(other, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    expected = (logits.argmax(-1) == labels[:, 1::2, 1::2]).mean()
    np.testing.assert_allclose(accuracy, expected, rtol=1e-6)


def test_sets_without_usable_images_score_zero():
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    scores = task.scores([], LabelMaps(pixels, pixels[..., 0], "own", "test", 2))
    assert scores == {"miou": 0.0, "accuracy": 0.0, "iou": [None, None]}


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
    task.check(resolve({"model": model, "accumulate": 2}), images)
    with pytest.raises(ConfigError, match=message):
        task.check(resolve({"model": model | {"num_classes": classes}} | changes), images)
