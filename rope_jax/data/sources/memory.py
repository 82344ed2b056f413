"""Image sets in memory: scikit-learn's digits, .npz files, idx files (MNIST, Fashion-MNIST)."""

import gzip
import math
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int32, UInt8

from rope_jax.data.images.crops import Crop, crop_pixels
from rope_jax.data.labels import Labels, find_labels
from rope_jax.system.files import open_regular
from rope_jax.system.npz import open_npz

# A head has a column for each class up to the largest label, which one damaged byte may set.
MAX_CLASSES = 100_000
# Exceptions for damaged files: of gzip, and of a header that declares more than memory has.
_UNREADABLE = (ValueError, OSError, EOFError, MemoryError, OverflowError, zlib.error)


@dataclass(frozen=True, eq=False)
class Images:
    """One split of an image set in memory.

    >>> images = Images(np.zeros((2, 8, 8, 3), np.uint8), np.int32([0, 1]), "mine", "train", 2)
    >>> images.size, images.in_memory
    ((8, 8), True)

    Attributes:
        images: uint8 [n, H, W, 3].
        labels: int32 [n], 0 to classes - 1.
        name: name of the set, for reports.
        split: "train" or "test".
        classes: number of classes of the set.
        stored: the images before they were resized, uint8 [n, h, w, 3], from which crops are cut;
            None if they are of that size.

    Raises:
        ValueError: if an array has another dtype or shape, the numbers of images and labels differ
            or are 0, or a label is too large.
    """

    images: np.ndarray
    labels: np.ndarray
    name: str
    split: str
    classes: int
    stored: np.ndarray | None = field(default=None, kw_only=True)
    in_memory: ClassVar[bool] = True
    labels_of: ClassVar[str] = "images"  # or "pixels", "boxes", "masks"
    one_size: ClassVar[bool] = True  # all examples have the same size
    class_names: ClassVar[None] = None
    competing: ClassVar[None] = None
    note: ClassVar[str] = ""
    protocol: ClassVar[str] = (
        "whole image, resized where it is stored at another size (bicubic with antialiasing)"
    )

    def __post_init__(self):
        images, labels = self.images, self.labels
        wrong_shape = images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape[1:]
        if images.dtype != np.uint8 or wrong_shape:
            raise ValueError(
                f"{self.name}: images are {images.dtype} {list(images.shape)}; they must be uint8 "
                "[n, H, W, 3], of at least one pixel"
            )
        if len(images) != len(labels) or not len(labels):
            raise ValueError(
                f"{self.name}: {len(images)} images and {len(labels)} labels; "
                "there must be as many labels as images, and at least one"
            )
        self.check_labels()

    def check_labels(self) -> None:
        """Raises ValueError for labels of another dtype, shape or range."""
        labels = self.labels
        if labels.dtype != np.int32 or labels.ndim != 1:
            raise ValueError(
                f"{self.name}: labels are {labels.dtype} {list(labels.shape)}; they must be int32 "
                "[n]"
            )
        if labels.min() < 0 or labels.max() >= self.classes:
            raise ValueError(
                f"{self.name}: labels are {labels.min()} to {labels.max()}; "
                f"allowed are 0 to {self.classes - 1}"
            )

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the images."""
        return self.images.shape[1:3]

    @property
    def to_crop(self) -> UInt8[np.ndarray, "n h w 3"]:
        """The images as they are stored."""
        return self.images if self.stored is None else self.stored

    def example(
        self, example: int, crop: Crop | None = None, draw: int = 0
    ) -> dict[str, np.ndarray]:
        """An image with its labels: `image` uint8 [H, W, 3] of `size`, and `label`.

        Args:
            example: index of the image.
            crop: the crop to take of the image as it is stored; None for the whole image.
            draw: random bits of the crop.
        """
        image = self.images[example]
        if crop is not None:
            image = crop_pixels(self.to_crop[example], crop, self.size, draw)
        return {"image": image, "label": self.labels[example]}

    @property
    def labels_kind(self) -> Labels:
        """The kind of the labels."""
        return find_labels(self.labels_of)

    def fingerprint(self) -> str:
        """Shape of the images, number of classes, and a checksum of pixels and labels."""
        pixels = zlib.crc32(np.ascontiguousarray(self.images))
        checksum = zlib.crc32(self.labels.tobytes(), pixels)
        shape = "x".join(map(str, self.images.shape))
        return f"{shape} {self.classes} classes {checksum:08x}"


def load_digits(split: str) -> tuple[Float[np.ndarray, "n 8 8"], Int32[np.ndarray, " n"]]:
    """Scikit-learn's digits, values 0 to 16, and their labels; every fifth is a test image."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'rope_jax[demo]', or use images of another source"
        ) from None
    stored = datasets.load_digits()
    in_split = (np.arange(len(stored.target)) % 5 == 0) == (split == "test")
    return stored.images[in_split], stored.target[in_split].astype(np.int32)


