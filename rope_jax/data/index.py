"""What is known of a large image set without reading its images: a folder of arrays that worker processes map rather than copy.

    about.json      name, split, class names, and whatever the source adds
    labels.npy      int32 [n]
    names.npy       uint8, the names of all examples one after the other in UTF-8
    ends.npy        int64 [n], where each name ends

Sources are ordered by class, then by the names of the files, so that the same images in another form make the same stream.
"""

import abc
import functools
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8


class Source(abc.ABC):
    """One split of a set whose images are read one at a time, by number. What is pickled is the place of its index and no more.

    Attributes:
        index: the folder with the index.
    """

    def __init__(self, index: Path):
        self.index = index

    @abc.abstractmethod
    def read(self, example: int) -> bytes | UInt8[np.ndarray, "H W 3"]:
        """An image: the bytes of its file, or its pixels where they are stored as such.

        Raises:
            OSError: where it cannot be read.
        """

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """The content of about.json."""
        return json.loads((self.index / "about.json").read_text())

    @functools.cached_property
    def labels(self) -> Int32[np.ndarray, " n"]:
        """int32 [n]."""
        return self.array("labels.npy")

    @property
    def name(self) -> str:
        """Of the set, for reports."""
        return self.about["name"]

    @property
    def split(self) -> str:
        """ "train" or "test"."""
        return self.about["split"]

    @property
    def classes(self) -> int:
        """Number of classes of the set."""
        return len(self.about["class_names"])

    def example_name(self, example: int) -> str:
        """What the image is called in its set: class and file where it has them."""
        start = 0 if example == 0 else self._ends[example - 1]
        return self._names[start : self._ends[example]].tobytes().decode()

    def fingerprint(self) -> str:
        """Tells one set of images from another: number, classes, and a checksum of labels and file names, not of pixels."""
        names = zlib.crc32(b"\0".join(self.example_name(k).rpartition("/")[2].encode() for k in range(len(self.labels))))
        return f"{len(self.labels)} files {self.classes} classes {zlib.crc32(self.labels.tobytes(), names):08x}"

    def array(self, name: str) -> np.ndarray:
        """One of the arrays beside the index, mapped."""
        return np.load(self.index / name, mmap_mode="r", allow_pickle=False)

    @functools.cached_property
    def _names(self) -> np.ndarray:
        return self.array("names.npy")

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return self.array("ends.npy")

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index}


def write_index(folder: Path, *, labels: Sequence[int], names: Sequence[str], class_names: Sequence[str], **about: Any) -> None:
    """Writes an index into an existing folder.

    Raises:
        ValueError: for labels that are no numbers of classes, other numbers of labels and names, and names that are not UTF-8.
    """
    try:
        encoded = [name.encode() for name in names]
    except UnicodeEncodeError as error:
        raise ValueError(f"{about['name']}: the name of the image {error.object!r} is not UTF-8: rename it") from error
    labels = np.asarray(labels, np.int64)
    if len(labels) != len(encoded) or not len(labels):
        raise ValueError(f"{about['name']}: {len(encoded)} names and {len(labels)} labels; the numbers must be equal, at least 1")
    if labels.min() < 0 or labels.max() >= len(class_names):
        raise ValueError(f"{about['name']}: labels are {labels.min()} to {labels.max()}; allowed are 0 to {len(class_names) - 1}")
    np.save(folder / "labels.npy", labels.astype(np.int32))
    np.save(folder / "names.npy", np.frombuffer(b"".join(encoded), np.uint8))
    np.save(folder / "ends.npy", np.cumsum([len(name) for name in encoded], dtype=np.int64))
    (folder / "about.json").write_text(json.dumps(about | {"class_names": list(class_names)}, indent=1) + "\n")


def cache_folder() -> Path:
    """Where things are kept that can be made again: $ROPE_JAX_CACHE, else rope_jax in $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("ROPE_JAX_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rope_jax")


class Staged:
    """A folder that appears under its name when everything in it is written, or not at all.

    Within the context it has another name. Left behind by a crash, it is written anew.
    """

    def __init__(self, place: Path):
        self._place = place

    def __enter__(self) -> Path:
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(dir=self._place.parent, prefix=f".{self._place.name}."))
        return self._staging

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            try:
                os.replace(self._staging, self._place)
                return
            except OSError:  # another process was faster
                if not self._place.is_dir():
                    raise
        shutil.rmtree(self._staging, ignore_errors=True)
