"""Image files with a PNG of the classes of their pixels: ADE20k and custom folders.

A PNG of classes is grey: its values are class ids. One with a palette or with colours is rejected,
because its class ids are ambiguous.
"""

import functools
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from rope_jax.data.images.augment import Augmentation, parse_crop
from rope_jax.data.images.decode import EncodedImage
from rope_jax.data.images.joint import IGNORED, crop_both
from rope_jax.data.sources.folder import ENDINGS, Files, list_names
from rope_jax.data.sources.index import Streamed
from rope_jax.system.files import open_regular, read_regular

_IMAGES = tuple(ending for ending in ENDINGS if ending != ".png")
_THREADS = 8  # read labels in a check
_LARGEST = 1 << 28  # bytes of a file of labels
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class StreamedMaps(Streamed):
    """One split of a set of images and the classes of their pixels, read when needed.

    Its `labels`, one of each image, are 0.
    """

    labels_of: ClassVar[str] = "pixels"

    @property
    def protocol(self) -> str:
        return f"{super().protocol}; labels resized by the nearest pixel"

    def original(self, example: int) -> tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w"]]:
        """A stored image and the classes of its pixels; 255 for none.

        Raises:
            BadImages: the image or its labels cannot be used; the message names them.
        """
        with self.naming(example):
            image = EncodedImage(self.source.read(example))
            return np.array(image.picture()), self.source.classes(example, image)

    def example(
        self, example: int, crop: Augmentation | None = None, draw: int = 0
    ) -> dict[str, np.ndarray]:
        crop = crop or parse_crop(self.crop)
        image, classes = crop_both(*self.original(example), crop, self.size, draw)
        return {"image": image, "label": classes}


class Masks(Files):
    """Images NAME.jpg in path/train/ and path/test/ (or path/val/), with NAME.png next to each.

    The names of the classes are the lines of path/classes.txt.

    Args:
        path: the set.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the list of classes or all images are missing.
        ValueError: labels without an image, or an image without labels.

    Attributes:
        first: the value of the first class; lower values are no class.
    """

    labels_of = "pixels"
    first: ClassVar[int] = 0

    def __init__(self, path: str, split: str):
        folder = Path(path, split)
        if split == "test" and not folder.is_dir():
            folder = Path(path, "val")
        names = _lines(Path(path, "classes.txt"))
        self._write(path, split, folder.relative_to(path), folder.relative_to(path), names)

    def _write(
        self, path: str, split: str, images: Path, labels: Path, class_names: Sequence[str]
    ) -> None:
        """Writes the index of the images and labels in two folders, relative to the path."""
        self._labels = labels
        names = [f"{images.as_posix()}/{name}" for name in _pair_files(Path(path), images, labels)]
        super().__init__(
            Path(path),
            names,
            np.zeros(len(names), int),
            class_names,
            name=Path(path).resolve().name,
            split=split,
        )

    def stream(self, size: tuple[int, int], crop: str | None = None) -> StreamedMaps:
        return StreamedMaps(self, size, crop or "centre")

    def label_file(self, example: int) -> Path:
        """The PNG with the classes of an image."""
        return self._root / self._labels / f"{Path(self.example_name(example)).stem}.png"

    def classes(self, example: int, image: EncodedImage) -> UInt8[np.ndarray, "h w"]:
        """The classes of an image's pixels; 255 for none.

        Args:
            example: number of the image.
            image: that image.

        Raises:
            ValueError: the file is not such a PNG, has another size than the image or a value
                without a class, or the image has a rotation; the message names the file.
        """
        path, name = self.label_file(example), self.example_name(example)
        width, height = image.size
        if image.orientation != 1:
            raise ValueError(
                f"{name} has an Exif rotation (orientation {image.orientation}), which its labels "
                "may lack: store it without one"
            )
        values = read_grey(path)
        if values.shape != (height, width):
            raise ValueError(
                f"{path} has {values.shape[0]}x{values.shape[1]} pixels, but its image {name} "
                f"{height}x{width}: both must have the same size"
            )
        values = values - np.uint8(self.first)  # below it is 255
        labelled = values[values != IGNORED]
        if labelled.size and labelled.max() >= len(self.class_names):
            last = len(self.class_names) - 1 + self.first
            raise ValueError(
                f"{path} has the value {labelled.max() + self.first}, which is none of its "
                f"{len(self.class_names)} classes: values are {self.first} to {last}, and "
                f"{(IGNORED + self.first) % 256} for no class"
            )
        return values

    def fingerprint(self) -> str:
        """The images' fingerprint, and a checksum of label files and names of classes."""
        return f"{super().fingerprint()}, labels {self._labels_sum:08x}"

    @functools.cached_property
    def _labels_sum(self) -> int:
        def checksum(example: int) -> int:
            return zlib.crc32(read_regular(self.label_file(example), at_most=_LARGEST))

        with ThreadPoolExecutor(_THREADS) as pool:
            sums = list(pool.map(checksum, range(len(self.labels))))
        return zlib.crc32(
            np.array(sums, np.uint32).tobytes(), zlib.crc32(repr(self.class_names).encode())
        )

    def read_classes(self, example: int) -> list[int]:
        values = np.unique(self.classes(example, EncodedImage(self.read(example))))
        return values[values != IGNORED].tolist()

    def label_errors(self) -> list[str]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(filter(None, pool.map(self._label_error, range(len(self.labels)))))

    def _label_error(self, example: int) -> str | None:
        try:
            image = EncodedImage(self.read(example))
        except (ValueError, OSError):  # of the image, which may be skipped
            return None
        try:
            self.classes(example, image)
        except ValueError as error:
            return str(error)
        return None


