"""Image sets that are read one image at a time, and the index of each: a folder of arrays.

Worker processes map the arrays rather than copy them. An index holds:

    about.json      name, split, class names, and entries that only this source has
    labels.npy      int32 [n], or [n, M] if up to M labels are correct (padded with -1)
    names.npy       uint8, the names of all examples one after the other in UTF-8
    ends.npy        int64 [n], the end of each name

Sources with file names are ordered by class, then by file name, so that the same images in another
format yield the same stream.
"""

import abc
import contextlib
import functools
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32, UInt8

from rope_jax.data.images.augment import AUGMENTATIONS, CROP, parse_crop
from rope_jax.data.images.crops import Crop, crop_file, crop_pixels
from rope_jax.data.images.decode import EncodedImage
from rope_jax.data.labels import Labels, find_labels
from rope_jax.system.files import cache_folder, read_json

_SAMPLE = 256  # images whose content is compared: few, because they are read at each start


class Source(abc.ABC):
    """One split of a set whose images are read by number. Arrays of its index are not pickled.

    Attributes:
        index: the folder with the index.
        competing: indices of the logits among which the labels count, or None for all.
        note: the scoring rule, for the protocol of an evaluation.
        labels_of: the kind of labels: "images", "pixels", "boxes" or "masks".
    """

    competing: tuple[int, ...] | None = None
    note: str = ""
    labels_of: str = "images"

    def __init__(self, index: Path):
        self.index = index
        self._arrays: dict[str, np.ndarray] = {}

    @abc.abstractmethod
    def read(self, example: int) -> bytes | UInt8[np.ndarray, "H W 3"]:
        """Reads an image: the bytes of its file, or its pixels if it is stored as such.

        Raises:
            OSError: it cannot be read.
        """

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """The content of about.json."""
        return read_json(self.index / "about.json")

    @property
    def labels(self) -> Int32[np.ndarray, "n ..."]:
        """int32 [n] or [n, M]."""
        return self.array("labels.npy")

    @property
    def name(self) -> str:
        """Name of the set, for reports."""
        return self.about["name"]

    @property
    def split(self) -> str:
        """ "train", "test", or "files" of an evaluation set."""
        return self.about["split"]

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in their order."""
        return self.about["class_names"]

    def example_name(self, example: int) -> str:
        """The image's class and file name."""
        names, ends = self.array("names.npy"), self.array("ends.npy")
        start = 0 if example == 0 else ends[example - 1]
        return names[start : ends[example]].tobytes().decode()

    def fingerprint(self) -> str:
        """Number of files and classes, and a checksum of labels and file names (not of pixels)."""
        files = [self.example_name(k).rpartition("/")[2].encode() for k in range(len(self.labels))]
        checksum = zlib.crc32(self.labels.tobytes(), zlib.crc32(b"\0".join(files)))
        return f"{len(self.labels)} files {len(self.class_names)} classes {checksum:08x}"

    def sizes(self) -> Sequence[int]:
        """Bytes of the file of each image, -1 for one that is missing; empty if files hold many."""
        return ()

    def damaged_files(self) -> list[str]:
        """Names of files with a wrong checksum, if the set has checksums."""
        return []

    def stream(self, size: tuple[int, int], crop: str | None = None) -> "Streamed":
        """The images cropped to one size, by default the whole centre."""
        return Streamed(self, size, crop or "centre")

    def read_classes(self, example: int) -> list[int]:
        """Reads the classes of an example.

        Raises:
            ValueError, OSError: labels of pixels cannot be used.
        """
        return np.atleast_1d(self.labels[example]).tolist()

    def label_errors(self) -> list[str]:
        """Reads all labels of pixels; returns a sentence for each image with invalid ones."""
        return []

    def remarks(self) -> list[str]:
        """Sentences about unusual files or labels, and their treatment."""
        return []

    def array(self, name: str) -> np.ndarray:
        """One of the arrays of the index, mapped once."""
        if name not in self._arrays:
            path = self.index / name
            self._arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        return self._arrays[name]

    def __getstate__(self) -> dict[str, Any]:
        """The state without the content of the index."""
        read = functools.cached_property
        state = (self.__dict__ | {"_arrays": {}}).items()
        return {k: v for k, v in state if not isinstance(getattr(type(self), k, None), read)}


def write_index(
    folder: Path,
    *,
    labels: np.ndarray | Sequence[int],
    names: Sequence[str],
    class_names: Sequence[str],
    arrays: Mapping[str, np.ndarray] | None = None,
    **entries: Any,
) -> None:
    """Writes an index into an existing folder.

    Args:
        folder: of the index.
        labels: [n], or [n, M] padded with -1.
        names: of the examples.
        class_names: in the order of the labels.
        arrays: further arrays of the source, by file name.
        **entries: name, split, and other entries of about.json.

    Raises:
        ValueError: there are no images, a label is not a class, or a name is not in UTF-8.
    """
    labels, name = np.asarray(labels), entries["name"]
    low, high = labels.min(initial=0), labels.max(initial=-1)
    if not len(labels) or low < 1 - labels.ndim or high >= len(class_names):
        raise ValueError(
            f"{name} has {len(labels)} images with labels from {low} to {high}: there must be "
            f"images, and labels are 0 to {len(class_names) - 1}"
        )
    try:
        encoded = [name.encode() for name in names]
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: rename {error.object!r}, which is not in UTF-8") from error
    arrays = {
        "labels.npy": labels.astype(np.int32),
        "names.npy": np.frombuffer(b"".join(encoded), np.uint8),
        "ends.npy": np.cumsum([len(name) for name in encoded], dtype=np.int64),
    } | dict(arrays or {})
    for file, array in arrays.items():
        np.save(folder / file, array)
    text = json.dumps(entries | {"class_names": list(class_names)}, indent=1) + "\n"
    (folder / "about.json").write_text(text)


