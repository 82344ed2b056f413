"""Image sets in memory: scikit-learn's digits, .npz files, idx files (MNIST, Fashion-MNIST)."""

import contextlib
import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import numpy as np
from jaxtyping import Float, Int32, UInt8

from rope_jax.data.images.crops import Crop, crop_pixels
from rope_jax.files import open_regular
from rope_jax.npz import Npz, open_npz

# A head has a column for each class up to the largest label, which one damaged byte may set.
MAX_CLASSES = 100_000
# Exceptions that gzip raises for damaged files.
_UNREADABLE = (ValueError, OSError, EOFError, MemoryError, zlib.error)
Kind = tuple[tuple[int, ...], np.dtype]


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
    labels_of: ClassVar[str] = "images"  # or "pixels", "boxes"
    one_size: ClassVar[bool] = True  # whether all examples have the same size
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
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise ValueError(
                f"{self.name}: {len(self.images)} images and {len(self.labels)} labels; "
                "there must be as many labels as images, and at least one"
            )
        self.check_labels()

    def check_labels(self) -> None:
        """Raises ValueError for labels of another dtype, shape or range."""
        if self.labels.dtype != np.int32 or self.labels.ndim != 1:
            raise ValueError(
                f"{self.name}: labels are {_kind(self.labels)}; they must be int32 [n]"
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

    def example(
        self, example: int, crop: Crop | None = None, draw: int = 0
    ) -> dict[str, np.ndarray]:
        """An image with its labels, `image` and `label`. Arguments as of `read`."""
        return {"image": self.read(example, crop, draw), "label": self.labels[example]}

    def fingerprint(self) -> str:
        """Shape of the images, number of classes, and a checksum of pixels and labels."""
        pixels = zlib.crc32(np.ascontiguousarray(self.images))
        checksum = zlib.crc32(self.labels.tobytes(), pixels)
        shape = "x".join(map(str, self.images.shape))
        return f"{shape} {self.classes} classes {checksum:08x}"


def load_digits(split: str) -> tuple[Float[np.ndarray, "n 8 8"], Int32[np.ndarray, " n"]]:
    """Scikit-learn's digits, values 0 to 16, and their labels; every fifth is of the test split."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'rope_jax[demo]', or use images of another source"
        ) from None
    stored = datasets.load_digits()
    chosen = (np.arange(len(stored.target)) % 5 == 0) == (split == "test")
    return stored.images[chosen], stored.target[chosen].astype(np.int32)


def _digits(path: None, split: str) -> Images:
    ink, labels = load_digits(split)
    images = np.rint(ink * (255 / 16)).astype(np.uint8)
    return Images(_as_rgb(images), labels, "digits", split, classes=10)


def _npz(path: str, split: str) -> Images:
    with open_npz(path) as file:
        return _from_arrays(file, path, split)


def _idx(path: str, split: str) -> Images:
    places = {}
    for half, stem in (("train", "train"), ("test", "t10k")):
        for kind, dimensions in (("images", 3), ("labels", 1)):
            file = f"{stem}-{kind}-idx{dimensions}-ubyte"
            for place in (Path(path, file), Path(path, file + ".gz")):
                if place.exists():
                    places.setdefault(f"{half}_{kind}", (place, dimensions))
    shapes = {name: (_idx_header(*place), np.dtype(np.uint8)) for name, place in places.items()}

    def read(name: str) -> np.ndarray:
        return _read_idx(places[name][0], shapes[name][0])

    return _from_arrays(Npz(shapes, read), path, split)


@contextlib.contextmanager
def _opened_idx(path: Path) -> Iterator[IO[bytes]]:
    """An idx file, decompressed if its name ends in .gz; errors name it."""
    try:
        with open_regular(path) as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a valid idx file: {error}") from error


def _idx_header(path: Path, dimensions: int) -> tuple[int, ...]:
    """The shape of an idx file of bytes."""
    with _opened_idx(path) as file:
        magic, sides = file.read(4), file.read(4 * dimensions)
        if magic != bytes([0, 0, 8, dimensions]) or len(sides) != 4 * dimensions:
            raise ValueError(
                f"its header starts with {magic.hex()}, "
                f"not with 0000080{dimensions} (bytes in {dimensions} dimensions)"
            )
        shape = tuple(int(side) for side in np.frombuffer(sides, ">u4"))
        # deflate compresses by at most 1032 to 1; checked before memory is allocated.
        if math.prod(shape) > 1032 * path.stat().st_size:
            raise ValueError(
                f"its header declares {math.prod(shape):,} bytes, "
                "more than a file of this size can hold"
            )
    return shape


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    declared = math.prod(shape)
    with _opened_idx(path) as file:
        file.read(4 + 4 * len(shape))
        content = file.read(declared + 1)
        if len(content) != declared:
            there = f"{len(content):,}" if len(content) < declared else "more"
            raise ValueError(f"its header declares {declared:,} bytes, and {there} follow")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _from_arrays(file: Npz, path: str, split: str) -> Images:
    """Creates a split from the arrays `<split>_images` and `<split>_labels`.

    Args:
        file: the arrays of all splits; shapes and numbers are compared before any is read.
        path: for the name of the set and for errors.
        split: "train" or "test".
    """
    for kind in ("images", "labels"):
        if f"{split}_{kind}" not in file.shapes:
            raise FileNotFoundError(
                f"{path} has no {split} {kind}: the {split} split needs images and labels"
            )
    for half in ("train", "test"):
        images, labels = (file.shapes.get(f"{half}_{kind}") for kind in ("images", "labels"))
        _check_kinds(images, labels, path)
    labels = _read_labels(file, split, path)
    reference = "train" if "train_labels" in file.shapes else split
    classes = int(_read_labels(file, reference, path).max(initial=-1)) + 1
    images = _as_rgb(file.read(f"{split}_images"))
    return Images(images, labels, Path(path).stem, split, classes)


def _check_kinds(images: Kind | None, labels: Kind | None, path: str) -> None:
    """Rejects arrays of other types and shapes, and other numbers of images than of labels."""
    if labels is not None and (len(labels[0]) != 1 or labels[1].kind not in "iu"):
        raise ValueError(f"{path}: labels are {_kind(labels)}; they must be integers [n]")
    if images is None:
        return
    shape, dtype = images
    grey = (*shape, 1) if len(shape) == 3 else shape
    fits = len(grey) == 4 and grey[3] in (1, 3) and 0 not in grey[1:3]
    if dtype != np.uint8 or not fits:
        first = len(shape) == 4 and shape[1] in (1, 3)
        raise ValueError(
            f"{path}: images are {_kind(images)}; "
            "they must be uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3]"
            + ("; with channels first, transpose(0, 2, 3, 1) them" if first else "")
        )
    if labels is not None and labels[0] != shape[:1]:
        raise ValueError(
            f"{path}: {shape[0]} images and {labels[0][0]} labels; there must be as many labels as "
            "images"
        )


def _read_labels(file: Npz, split: str, path: str) -> np.ndarray:
    labels = file.read(f"{split}_labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        raise ValueError(
            f"{path}: labels are {labels.min()} to {labels.max()}; allowed are 0 to "
            f"{MAX_CLASSES - 1}"
        )
    return labels.astype(np.int32)


def _as_rgb(images: UInt8[np.ndarray, "n H W ..."]) -> UInt8[np.ndarray, "n H W 3"]:
    grey = images[..., None] if images.ndim == 3 else images
    return np.repeat(grey, 3, axis=3) if grey.shape[3] == 1 else grey


def _kind(array: np.ndarray | Kind) -> str:
    shape, dtype = array if isinstance(array, tuple) else (array.shape, array.dtype)
    return f"{dtype} {list(shape)}"


MEMORY: dict[str, Callable[..., Images]] = {"digits": _digits, "npz": _npz, "idx": _idx}