class Ade20k(Masks):
    """The official folder ADEChallengeData2016: 150 classes, of which a label of 0 is none."""

    first = 1

    def __init__(self, path: str, split: str):
        part = {"train": "training", "test": "validation"}[split]
        lines = _lines(Path(path, "objectInfo150.txt"))[1:]  # the first is a header
        names = [line.split("\t")[-1].strip() for line in lines]
        self._write(path, split, Path("images", part), Path("annotations", part), names)


def read_grey(path: Path) -> UInt8[np.ndarray, "h w"]:
    """The values of a grey PNG of 8 bits.

    Raises:
        ValueError: the file is something else, or damaged; the message names it.
    """
    try:
        with open_regular(path) as file:
            bits = file.read(25)[-1:]  # of a value, in the header; Pillow scales those of fewer
            file.seek(0)
            with Image.open(file, formats=["PNG"]) as picture:
                if picture.mode != "L" or bits != b"\x08":
                    raise ValueError(
                        f"its mode is {picture.mode}, of {bits[0]} bits; the values of a grey PNG "
                        "of 8 bits are the numbers of classes: convert it"
                    )
                return np.array(picture)
    except _UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a PNG of labels: {error}") from error


def _lines(path: Path) -> list[str]:
    """The lines of a list of classes; empty ones at its end are left out."""
    try:
        text = read_regular(path, at_most=1 << 24).decode()
        lines = [line.strip() for line in text.rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error
    if not all(lines) or not lines:
        raise ValueError(
            f"{path} has an empty line: it lists one class per line, the first is class 0"
        )
    return lines


def _pair_files(root: Path, images: Path, labels: Path) -> list[str]:
    """Lists the images, sorted, and checks that each has labels."""
    names = [
        n for n in list_names(root / images, folders=False) if Path(n).suffix.lower() in _IMAGES
    ]
    if not names:
        raise FileNotFoundError(f"{root / images} has no images ({', '.join(_IMAGES)})")
    stems = Counter(Path(name).stem for name in names)
    maps = Counter(n[:-4] for n in list_names(root / labels, folders=False) if n.endswith(".png"))
    if unpaired := sorted((stems - maps) + (maps - stems)):
        name = unpaired[0]
        raise ValueError(
            f"{root / images / name} and {root / labels / name}.png do not match: there must be "
            f"one image ({', '.join(_IMAGES)}) and one PNG of labels of each name"
        )
    return names
