"""Semantic segmentation: a class for every pixel, scored by mean intersection over union.

A batch from the loader has `image`, `label` [B, H, W], `epoch` and `index`, and `extent` where
images may be padded; `prepare_batch` returns `image` (normalised) and `label` for the model.
Pixels of label 255 belong to no class: they are neither trained on nor counted.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from rope_jax.config import Config, ConfigError
from rope_jax.data import Images, Streamed, split_augment
from rope_jax.data.device_batches import take
from rope_jax.data.images import device
from rope_jax.models.heads.pixels import IGNORED
from rope_jax.tasks.dense import check_dense

LABELS_OF = "pixels"
Batch = dict[str, Array]


def check(config: Config, images: Images | Streamed) -> None:
    """Rejects images without classes of pixels, and settings for classes of whole images.

    Raises:
        ConfigError: with the flag to change.
    """
    check_dense(
        config,
        images,
        labels_of=LABELS_OF,
        sources="scenes, masks or ade20k",
        moved="the labels of their pixels",
    )
    if config.loss_pixels == "valid" and config.accumulate > 1:
        raise ConfigError(
            f"--config.accumulate={config.accumulate} does not go with --config.loss_pixels=valid, "
            "whose divisor differs between the parts of a batch: use --config.accumulate=1 or "
            "--config.loss_pixels=all"
        )


def prepare_batch(batch: Batch, config: Config, *, seed: int | Array, key: Key[Array, ""]) -> Batch:
    """Augments and normalises the images of a training batch.

    Args:
        batch: `image` uint8 [B, H, W, 3], `label` uint8 [B, H, W], `epoch`, `index` int32 [B]; and
            `extent` int32 [B, 2], the rows and columns before padding, where there is any; or, for
            a data set on the device, `set`, `draws`, `epoch`, `index`.
        config: of the run.
        seed: of the run. Augmentation is a function of (seed, epoch, index).
        key: of this step; not used.

    Returns:
        `image` float32 [B, H, W, 3], 0 where padded, and `label` uint8 [B, H, W].
    """
    augment = split_augment(config.data.augment)
    if "set" in batch:
        batch = take(*batch["set"], batch, augment.loader)
    images, labels = batch["image"], batch["label"]
    if augment.pixels:
        keys = device.example_keys(seed, batch["epoch"], batch["index"])
        fill = tuple(round(255 * x) for x in config.data.mean)
        images = device.apply(images, keys, augment.pixels, fill)
    images = device.normalise(images, config.data.mean, config.data.std, batch.get("extent"))
    return {"image": images, "label": labels}


def loss(
    model: nnx.Module, batch: Batch, config: Config, *, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The training loss of the model's head, and the pixel accuracy.

    Args:
        model: with a head of segmentation.
        batch: from `prepare_batch`.
        config: of the run.
        key: of this step.
    """
    found = model.predict(batch["image"], train=True, key=key)
    own = jax.random.fold_in(key, zlib.crc32(b"loss"))
    return model.head.loss(found, batch, divisor=config.loss_pixels, key=own)


def count(
    logits: Float[Array, "B H W K"], batch: Batch, images: Images | Streamed
) -> Int[Array, "K 3"]:
    """`count_pixels` of an evaluation batch with the logits of all pixels."""
    return count_pixels(logits.argmax(-1), batch["label"], batch["mask"], images.classes)


def count_pixels(
    classes: Int[Array, "B H W"], label: UInt8[Array, "B H W"], mask: Bool[Array, " B"], number: int
) -> Int[Array, "K 3"]:
    """Counts the pixels of each class in an evaluation batch.

    Args:
        classes: predicted.
        label: 0 to number - 1, or 255.
        mask: False for padding of the batch.
        number: K, of classes.

    Returns:
        Per class: pixels of that class that are predicted, pixels predicted as it, pixels of it.
    """
    valid = (label != IGNORED) & mask[:, None, None]

    def histogram(values: Array, chosen: Array) -> Array:
        # Integers, whose sum does not depend on the order in which they are added.
        return jnp.bincount(jnp.where(chosen, values, number).ravel(), length=number + 1)[:number]

    predicted, label = classes.astype(jnp.int32), label.astype(jnp.int32)
    counts = [
        histogram(label, valid & (predicted == label)),
        histogram(predicted, valid),
        histogram(label, valid),
    ]
    return jnp.stack(counts, axis=-1).astype(jnp.int32)


def scores(parts: Sequence[Int[np.ndarray, "K 3"]], images: Images | Streamed) -> Mapping[str, Any]:
    """Mean intersection over union of the classes that occur, and pixel accuracy.

    >>> from rope_jax.data import LabelMaps
    >>> pixels, labels = np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, 8, 8), np.uint8)
    >>> images = LabelMaps(pixels, labels, "mine", "test", classes=3)
    >>> found = scores([np.array([[3, 3, 4], [2, 3, 2], [0, 0, 0]])], images)
    >>> found["iou"], round(found["miou"], 4), round(found["accuracy"], 4)
    ([0.75, 0.6666666666666666, None], 0.7083, 0.8333)

    Args:
        parts: from `count_pixels`, of the batches of a set.
        images: the set; not used.

    Returns:
        `miou`; `accuracy`, the share of pixels with a class that are predicted correctly; `iou`, of
        every class, None for one that is neither predicted nor there.
    """
    right, predicted, there = np.sum(parts, axis=0, dtype=np.int64).T
    union = predicted + there - right
    iou = [float(a / b) if b else None for a, b in zip(right, union, strict=True)]
    occurring = [x for x in iou if x is not None]
    return {
        "miou": float(np.mean(occurring)) if occurring else 0.0,
        "accuracy": float(right.sum() / max(there.sum(), 1)),
        "iou": iou,
    }
