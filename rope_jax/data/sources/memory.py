"""Image sets in memory: scikit-learn's digits, .npz files, idx files (MNIST, Fashion-MNIST)."""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from rope_jax.data.images.crops import Crop, crop_pixels

# Exceptions that NumPy and gzip raise for damaged files.
_UNREADABLE = (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


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

    Raises:
        ValueError: if an array has another dtype or shape, the numbers of images and labels differ
            or are 0, or a label is out of range.
    """

    images: np.ndarray
    labels: np.ndarray
    name: str
    split: str
    classes: int
    in_memory: ClassVar[bool] = True
    class_names: ClassVar[None] = None
    competing: ClassVar[None] = None
    note: ClassVar[str] = ""
    protocol: ClassVar[str] = (
        "whole image, resized where it is stored at another size (bicubic with antialiasing)"
    )

    def __post_init__(self):
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise ValueError(
                f"{self.name}: images are {_kind(self.images)}; they must be uint8 [n, H, W, 3]"
            )
        if self.labels.dtype != np.int32 or self.labels.ndim != 1:
            raise ValueError(
                f"{self.name}: labels are {_kind(self.labels)}; they must be int32 [n]"
            )
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise ValueError(
                f"{self.name}: {len(self.images)} images and {len(self.labels)} labels; "
                "there must be as many labels as images, and at least one"
            )
        if self.labels.min() < 0 or self.labels.max() >= self.classes:
            raise ValueError(
                f"{self.name}: labels are {self.labels.min()} to {self.labels.max()}; "
                f"allowed are 0 to {self.classes - 1}"
            )

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the images."""
        return self.images.shape[1:3]

    def read(
        self, example: int, crop: Crop | None = None, draw: int = 0
    ) -> UInt8[np.ndarray, "H W 3"]:
        """Returns an image, or a crop of it resized to the size of the image.

        Args:
            example: index of the image.
            crop: the crop to take; None for the whole image.
            draw: random bits of the crop.
        """
        image = self.images[example]
        return image if crop is None else crop_pixels(image, crop, self.size, draw)

    def fingerprint(self) -> str:
        """Shape of the images, number of classes, and a checksum of pixels and labels."""
        pixels = zlib.crc32(np.ascontiguousarray(self.images))
        checksum = zlib.crc32(self.labels.tobytes(), pixels)
        shape = "x".join(map(str, self.images.shape))
        return f"{shape} {self.classes} classes {checksum:08x}"


def _digits(path: None, split: str) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'rope_jax[demo]', or use images of another source"
        ) from None
    stored = load_digits()
    chosen = (np.arange(len(stored.target)) % 5 == 0) == (split == "test")
    images = np.rint(stored.images[chosen] * (255 / 16)).astype(np.uint8)
    labels = stored.target[chosen].astype(np.int32)
    return Images(_as_rgb(images, "digits"), labels, "digits", split, classes=10)


def _npz(path: str, split: str) -> Images:
    if not os.path.isfile(path):
        raise ValueError(f"{path} is a folder: pass the path of an .npz file")
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except _UNREADABLE as error:
            raise ValueError(f"{path} is not an .npz file: {error}") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(
                f"{path} holds a single array: "
                f"pass an .npz file with {split}_images and {split}_labels"
            )

        def read(name: str) -> np.ndarray | None:
            if name not in archive.files:
                return None
            try:
                array = archive[name]
            except _UNREADABLE as error:
                raise ValueError(f"array {name} of {path} cannot be read: {error}") from error
            if not isinstance(array, np.ndarray):  # NumPy returns bytes for members of other types
                raise ValueError(f"{name} of {path} is not an array")
            return array

        with archive:
            return _from_arrays(read, path, split)


def _idx(path: str, split: str) -> Images:
    def read(name: str) -> np.ndarray | None:
        half, kind = name.split("_")
        dimensions = 3 if kind == "images" else 1
        file = f"{'train' if half == 'train' else 't10k'}-{kind}-idx{dimensions}-ubyte"
        for candidate in (Path(path, file), Path(path, file + ".gz")):
            if candidate.exists():
                return _read_idx(candidate, dimensions)
        return None

    return _from_arrays(read, path, split)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads one idx file of bytes, compressed if its name ends in .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic, sides = file.read(4), file.read(4 * dimensions)
            if magic != bytes([0, 0, 8, dimensions]) or len(sides) != 4 * dimensions:
                raise ValueError(
                    f"its header starts with {magic.hex()}, "
                    f"not with 0000080{dimensions} (bytes in {dimensions} dimensions)"
                )
            shape = tuple(int(side) for side in np.frombuffer(sides, ">u4"))
            declared = math.prod(shape)
            # deflate compresses by at most 1032 to 1; checked before memory is allocated.
            if declared > 1032 * path.stat().st_size:
                raise ValueError(
                    f"its header declares {declared:,} bytes, "
                    "more than a file of this size can hold"
                )
            content = file.read(declared + 1)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a valid idx file: {error}") from error
    if len(content) != declared:
        there = f"{len(content):,}" if len(content) < declared else "more"
        raise ValueError(
            f"{path} is not a valid idx file: "
            f"its header declares {declared:,} bytes, and {there} follow"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _from_arrays(read: Callable[[str], np.ndarray | None], path: str, split: str) -> Images:
    """Creates a split from the arrays `<split>_images` and `<split>_labels`.

    Args:
        read: returns an array by name, or None if it does not exist.
        path: for the name of the set and for errors.
        split: "train" or "test".
    """
    images, labels = read(f"{split}_images"), read(f"{split}_labels")
    for array, kind in ((images, "images"), (labels, "labels")):
        if array is None:
            raise FileNotFoundError(
                f"{path} has no {split} {kind}: the {split} split needs images and labels"
            )
    labels = _as_labels(labels, path)
    reference = labels if split == "train" else read("train_labels")
    classes = int(_as_labels(labels if reference is None else reference, path).max(initial=-1)) + 1
    return Images(_as_rgb(images, path), labels, Path(path).stem, split, classes)


def _as_labels(labels: np.ndarray, path: str) -> np.ndarray:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels are {_kind(labels)}; they must be integers [n]")
    if len(labels) and not 0 <= labels.min() <= labels.max() < 2**31 - 1:
        raise ValueError(
            f"{path}: labels are {labels.min()} to {labels.max()}; allowed are 0 to 2**31 - 2"
        )
    return labels.astype(np.int32)


def _as_rgb(images: np.ndarray, path: str) -> np.ndarray:
    grey = images[..., None] if images.ndim == 3 else images
    fits = grey.ndim == 4 and grey.shape[3] in (1, 3) and 0 not in grey.shape[1:3]
    if images.dtype != np.uint8 or not fits:
        raise ValueError(
            f"{path}: images are {_kind(images)}; "
            "they must be uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3]"
        )
    return np.repeat(grey, 3, axis=3) if grey.shape[3] == 1 else grey


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


MEMORY: dict[str, Callable[..., Images]] = {"digits": _digits, "npz": _npz, "idx": _idx}
