"""Images with boxes: annotations of a split in flat arrays, and the two kinds of such sets."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64, UInt8

from rope_jax.data.images.augment import Augmentation, parse_crop
from rope_jax.data.images.decode import decode_image
from rope_jax.data.images.fits import (
    Placing,
    clip_boxes,
    place_boxes,
    place_masks,
    place_pixels,
)
from rope_jax.data.images.masks import Mask, decode_masks
from rope_jax.data.sources.index import Streamed
from rope_jax.data.sources.memory import Images

_OUTSIDE = 1e-6  # pixels by which rounding may move the sides of a box


class Truth(NamedTuple):
    """The annotated objects of an image, in pixels of the stored image.

    Attributes:
        boxes: x1 y1 x2 y2, not clipped.
        labels: class of each.
        crowd: True for a crowd of objects, which is neither trained on nor counted as missed.
        area: of the object, not of its box.
        masks: see `rope_jax.data.images.masks`; None where they are not known.
    """

    boxes: Float64[np.ndarray, "n 4"]
    labels: Int32[np.ndarray, " n"]
    crowd: Bool[np.ndarray, " n"]
    area: Float64[np.ndarray, " n"]
    masks: list[Mask] | None = None


@dataclass(frozen=True, eq=False)
class Annotations:
    """The objects of all images of a split.

    Attributes:
        sizes: rows and columns of each stored image.
        ends: the end of each image's objects in `boxes`, `labels`, `crowd` and `area`, which hold
            the objects of all images one after the other: see `Truth`.
    """

    sizes: Int32[np.ndarray, "n 2"]
    ends: Int64[np.ndarray, " n"]
    boxes: Float64[np.ndarray, "m 4"]
    labels: Int32[np.ndarray, " m"]
    crowd: Bool[np.ndarray, " m"]
    area: Float64[np.ndarray, " m"]
    labels_of: ClassVar[str] = "boxes"
    unusable: ClassVar[str] = "have no area inside their image"

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def checksum(self) -> int:
        """A checksum of all arrays."""
        return functools.reduce(
            lambda sum, array: zlib.crc32(np.ascontiguousarray(array), sum),
            self.arrays().values(),
            0,
        )

    def check_size(self, example: int, size: tuple[int, int]) -> None:
        """Raises ValueError if an image has other (rows, columns) than annotated."""
        rows, columns = self.sizes[example].tolist()
        if size != (rows, columns):
            raise ValueError(
                f"it has {size[0]}x{size[1]} pixels, but is annotated as one of {rows}x{columns}"
            )

    def objects(self, example: int) -> slice:
        """The places of the objects of one image."""
        return slice(self.ends[example - 1] if example else 0, self.ends[example])

    def truth(self, example: int) -> Truth:
        """The objects of one image."""
        objects = self.objects(example)
        arrays = (self.boxes, self.labels, self.crowd, self.area)
        return Truth(*(np.array(array[objects]) for array in arrays))

    @functools.cached_property
    def images(self) -> Int64[np.ndarray, " m"]:
        """The image of each object."""
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))

    @functools.cached_property
    def outside(self) -> Bool[np.ndarray, " m"]:
        """Mask of the boxes that reach beyond their image."""
        limits = self.sizes[self.images, ::-1] + _OUTSIDE
        low, high = self.boxes.min(axis=1, initial=0), self.boxes[:, 2:]
        return (low < -_OUTSIDE) | (high > limits).any(axis=1)

    @functools.cached_property
    def empty(self) -> Bool[np.ndarray, " m"]:
        """Mask of the boxes that are not trained on: those that are `unusable`."""
        limits = np.tile(self.sizes[self.images, ::-1], 2)
        _, kept = clip_boxes(np.clip(self.boxes, 0, limits), (2**31, 2**31))
        return ~kept

    def counts(self) -> Int64[np.ndarray, " n"]:
        """The number of objects of each image that are trained on."""
        trained = ~self.crowd & ~self.empty
        return np.bincount(self.images[trained], minlength=len(self.ends))

    def remarks(self) -> list[str]:
        """Notes on boxes that reach beyond their images or are unusable, and their treatment."""
        empty, beyond = int(self.empty.sum()), int((self.outside & ~self.empty).sum())
        notes = []
        if beyond:
            notes.append(f"{beyond} of {len(self.boxes)} boxes reach beyond their image: clipped")
        if empty:
            notes.append(
                f"{empty} of {len(self.boxes)} boxes {self.unusable}: left out of training"
            )
        return notes


@dataclass(frozen=True, eq=False)
class MaskAnnotations(Annotations):
    """The objects of all images of a split with their masks.

    Objects without area, or with a side of less than a pixel, are not trained on (mmdetection).

    Attributes:
        codes: `counts` of all masks, one after the other.
        code_ends: the end of each.
    """

    codes: UInt8[np.ndarray, " b"]
    code_ends: Int64[np.ndarray, " m"]
    labels_of: ClassVar[str] = "masks"
    unusable: ClassVar[str] = (
        "have no area inside their image, a side of less than a pixel, or an object without area"
    )

    @functools.cached_property
    def empty(self) -> Bool[np.ndarray, " m"]:
        narrow = (self.boxes[:, 2:] - self.boxes[:, :2] < 1 - _OUTSIDE).any(axis=1)
        return super().empty | narrow | (self.area <= 0)

    def truth(self, example: int) -> Truth:
        size, masks = self.sizes[example].tolist(), []
        for number in range(*self.objects(example).indices(len(self.code_ends))):
            code = slice(self.code_ends[number - 1] if number else 0, self.code_ends[number])
            masks.append({"size": size, "counts": self.codes[code].tobytes()})
        return super().truth(example)._replace(masks=masks)


def add_masks(annotations: Annotations, codes: Sequence[bytes]) -> MaskAnnotations:
    """Annotations with the `counts` of the masks of their objects."""
    ends = np.cumsum([len(code) for code in codes], dtype=np.int64)
    joined = np.frombuffer(b"".join(codes), np.uint8)
    return MaskAnnotations(**annotations.arrays(), codes=joined, code_ends=ends)


class Boxed:
    """Common parts of sets of images with boxes, in memory or not.

    Their `labels`, one for each image, are 0: those of objects are in `annotations`. Each kind has
    `pixels(example)`, a stored image, uint8 [h, w, 3].
    """

    annotations: Annotations

    @property
    def labels_of(self) -> str:
        """The kind of labels, "boxes" or "masks"."""
        return self.annotations.labels_of

    def placing(self, example: int, crop: Augmentation | None, draw: int) -> Placing:
        """The placing of an image by a crop; without a crop, the image unchanged."""
        size = tuple(self.annotations.sizes[example].tolist())
        return crop(size, draw) if crop else Placing(size, (0, 0), size, size, (0, 0), size)

    def extents(
        self, examples: Int[np.ndarray, " b"], crop: Augmentation | None, draws: np.ndarray
    ) -> Int64[np.ndarray, "b 2"]:
        """Rows and columns of images after a crop; no image is read."""
        pairs = zip(examples.tolist(), draws.tolist(), strict=True)
        return np.array([self.placing(k, crop, draw).extent for k, draw in pairs]).reshape(-1, 2)

    def truth(self, example: int) -> Truth:
        """The annotated objects of an image.

        >>> from rope_jax import data
        >>> truth = data.load("scenes", image_size=32, labels_of="boxes").truth(0)
        >>> truth.boxes.shape == (len(truth.labels), 4), truth.crowd.any()
        (True, np.False_)
        """
        return self.annotations.truth(example)

    def example(
        self,
        example: int,
        crop: Augmentation | None = None,
        draw: int = 0,
        *,
        with_masks: bool = True,
    ) -> dict[str, np.ndarray]:
        """An image and the objects to train on: without crowds and objects with no area left.

        Args:
            example: number of the image.
            crop: a crop for boxes; None for the set's own.
            draw: 64 random bits.
            with_masks: whether to decode masks, if they are known.

        Returns:
            `image` uint8 [h, w, 3], of any size; `boxes` float32 [n, 4], x1 y1 x2 y2 in its pixels;
            `label` int32 [n]; `original` int32 [2], rows and columns of the stored image; and
            `masks` uint8 [n, h, w], 1 for the pixels of each object, if they are decoded.

        Raises:
            BadImages: the image cannot be used; the message names it.
        """
        placing, truth = self.placing(example, crop, draw), self.truth(example)
        size = tuple(self.annotations.sizes[example].tolist())
        trained = ~truth.crowd & ~self.annotations.empty[self.annotations.objects(example)]
        inside, _ = clip_boxes(truth.boxes[trained], size)
        boxes, kept = place_boxes(inside, size, placing)
        chosen = np.flatnonzero(trained)[kept]
        row = {
            "image": place_pixels(self.pixels(example), placing),
            "boxes": boxes.astype(np.float32),
            "label": truth.labels[chosen],
            "original": np.array(size, np.int32),
        }
        if with_masks and truth.masks is not None:
            masks = decode_masks([truth.masks[k] for k in chosen], size)
            row["masks"] = place_masks(masks, placing)
        return row


@dataclass(frozen=True, eq=False)
class BoxImages(Boxed, Images):
    """One split of a set in memory with boxes; all images have one size.

    Attributes:
        class_names: in their order, where known.
        annotations: of the images.
    """

    class_names: tuple[str, ...] | None = None
    annotations: Annotations | None = None
    protocol: ClassVar[str] = "whole image, at the size at which it was made"

    def pixels(self, example: int) -> UInt8[np.ndarray, "h w 3"]:
        return self.images[example]

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}, boxes {self.annotations.checksum():08x}"


@dataclass(frozen=True, eq=False)
class StreamedBoxes(Boxed, Streamed):
    """One split of a set of images with boxes, read when needed.

    Images keep their aspect: `crop` is `fit`. `size` is the size for which a model is created;
    batches have the sizes of canvases, see `rope_jax.data.batches`.
    """

    one_size: ClassVar[bool] = False

    @property
    def annotations(self) -> Annotations:
        """The annotations of the images."""
        return self.source.annotations

    def placing(self, example: int, crop: Augmentation | None, draw: int) -> Placing:
        return super().placing(example, crop or parse_crop(self.crop), draw)

    def pixels(self, example: int) -> UInt8[np.ndarray, "h w 3"]:
        with self.naming(example):
            image = decode_image(self.source.read(example))
            self.annotations.check_size(example, image.shape[:2])
            return image


def check_boxes(images: Images | Streamed, max_boxes: int) -> None:
    """Rejects images with more objects than the batches have room for.

    Args:
        images: of any kind.
        max_boxes: rows of objects in a batch.

    Raises:
        ValueError: an image has more objects to train on.
    """
    if not images.labels_kind.ragged:
        return
    counts = images.annotations.counts()
    if counts.max(initial=0) > max_boxes:
        raise ValueError(
            f"an image of {images.name}, {images.split} split, has {counts.max()} objects "
            f"({(counts > max_boxes).sum()} of {len(counts)} images have more than {max_boxes}), "
            f"but batches have room for max_boxes={max_boxes}: set it to {counts.max()} or more"
        )


def check_objects(images: Images | Streamed) -> None:
    """Rejects images with boxes to evaluate on, where there is nothing to find.

    Args:
        images: of any kind.

    Raises:
        ValueError: all objects are crowds.
    """
    if images.labels_kind.ragged and images.annotations.crowd.all():
        raise ValueError(
            f"no image of {images.name}, {images.split} split, has an object that is not a crowd, "
            "for which average precision could be computed: use other images"
        )
