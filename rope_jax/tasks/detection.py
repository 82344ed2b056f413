"""Object detection: boxes with classes, scored by average precision.

A batch from the loader has `image`, padded at the bottom and on the right; `extent` int32 [B, 2],
the rows and columns before padding; `boxes` float32 [B, M, 4], corners x1, y1, x2, y2 in pixels;
`label` int32 [B, M], their classes, -1 in rows that are padding; `epoch` and `index`.
`prepare_batch` returns them for the model, with boxes as in `Targets`, and `share` [B].

An evaluation batch has `image`, `extent`, `index`, `mask` and `original` [B, 2], the rows and
columns of the image as it is stored. The objects themselves are read from the images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from rope_jax.config import Config, ConfigError
from rope_jax.data import Images, Streamed, split_augment
from rope_jax.data.images import device
from rope_jax.models.dense import head_call
from rope_jax.models.heads import find_head
from rope_jax.models.heads.detection import Targets, scaled_boxes
from rope_jax.tasks.average_precision import Found, average_precision, require_pycocotools
from rope_jax.tasks.dense import check_dense

LABELS_OF = "boxes"
Batch = dict[str, Array]


def check(config: Config, images: Images | Streamed) -> None:
    """Rejects images without boxes, and settings for classes of whole images.

    Raises:
        ConfigError: with the flag to change, or the package to install.
    """
    require_pycocotools()
    check_dense(config, images, labels_of=LABELS_OF, sources="scenes or coco", moved="their boxes")
    head = head_call(config.model.head)
    options = find_head(head.name).options.override(f"the head {head.name!r}", dict(head.options))
    queries = getattr(options, "queries", None)
    if queries is not None and config.data.max_boxes > queries:
        raise ConfigError(
            f"--config.data.max_boxes={config.data.max_boxes} is more than the head's {queries} "
            f"queries, each of which can find one object: use at most {queries}, or --config.model."
            f"head={head.name}(queries={config.data.max_boxes})"
        )


def prepare_batch(batch: Batch, config: Config, *, seed: int | Array, key: Key[Array, ""]) -> Batch:
    """Augments and normalises the images of a training batch, and scales its boxes.

    Args:
        batch: of the loader.
        config: of the run.
        seed: of the run. Augmentation is a function of (seed, epoch, index).
        key: of this step; not used.

    Returns:
        `image` float32 [B, H, W, 3], 0 where padded; `extent`; `boxes` [B, M, 4], centres and
        sizes, 0 to 1 within the extent; `label`; and `share` float32 [B], the number of images
        divided by that of boxes in the whole batch, which weighs the sums of losses of each image:
        so parts of a batch are as good as the whole.
    """
    augment = split_augment(config.data.augment)
    images, extent, label = batch["image"], batch["extent"], batch["label"]
    if augment.pixels:
        keys = device.example_keys(seed, batch["epoch"], batch["index"])
        fill = tuple(round(255 * x) for x in config.data.mean)
        images = device.apply(images, keys, augment.pixels, fill)
    images = device.normalise(images, config.data.mean, config.data.std, extent)
    share = jnp.full(len(label), len(label) / jnp.maximum((label >= 0).sum(), 1), jnp.float32)
    boxes = scaled_boxes(batch["boxes"], extent)
    return {"image": images, "extent": extent, "boxes": boxes, "label": label, "share": share}


def loss(
    model: nnx.Module, batch: Batch, config: Config, *, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The training loss of the model's head, and the share of boxes that are found.

    Args:
        model: with a head of detection.
        batch: from `prepare_batch`.
        config: of the run; not used.
        key: of this step.
    """
    targets = Targets(batch["boxes"], batch["label"])
    given = {"extent": batch["extent"], "targets": targets}
    found = model.predict(batch["image"], **given, train=True, key=key)
    return model.head.loss(found, batch)


def count(outputs: Any, batch: Batch, images: Images | Streamed) -> dict[str, Array]:
    """The detections of an evaluation batch, in pixels of the images as they are stored.

    Args:
        outputs: `Detections` of the batch.
        batch: with `extent`, `original`, `index` and `mask`.
        images: the set; its classes are those of the model.

    Returns:
        `boxes` [B, D, 4], corners x1, y1, x2, y2 within the image; `scores`, `classes` [B, D];
        `index` and `mask` [B].
    """
    ends = batch["original"][:, None, ::-1].astype(jnp.float32)  # width, height
    corners = outputs.boxes.reshape(*outputs.boxes.shape[:2], 2, 2)
    corners = corners * (ends / batch["extent"][:, None, ::-1])[:, :, None]
    boxes = jnp.clip(corners, 0, ends[:, :, None]).reshape(outputs.boxes.shape)
    own = {"boxes": boxes, "scores": outputs.scores, "classes": outputs.classes}
    return own | {"index": batch["index"], "mask": batch["mask"]}


def found_in(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[int, Found]:
    """The detections of each image, by its number: those of `count` that have an area.

    Args:
        parts: from `count`, of the batches of a set.
    """
    found = {}
    for part in parts:
        for row in np.flatnonzero(part["mask"]):
            boxes = part["boxes"][row]
            there = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
            one = (boxes, part["scores"][row], part["classes"][row])
            found[int(part["index"][row])] = Found(*(values[there] for values in one))
    return found


def scores(
    parts: Sequence[Mapping[str, np.ndarray]], images: Images | Streamed
) -> Mapping[str, Any]:
    """Average precision of a set, see `rope_jax.tasks.average_precision`, and `count` of images.

    Args:
        parts: from `count`, of the batches of the set.
        images: the set, whose objects are those that are annotated, crowds included.
    """
    found = found_in(parts)
    truths = [images.truth(index) for index in found]
    own = average_precision(list(found.values()), truths, images.classes)
    return {**own, "count": len(found)}