def _digits(path: None, split: str) -> Images:
    ink, labels = load_digits(split)
    images = np.rint(ink * (255 / 16)).astype(np.uint8)
    return Images(_as_rgb(images), labels, "digits", split, classes=10)


def _npz(path: str, split: str) -> Images:
    with open_npz(path) as file:
        return _from_arrays(file.shapes, file.read, path, split)


def _idx(path: str, split: str) -> Images:
    places = {}
    for half, stem in (("train", "train"), ("test", "t10k")):
        for kind, dimensions in (("images", 3), ("labels", 1)):
            file = Path(path, f"{stem}-{kind}-idx{dimensions}-ubyte")
            for place in (file, file.with_name(f"{file.name}.gz")):
                if place.exists():
                    places.setdefault(f"{half}_{kind}", (place, dimensions))
    return _from_arrays(places, lambda name: _read_idx(*places[name]), path, split)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The bytes in an idx file, which is decompressed if its name ends in .gz."""
    try:
        with open_regular(path) as file:
            file = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            magic, *shape = np.frombuffer(file.read(4 + 4 * dimensions), ">u4").tolist()
            if magic != 0x800 + dimensions:
                raise ValueError(f"its header is not that of bytes in {dimensions} dimensions")
            # Reads at most one excess byte, however well the content is compressed.
            content = np.frombuffer(file.read(math.prod(shape) + 1), np.uint8)
            return content.reshape(shape)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a valid idx file: {error}") from error


def _from_arrays(
    names: Collection[str], read: Callable[[str], np.ndarray], path: str, split: str
) -> Images:
    """Creates a split from the arrays `<split>_images` and `<split>_labels`.

    Args:
        names: of the arrays of all splits.
        read: reads one of them.
        path: for the name of the set and for errors.
        split: "train" or "test".
    """
    for kind in ("images", "labels"):
        if f"{split}_{kind}" not in names:
            raise FileNotFoundError(
                f"{path} has no {split} {kind}: the {split} split needs images and labels"
            )
    labels = _read_labels(read, split, path)
    reference = "train" if "train_labels" in names else split
    classes = int(_read_labels(read, reference, path).max(initial=-1)) + 1
    images = _as_rgb(read(f"{split}_images"))
    return Images(images, labels, Path(path).stem, split, classes)


def _read_labels(read: Callable[[str], np.ndarray], split: str, path: str) -> np.ndarray:
    labels = read(f"{split}_labels")
    allowed = f"they must be integers from 0 to {MAX_CLASSES - 1}"
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels are {labels.dtype}; {allowed}")
    least, most = labels.min(initial=0), labels.max(initial=0)
    if most >= MAX_CLASSES or least <= -MAX_CLASSES:  # others are checked with the images
        raise ValueError(f"{path}: labels are at least {least} and at most {most}; {allowed}")
    return labels.astype(np.int32)


def _as_rgb(images: np.ndarray) -> np.ndarray:
    """Converts grey images, [n, H, W] or [n, H, W, 1], to three colours; returns others as is."""
    grey = images[..., None] if images.ndim == 3 else images
    return np.repeat(grey, 3, axis=3) if grey.shape[3:] == (1,) else grey


MEMORY: dict[str, Callable[..., Images]] = {"digits": _digits, "npz": _npz, "idx": _idx}