def cache_index(kind: str, key: str, write: Callable[[Path], None]) -> Path:
    """Returns the cache folder with the index for a key; it is created completely, or not at all.

    Args:
        kind: of the source.
        key: changes with the indexed content.
        write: fills a new folder, if none exists.
    """
    place = cache_folder() / kind / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            write(Path(folder))
            with contextlib.suppress(OSError):  # another process was faster: its folder stays
                os.replace(folder, place)
    return place


class BadImages(ValueError):
    """An image cannot be used."""


class BadSet(BadImages):
    """Too many images of a set cannot be used, even with `bad_images="skip"`."""


@dataclass(frozen=True, eq=False)
class Streamed:
    """One split of an image set whose images are read and cropped to one size when needed.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> from rope_jax.data import Streamed, open_source
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "train", "cat")
    >>> folder.mkdir(parents=True)
    >>> Image.new("RGB", (40, 30)).save(folder / "1.png")
    >>> images = Streamed(open_source("folder", str(folder.parents[1]), "train"), (16, 16))
    >>> images.example(0)["image"].shape, images.class_names, images.in_memory
    ((16, 16, 3), ['cat'], False)

    Attributes:
        source: of the images.
        size: (H, W) in pixels, of all of them.
        crop: to that size, unless an augmentation crops: see `rope_jax.data.images.crops`.
    """

    source: Source
    size: tuple[int, int]
    crop: str = "centre"
    in_memory: ClassVar[bool] = False
    labels_of: ClassVar[str] = "images"
    one_size: ClassVar[bool] = True

    def __post_init__(self):
        entry = parse_crop(self.crop).entry
        if entry.random or self.labels_of not in entry.labels:
            choices = ", ".join(
                name
                for name, other in AUGMENTATIONS.items()
                if other.stage == CROP and not other.random and self.labels_of in other.labels
            )
            raise ValueError(
                f"{self.crop} is not for the evaluation of {self.labels_kind.words}: use {choices}"
            )

    @property
    def labels(self) -> Int32[np.ndarray, "n ..."]:
        """int32 [n], or [n, M] if up to M labels are correct, padded with -1."""
        return self.source.labels

    @property
    def name(self) -> str:
        """Name of the set, for reports."""
        return self.source.name

    @property
    def split(self) -> str:
        """ "train", "test", or "files" of an evaluation set."""
        return self.source.split

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in their order."""
        return self.source.class_names

    @property
    def classes(self) -> int:
        """Number of classes of the set; a model needs as many logits."""
        return len(self.class_names)

    @property
    def competing(self) -> tuple[int, ...] | None:
        """Indices of the logits among which the labels count, or None for all."""
        return self.source.competing

    @property
    def note(self) -> str:
        """The scoring rule, for the protocol of an evaluation."""
        return self.source.note

    @property
    def protocol(self) -> str:
        """A description of crop and resizing, for the protocol of an evaluation."""
        text = f"{self.crop} of each image, resized whole and with antialiasing"
        entries = self.source.about
        if "resized" in entries:
            text += f"; images packed beforehand: {entries['resized']} ({entries['interpolation']})"
        return text

    @property
    def labels_kind(self) -> Labels:
        """The kind of the labels."""
        return find_labels(self.labels_of)

    def fingerprint(self) -> str:
        """Size of the images; number, classes, labels and names of their files; and a checksum.

        The checksum covers the names of classes, the sizes of all files, and the content of up to
        256 images, evenly spaced. It is last, because fingerprints of earlier versions end before
        it.
        """
        count = len(self.labels)

        def checksum(example: int) -> int:
            try:
                return zlib.crc32(bytes(self.source.read(example)))
            except (ValueError, OSError):  # training reports it, or skips it
                return 0

        with ThreadPoolExecutor() as pool:
            sums = list(pool.map(checksum, sorted({k * count // _SAMPLE for k in range(_SAMPLE)})))
        content = zlib.crc32(np.array([*sums, *self.source.sizes()], np.int64))
        content = zlib.crc32(repr(self.source.class_names).encode(), content)
        size = f"{self.size[0]}x{self.size[1]}"
        return f"{size} of {self.source.fingerprint()}, content {content:08x}"

    def example(
        self, example: int, crop: Crop | None = None, draw: int = 0
    ) -> dict[str, np.ndarray]:
        """Reads an image, cropped to the set's size, and its labels: `image` and `label`.

        Args:
            example: number of the image.
            crop: instead of the set's own.
            draw: 64 random bits for the crop.

        Raises:
            BadImages: it cannot be read or decoded; the message names it.
            MemoryError: there is too little memory to decode it.
        """
        crop = crop or parse_crop(self.crop)
        with self.naming(example):
            data = self.source.read(example)
            if isinstance(data, bytes):
                image = crop_file(EncodedImage(data), crop, self.size, draw)
            else:
                image = crop_pixels(data, crop, self.size, draw)
        return {"image": image, "label": self.labels[example]}

    @contextlib.contextmanager
    def naming(self, example: int) -> Iterator[None]:
        """Turns errors of an image into `BadImages`, which name it."""
        try:
            yield
        except (ValueError, OSError) as error:
            name = self.source.example_name(example)
            raise BadImages(
                f"image {example} of {self.name} ({name}) cannot be used: {error}"
            ) from error
