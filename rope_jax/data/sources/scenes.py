"""Scenes: handwritten digits on coloured grounds, for dense prediction without a download.

Scene i of a split is a function of (split, i, height, width). A digit has the same size in
pixels on images of all sizes, and larger images have more of them. The digits of test scenes are in
no training scene. About nine tenths of the pixels are background.
"""

import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int32, UInt8
from PIL import Image

from rope_jax.data.images.augment import Augmentation
from rope_jax.data.images.joint import crop_both
from rope_jax.data.images.masks import encode_mask
from rope_jax.data.sources.boxes import Annotations, BoxImages, add_masks
from rope_jax.data.sources.memory import Images, load_digits

COUNTS = {"train": 2000, "test": 200}  # scenes of a split
CLASS_NAMES = ("background", *map(str, range(10)))
_SIDES = (12, 24)  # of digits, in pixels
_NUMBER = (2, 6)  # of digits on 64 x 64 pixels
_HIDDEN = 0.3  # largest fraction of a digit that later ones may hide
_TRIES = 20  # places for a digit, which is left out if all of them hide too much


@dataclass(frozen=True, eq=False)
class LabelMaps(Images):
    """One split of a set in memory with a class for every pixel.

    Attributes:
        labels: uint8 [n, H, W], 0 to classes - 1, or 255 for pixels without a class.
        class_names: in their order, where known.
    """

    class_names: tuple[str, ...] | None = None
    protocol: ClassVar[str] = "whole image, at the size at which it was made"
    labels_of: ClassVar[str] = "pixels"

    def example(
        self, example: int, crop: Augmentation | None = None, draw: int = 0
    ) -> dict[str, np.ndarray]:
        image, classes = self.images[example], self.labels[example]
        if crop is not None:
            image, classes = crop_both(image, classes, crop, self.size, draw)
        return {"image": image, "label": classes}

    def original(self, example: int) -> tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w"]]:
        """An image and the classes of its pixels; 255 for none."""
        return self.images[example], self.labels[example]

    def check_labels(self) -> None:
        """Raises ValueError for labels of another dtype, size or range."""
        if self.labels.dtype != np.uint8 or self.labels.shape != self.images.shape[:3]:
            raise ValueError(
                f"{self.name}: labels are {self.labels.dtype} {list(self.labels.shape)}; they must "
                f"be uint8 {list(self.images.shape[:3])}, as large as their images"
            )
        largest = self.labels[self.labels < 255].max(initial=0)
        if largest >= self.classes:
            raise ValueError(
                f"{self.name}: a pixel has label {largest}; allowed are 0 to {self.classes - 1}, "
                "and 255 for no class"
            )


@dataclass(frozen=True, eq=False)
class Scene:
    """One scene.

    Attributes:
        image: uint8 [H, W, 3].
        digits: int32 [m], 0 to 9, in the order in which they were drawn.
        masks: bool [m, H, W], the visible pixels of each.
    """

    image: UInt8[np.ndarray, "H W 3"]
    digits: Int32[np.ndarray, " m"]
    masks: Bool[np.ndarray, "m H W"]

    @property
    def labels(self) -> UInt8[np.ndarray, "H W"]:
        """The class of every pixel: 0 for the background, 1 + digit."""
        classes = (1 + self.digits)[:, None, None] * self.masks
        return classes.sum(axis=0).astype(np.uint8)


@functools.lru_cache(maxsize=4)
def load_scenes(
    split: str, size: tuple[int, int], labels_of: str = "pixels"
) -> LabelMaps | BoxImages:
    """The scenes of a split as a set in memory.

    Args:
        split: "train" or "test".
        size: (height, width) in pixels.
        labels_of: "boxes" around the visible part of each digit, whose classes are the digits, or
            "masks" of these parts, too; otherwise classes of pixels.
    """
    scenes = [draw_scene(split, index, size) for index in range(COUNTS[split])]
    images = np.stack([scene.image for scene in scenes])
    if labels_of not in ("boxes", "masks"):
        labels = np.stack([scene.labels for scene in scenes])
        return LabelMaps(images, labels, "scenes", split, len(CLASS_NAMES), CLASS_NAMES)
    masks = [mask for scene in scenes for mask in scene.masks]
    annotations = Annotations(
        sizes=np.full((len(scenes), 2), size, np.int32),
        ends=np.cumsum([len(scene.digits) for scene in scenes]),
        boxes=np.array([mask_box(mask) for mask in masks], np.float64).reshape(-1, 4),
        labels=np.concatenate([scene.digits for scene in scenes]),
        crowd=np.zeros(len(masks), bool),
        area=np.array([mask.sum() for mask in masks], np.float64),
    )
    if labels_of == "masks":
        annotations = add_masks(annotations, [encode_mask(mask)["counts"] for mask in masks])
    none = np.zeros(len(scenes), np.int32)
    return BoxImages(images, none, "scenes", split, 10, CLASS_NAMES[1:], annotations)


