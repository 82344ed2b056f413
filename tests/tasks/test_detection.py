import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.config import ConfigError, resolve
from rope_jax.data.sources.boxes import Annotations, BoxImages
from rope_jax.data.sources.scenes import LabelMaps
from rope_jax.tasks import TASKS, task_for

task = TASKS["detection"]
PIXELS, LABELS = np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int32)
FIELDS = ((2,), np.int32), ((), int), ((4,), float), ((), np.int32), ((), bool), ((), float)
NONE = Annotations(*(np.zeros((0, *shape), kind) for shape, kind in FIELDS))
BOXES = BoxImages(PIXELS, LABELS, "some", "train", 10, annotations=NONE)
MAPS = LabelMaps(PIXELS, PIXELS[..., 0], "maps", "train", 10)


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
    prepare = jax.jit(
        lambda batch: task.prepare_batch(batch, config, seed=0, key=jax.random.key(0))
    )
    prepared = prepare(some_batch())
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
    pixels = prepare(bright)["image"]
    np.testing.assert_allclose(pixels[0, :, :10], [[[1.6, 3.2, 8.0]] * 10] * 8, rtol=1e-5)
    assert not np.any(pixels[0, :, 10:])
    assert not np.any(pixels[1, 4:])
    assert np.all(pixels[1, :4])


@pytest.mark.parametrize(
    ("images", "changes", "message"),
    [
        (MAPS, {}, "head=dino needs boxes with classes, but .* has classes of pixels"),
        (
            BOXES,
            {"model": {"head": "mask_rcnn"}},
            "mask_rcnn needs boxes with classes and masks, but .* has boxes with classes",
        ),
        (BOXES, {"model": {"num_classes": 7}}, "num_classes=7, but some has 10 classes: use 10"),
        (BOXES, {"mix": {"cutmix": 1.0}}, "mix.cutmix=1.0 is for classes of whole images"),
        (BOXES, {"loss": "binary"}, "loss=binary is for classes of whole images"),
        (BOXES, {"data": {"augment": "erase(p=0.5)"}}, "erase changes images, but not their boxes"),
        (
            BOXES,
            {"model": {"head": "dino(queries=50)"}},
            "max_boxes=100 is more than the",
        ),
        (
            BOXES,
            {"data": {"augment": "flipp"}},
            "unknown augmentation 'flipp'.*--config.data.augment",
        ),
    ],
)
def test_unsuitable_settings_are_refused(images, changes, message, monkeypatch):
    task.check(resolve({"model": {"head": "dino"}, "accumulate": 2}), BOXES)
    config = resolve(changes | {"model": {"head": "dino"} | changes.get("model", {})})
    with pytest.raises(ConfigError, match=message):
        task_for(config.model.head).check(config, images)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rope_jax\[coco\]'"):
        task.check(resolve({"model": {"head": "dino"}}), BOXES)
