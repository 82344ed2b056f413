"""What is done to the labels of a batch, by what they are of: images, pixels or boxes."""

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt64

from rope_jax.data.images.augment import Augmentation
from rope_jax.data.images.joint import padded as padded_maps
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.workers import Batch

Size = tuple[int, int]


def moved(
    batch: Batch, labels_of: str, augmentation: Augmentation, draws: UInt64[np.ndarray, " B"]
) -> Batch:
    """A batch of images of one size after an augmentation that keeps it."""
    image = augmentation(batch["image"], draws)
    return batch | {"image": image} | _MOVED[labels_of](batch, augmentation, draws)


def _moved_boxes(batch: Batch, augmentation: Augmentation, draws: np.ndarray) -> Batch:
    return {"boxes": augmentation.moved_boxes(batch["boxes"], batch["image"].shape[2], draws)}


_MOVED: dict[str, Callable[..., Batch]] = {
    "images": lambda batch, augmentation, draws: {},
    "pixels": lambda batch, augmentation, draws: {
        "label": augmentation.moved_labels(augmentation, batch["label"], draws)
    },
    "boxes": _moved_boxes,
}


def padded(row: Batch, labels_of: str, canvas: Size, max_boxes: int) -> Batch:
    """An example in a batch of its own, padded to a size, with its `extent` before.

    Images are padded at the bottom and on the right with 0, classes of pixels with 255, boxes with
    rows of 0 whose class is -1.
    """
    extent = np.array([row["image"].shape[1:3]], np.int32)
    return row | _PADDED[labels_of](row, canvas, max_boxes) | {"extent": extent}


def _padded_pixels(row: Batch, canvas: Size, max_boxes: int) -> Batch:
    image, label = padded_maps(row["image"], row["label"], canvas)
    return {"image": image, "label": label}


def _padded_boxes(row: Batch, canvas: Size, max_boxes: int) -> Batch:
    height, width = row["image"].shape[1:3]
    image = np.zeros((1, *canvas, 3), np.uint8)
    image[:, :height, :width] = row["image"]
    boxes, label = np.zeros((1, max_boxes, 4), np.float32), np.full((1, max_boxes), -1, np.int32)
    count = row["label"].shape[1]
    boxes[:, :count], label[:, :count] = row["boxes"], row["label"]
    return {"image": image, "boxes": boxes, "label": label}


_PADDED: dict[str, Callable[..., Batch]] = {"pixels": _padded_pixels, "boxes": _padded_boxes}


def blank(images: Images | Streamed, size: Size) -> Batch:
    """A black example, in the place of one that does not exist or cannot be used."""
    return {"image": np.zeros((*size, 3), np.uint8)} | _BLANK[images.labels_of](images, size)


_BLANK: dict[str, Callable[..., Batch]] = {
    "images": lambda images, size: {"label": images.labels[0] * 0},
    "pixels": lambda images, size: {"label": np.zeros(size, np.uint8)},
    "boxes": lambda images, size: {
        "boxes": np.zeros((0, 4), np.float32),
        "label": np.zeros(0, np.int32),
        "original": np.array(size, np.int32),
    },
}
