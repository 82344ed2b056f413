"""Labels: a class of each image, classes of its pixels, or boxes with classes, perhaps with masks.

Each kind is one object, which defines the effect of augmentations and batches on its labels. The
names of the kinds, "images", "pixels", "boxes" and "masks", are values of the parameter
`labels_of`. Each has

- `words`: what the labels are, for errors;
- `placed`: True if labels have places in the image, and move with its pixels;
- `ragged`: True if images differ in their number of labels, so that each is padded separately;
- `move(batch, augmentation, draws)`: the labels after an augmentation that keeps the size;
- `pad(row, canvas, max_boxes)`: the labels of a batch of one, padded to a size: classes of pixels
  with 255, boxes with rows of 0 whose class is -1;
- `blank(labels, size)`: the labels of a black image, which replaces an unusable one.
"""

import numpy as np
from jaxtyping import UInt64

from rope_jax.data.images.augment import Augmentation
from rope_jax.data.images.joint import IGNORED
from rope_jax.data.workers import Batch

Size = tuple[int, int]
Draws = UInt64[np.ndarray, " B"]


class ClassLabels:
    """`label` int32 [B], or [B, M] where up to M classes are correct: of whole images."""

    labels_of, words = "images", "classes of images"
    placed = ragged = False

    def move(self, batch: Batch, augmentation: Augmentation, draws: Draws) -> Batch:
        return {}

    def blank(self, labels: np.ndarray, size: Size) -> Batch:
        return {"label": np.zeros_like(labels[0])}


class PixelLabels:
    """`label` uint8 [B, H, W]: the class of each pixel, 255 for none."""

    labels_of, words = "pixels", "classes of pixels"
    placed, ragged = True, False

    def move(self, batch: Batch, augmentation: Augmentation, draws: Draws) -> Batch:
        return {"label": augmentation.move_labels(augmentation, batch["label"], draws)}

    def pad(self, row: Batch, canvas: Size, max_boxes: int) -> Batch:
        around = [(0, n - m) for n, m in zip(canvas, row["label"].shape[1:], strict=True)]
        return {"label": np.pad(row["label"], [(0, 0), *around], constant_values=IGNORED)}

    def blank(self, labels: np.ndarray, size: Size) -> Batch:
        return {"label": np.zeros(size, np.uint8)}


class BoxLabels:
    """`boxes` float32 [B, M, 4], x1 y1 x2 y2 in pixels, and `label` int32 [B, M], -1 for none."""

    labels_of, words = "boxes", "boxes with classes"
    placed = ragged = True

    def move(self, batch: Batch, augmentation: Augmentation, draws: Draws) -> Batch:
        return {"boxes": augmentation.move_boxes(batch["boxes"], batch["image"].shape[2], draws)}

    def pad(self, row: Batch, canvas: Size, max_boxes: int) -> Batch:
        boxes = np.zeros((1, max_boxes, 4), np.float32)
        label = np.full((1, max_boxes), -1, np.int32)
        count = row["label"].shape[1]
        boxes[:, :count], label[:, :count] = row["boxes"], row["label"]
        return {"boxes": boxes, "label": label}

    def blank(self, labels: np.ndarray, size: Size) -> Batch:
        return {
            "boxes": np.zeros((0, 4), np.float32),
            "label": np.zeros(0, np.int32),
            "original": np.array(size, np.int32),
        }


class MaskLabels(BoxLabels):
    """Boxes, classes and `masks` uint8 [B, M, H, W / 8]: pixels of each, eight to a byte.

    Before they are padded they are uint8 [1, n, h, w]. Batches of an evaluation have none.
    """

    labels_of, words = "masks", "boxes with classes and masks"

    def move(self, batch: Batch, augmentation: Augmentation, draws: Draws) -> Batch:
        (masks,) = batch["masks"]
        moved = augmentation.move_labels(augmentation, masks, draws.repeat(len(masks)))
        return super().move(batch, augmentation, draws) | {"masks": moved[None]}

    def pad(self, row: Batch, canvas: Size, max_boxes: int) -> Batch:
        padded = super().pad(row, canvas, max_boxes)
        if "masks" in row:
            packed = np.packbits(row["masks"], axis=-1)
            _, count, height, bytes = packed.shape
            masks = np.zeros((1, max_boxes, canvas[0], -(-canvas[1] // 8)), np.uint8)
            masks[:, :count, :height, :bytes] = packed
            padded["masks"] = masks
        return padded


Labels = ClassLabels | PixelLabels | BoxLabels
_KINDS: dict[str, Labels] = {
    kind.labels_of: kind for kind in (ClassLabels(), PixelLabels(), BoxLabels(), MaskLabels())
}


def find_labels(labels_of: str) -> Labels:
    """The kind of labels of "images", "pixels", "boxes" or "masks".

    >>> find_labels("pixels").placed, find_labels("pixels").ragged
    (True, False)
    """
    return _KINDS[labels_of]