def mask_box(mask: Bool[np.ndarray, "H W"]) -> tuple[int, int, int, int]:
    """The smallest box around a mask that is not empty, in pixels: x1, y1, x2, y2.

    >>> mask_box(np.eye(4, 6, 2, dtype=bool))
    (2, 0, 6, 4)
    """
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def draw_scene(split: str, index: int, size: tuple[int, int]) -> Scene:
    """Draws one scene.

    >>> scene = draw_scene("train", 0, (48, 64))
    >>> scene.image.shape, scene.masks.shape == (len(scene.digits), 48, 64)
    ((48, 64, 3), True)

    Args:
        split: "train" or "test".
        index: of the scene.
        size: (height, width) in pixels, at least 12.
    """
    if min(size) < _SIDES[0]:
        raise ValueError(f"scenes of {size[0]}x{size[1]} pixels have no room for digits of 12")
    height, width = size
    stream = f"scene {split} {height}x{width}"
    counter = np.array([0, 0, 0, zlib.crc32(stream.encode())], np.uint64)
    bits = np.random.Philox(key=np.array([0, index], np.uint64), counter=counter)
    numbers = _uniform(bits)
    ground = np.array([60 + 140 * next(numbers) for _ in range(3)])
    slopes = [120 * next(numbers) - 60 for _ in range(2)]
    rows, columns = (np.linspace(-0.5, 0.5, n) for n in size)
    ramp = slopes[0] * rows[:, None] + slopes[1] * columns
    image = ground + ramp[..., None] + 6 * _normal(bits, (height, width, 3))
    inks, labels = _digits(split)
    digits, masks = [], np.zeros((0, height, width), bool)
    areas, visible = np.zeros((2, 0), int)
    low, high = _NUMBER
    count = (low + int((high - low + 1) * next(numbers))) * height * width / 64**2
    for _ in range(max(1, round(count))):
        number = int(next(numbers) * len(labels))
        side = _SIDES[0] + int(next(numbers) * (min(_SIDES[1], *size) - _SIDES[0] + 1))
        ink = _resize(inks[number], side)
        colour = np.array([255 * next(numbers) for _ in range(3)])
        channel = int(3 * next(numbers))
        offset = 70 if ground[channel] < 128 else -70
        colour[channel] = ground[channel] + offset
        for _ in range(_TRIES):
            top, left = (int(next(numbers) * (n - side + 1)) for n in size)
            box = (slice(top, top + side), slice(left, left + side))
            hidden = (masks[:, *box] & (ink > 0.5)).sum(axis=(1, 2))
            if (visible - hidden >= (1 - _HIDDEN) * areas).all():
                image[box] += ink[..., None] * (colour - image[box])
                mask = np.zeros(size, bool)
                mask[box] = ink > 0.5
                masks = np.concatenate([masks & ~mask, mask[None]])
                digits.append(labels[number])
                areas = np.append(areas, mask.sum())
                visible = np.append(visible - hidden, mask.sum())
                break
    pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return Scene(pixels, np.array(digits, np.int32), masks)


@functools.cache
def _digits(split: str) -> tuple[Float[np.ndarray, "n 8 8"], Int32[np.ndarray, " n"]]:
    """Ink, 0 to 1, and labels of the digits of a split."""
    ink, labels = load_digits(split)
    return ink / 16, labels


def _resize(ink: Float[np.ndarray, "8 8"], side: int) -> Float[np.ndarray, "s s"]:
    picture = Image.fromarray(ink.astype(np.float32))
    return np.clip(np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC)), 0, 1)


def _uniform(bits: np.random.Philox) -> Iterator[float]:
    """Numbers in [0, 1) of raw bits, which do not change between versions of NumPy."""
    while True:
        yield (int(bits.random_raw()) >> 11) * 2.0**-53


def _normal(bits: np.random.Philox, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers (Box and Muller)."""
    raw = bits.random_raw(2 * math.prod(shape)).reshape(2, *shape)
    radius, angle = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * math.pi * angle)
