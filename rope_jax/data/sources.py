"""Image sets by name. Small ones lie in memory: `digits` (comes with scikit-learn), `npz` files, `idx` files (MNIST, Fashion-MNIST).

Of the others one image is read at a time: `folder`s of image files, sets of `tfds`, `packed` pixels, the archives of `imagenet`.
"""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rope_jax.data.augment import parse_frame
from rope_jax.data.folder import Folder
from rope_jax.data.imagenet import ImageNet
from rope_jax.data.index import Source
from rope_jax.data.packed import Packed
from rope_jax.data.resize import check_size, resize
from rope_jax.data.tfds import Tfds

SPLITS = ("train", "test")
_UNREADABLE = (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)  # what numpy and gzip raise for damaged files


@dataclass(frozen=True, eq=False)
class Images:
    """One split of an image set.

    Attributes:
        images: uint8 [n, H, W, 3].
        labels: int32 [n], 0 to classes - 1.
        name: of the set, for reports.
        split: "train" or "test".
        classes: number of classes of the set.
    """

    images: np.ndarray
    labels: np.ndarray
    name: str
    split: str
    classes: int

    def __post_init__(self):
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise ValueError(f"{self.name}: images are {_kind(self.images)}; they must be uint8 [n, H, W, 3]")
        if self.labels.dtype != np.int32 or self.labels.ndim != 1:
            raise ValueError(f"{self.name}: labels are {_kind(self.labels)}; they must be int32 [n]")
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise ValueError(f"{self.name}: {len(self.images)} images and {len(self.labels)} labels; the numbers must be equal, at least 1")
        if self.labels.min() < 0 or self.labels.max() >= self.classes:
            raise ValueError(f"{self.name}: labels are {self.labels.min()} to {self.labels.max()}; allowed are 0 to {self.classes - 1}")

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the images."""
        return self.images.shape[1:3]


@dataclass(frozen=True, eq=False)
class Streamed:
    """One split of an image set whose images are read when they are wanted, and then brought to one size.

    Attributes:
        source: where they come from.
        size: (H, W) in pixels, of all of them.
        frame: how, where no augmentation does it: see `rope_jax.data.frames`.
    """

    source: Source
    size: tuple[int, int]
    frame: str = "centre"

    def __post_init__(self):
        parse_frame(self.frame)

    labels = property(lambda self: self.source.labels, doc="int32 [n], 0 to classes - 1.")
    name = property(lambda self: self.source.name, doc="Of the set, for reports.")
    split = property(lambda self: self.source.split, doc='"train" or "test".')
    classes = property(lambda self: self.source.classes, doc="Number of classes of the set.")


def fingerprint(images: Images | Streamed) -> str:
    """Tells one set of images from another: number, size, classes, and a checksum of labels and pixels.

    Of images that are read one at a time the names of the files stand for the pixels (and for packed ones the checksums of their files).
    """
    if isinstance(images, Streamed):
        return f"{images.size[0]}x{images.size[1]} of {images.source.fingerprint()}"
    checksum = zlib.crc32(images.labels.tobytes(), zlib.crc32(np.ascontiguousarray(images.images)))
    return f"{'x'.join(map(str, images.images.shape))} {images.classes} classes {checksum:08x}"


def load(
    source: str,
    path: str | None = None,
    split: str = "train",
    image_size: tuple[int, int] | None = None,
    *,
    frame: str = "centre",
) -> Images | Streamed:
    """Opens one split of an image set, as RGB.

    Into memory:

    - `"digits"`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, values 0 to 16 spread over 0 to 255. Every fifth image (index 0,
      5, 10, ...) is held out as `"test"`: 360 images, the same in every run, without a random number.
    - `"npz"`: a file with the arrays `train_images` and `train_labels`, `test_images` and `test_labels`, or one of the pairs; images uint8
      [n, H, W], [n, H, W, 1] or [n, H, W, 3], labels integers [n].
    - `"idx"`: a folder with the four files of MNIST or Fashion-MNIST under their official names, compressed (.gz) or not.

    One image at a time, in the order of classes and file names:

    - `"folder"`: image files in path/train/CLASS/ and path/test/CLASS/ (or path/val/CLASS/), see `rope_jax.data.folder`.
    - `"tfds"`: a set that tensorflow-datasets has prepared, see `rope_jax.data.tfds`.
    - `"packed"`: a set that `rope_jax.data.prepare` has prepared, see `rope_jax.data.packed`.
    - `"imagenet"`: the official archives, see `rope_jax.data.imagenet`.

    Args:
        source: one of these names.
        path: where the set lies; none for digits.
        split: "train" or "test".
        image_size: (h, w) in pixels. Sets in memory are resized as they are (bicubic with antialiasing), None leaves their size; the
            others need one.
        frame: how images that are read one at a time are brought to this size, see `rope_jax.data.frames`.

    Returns:
        the split. Labels of sets in memory run to the largest of the training split (without one, of this split).

    Raises:
        ValueError: for unknown sources and splits, damaged files, unequal lengths, wrong types, labels out of range.
        FileNotFoundError: where a file, a folder or an array of the split is missing.
    """
    if image_size is not None:
        check_size(image_size)
    if source in STREAMED:
        opened = open_source(source, path, split)
        if image_size is None:
            raise ValueError(f"data source {source!r} ({path}) needs an image_size (height, width): its images may differ in size")
        return Streamed(opened, tuple(image_size), frame)
    _check(source, path, split)
    loaded = _READERS[source](path, split)
    if image_size is not None:
        loaded = Images(resize(loaded.images, image_size), loaded.labels, loaded.name, split, loaded.classes)
    return loaded


def open_source(source: str, path: str | None, split: str) -> Source:
    """The images of one split as they are stored; arguments as in `load`, of the sources that are read one image at a time."""
    _check(source, path, split)
    if source not in STREAMED:
        raise ValueError(f"data source {source!r} lies in memory; those read one image at a time are {', '.join(STREAMED)}")
    return STREAMED[source](path, split)


def _check(source: str, path: str | None, split: str) -> None:
    known = [*_READERS, *STREAMED]
    if source not in known:
        raise ValueError(f"data source {source!r} is unknown; known are {', '.join(known)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
    if source == "digits":
        if path is not None:
            raise ValueError(f"path {path!r} is given, but digits come with scikit-learn; leave it out")
    elif path is None:
        raise ValueError(f"data source {source!r} needs a path; none is given")
    elif not os.path.exists(path):
        raise FileNotFoundError(f"path {path!r} of data source {source!r} does not exist")


def _digits(path: None, split: str) -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = (np.arange(len(digits.target)) % 5 == 0) == (split == "test")
    images = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
    return Images(_as_rgb(images, "digits"), digits.target[chosen].astype(np.int32), "digits", split, classes=10)


def _npz(path: str, split: str) -> Images:
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not an .npz file but a folder")
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except _UNREADABLE as error:
            raise ValueError(f"{path} is not an .npz file: {error}") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} is a single array; an .npz file with {split}_images and {split}_labels is needed")

        def read(name: str) -> np.ndarray | None:
            if name not in archive.files:
                return None
            try:
                array = archive[name]
            except _UNREADABLE as error:
                raise ValueError(f"array {name} of {path} cannot be read: {error}") from error
            if not isinstance(array, np.ndarray):  # numpy hands out the bytes of members that are no arrays
                raise ValueError(f"{name} of {path} is not an array")
            return array

        with archive:
            return _from_arrays(read, path, split)


def _idx(path: str, split: str) -> Images:
    def read(name: str) -> np.ndarray | None:
        half, kind = name.split("_")
        file = Path(path, f"{'train' if half == 'train' else 't10k'}-{'images-idx3' if kind == 'images' else 'labels-idx1'}-ubyte")
        for candidate in (file, file.with_name(file.name + ".gz")):
            if candidate.exists():
                return read_idx(candidate, dimensions=3 if kind == "images" else 1)
        return None

    return _from_arrays(read, path, split)


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Reads one idx file of bytes, compressed if its name ends in .gz.

    Args:
        path: the file.
        dimensions: how many the array must have.

    Returns:
        uint8 array of the shape in the header.

    Raises:
        ValueError: where the header or the length is not what it must be.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic, sides = file.read(4), file.read(4 * dimensions)
            if magic != bytes([0, 0, 8, dimensions]) or len(sides) != 4 * dimensions:
                raise ValueError(f"its header starts with {magic.hex()}, not with 0000080{dimensions} (bytes in {dimensions} dimensions)")
            shape = tuple(int(side) for side in np.frombuffer(sides, ">u4"))
            promised = math.prod(shape)
            if promised > 1032 * path.stat().st_size:  # the most that deflate can hold; checked before memory is asked for
                raise ValueError(f"its header promises {promised:,} bytes, more than a file of this size can hold")
            content = file.read(promised + 1)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a valid idx file: {error}") from error
    if len(content) != promised:
        there = f"{len(content):,}" if len(content) < promised else "more"
        raise ValueError(f"{path} is not a valid idx file: {promised:,} bytes must follow its header; there are {there}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _from_arrays(read: Callable[[str], np.ndarray | None], path: str, split: str) -> Images:
    """Checks what the reader finds under `<split>_images` and `<split>_labels`."""
    images, labels = read(f"{split}_images"), read(f"{split}_labels")
    for array, kind in ((images, "images"), (labels, "labels")):
        if array is None:
            raise FileNotFoundError(f"{path} has no {split} {kind}; the {split} split needs images and labels")
    labels = _as_labels(labels, path)
    reference = labels if split == "train" else read("train_labels")
    classes = int(_as_labels(labels if reference is None else reference, path).max(initial=-1)) + 1
    return Images(_as_rgb(images, path), labels, Path(path).stem, split, classes)


def _as_labels(labels: np.ndarray, path: str) -> np.ndarray:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels are {_kind(labels)}; they must be integers [n]")
    if len(labels) and not 0 <= labels.min() <= labels.max() < 2**31 - 1:
        raise ValueError(f"{path}: labels are {labels.min()} to {labels.max()}; allowed are 0 to 2**31 - 2")
    return labels.astype(np.int32)


def _as_rgb(images: np.ndarray, path: str) -> np.ndarray:
    grey = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or grey.ndim != 4 or grey.shape[3] not in (1, 3) or 0 in grey.shape[1:3]:
        raise ValueError(f"{path}: images are {_kind(images)}; they must be uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3]")
    return np.repeat(grey, 3, axis=3) if grey.shape[3] == 1 else grey


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


_READERS: dict[str, Callable[..., Images]] = {"digits": _digits, "npz": _npz, "idx": _idx}
STREAMED: dict[str, Callable[[str, str], Source]] = {"folder": Folder, "tfds": Tfds, "packed": Packed, "imagenet": ImageNet}
