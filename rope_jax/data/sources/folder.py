"""Image files in folders."""

import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rope_jax.data.images.decode import MAX_BYTES
from rope_jax.data.sources.index import Source, write_index
from rope_jax.system.files import read_regular

_SPLITS = ("train", "test", "val")
_HELD_OUT = 5  # every fifth image of a class, where the folder has no splits
# Endings of image files, in any case; `decode_image` identifies them by their content.
ENDINGS = (".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Files(Source):
    """Image files below a folder; their index is a temporary folder deleted with this object.

    Args:
        root: the folder.
        names: of the files, relative to the root.
        labels: [n], or [n, M] padded with -1.
        class_names: in the order of the labels.
        **entries: name, split, and other entries of about.json.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: np.ndarray | Sequence[int],
        class_names: Sequence[str],
        **entries: Any,
    ):
        super().__init__(Path(tempfile.mkdtemp(prefix="rope_jax.")))
        weakref.finalize(self, shutil.rmtree, self.index, ignore_errors=True)
        write_index(self.index, labels=labels, names=names, class_names=class_names, **entries)
        self._root = root.absolute()

    def read(self, example: int) -> bytes:
        return read_regular(self._root / self.example_name(example), at_most=MAX_BYTES)

    def spread(self, count: int) -> "Files":
        """Returns `count` of the images, evenly spaced, so that they are of all classes."""
        number = len(self.labels)
        chosen = [k * number // count for k in range(min(count, number))]
        names, labels = [self.example_name(k) for k in chosen], self.labels[chosen]
        part = Files(self._root, names, labels, self.class_names, name=self.name, split=self.split)
        part.competing = self.competing
        part.note = f"{self.note}; {len(chosen):,} of {number:,} images, evenly spaced"
        return part

    def sizes(self) -> list[int]:
        def read_sizes(examples: np.ndarray) -> list[int]:
            return [
                _size(os.path.join(self._root, self.example_name(k))) for k in examples.tolist()
            ]

        parts = np.array_split(np.arange(len(self.labels)), 64)
        with ThreadPoolExecutor() as pool:  # because a network may respond slowly
            return list(itertools.chain.from_iterable(pool.map(read_sizes, parts)))


class Folder(Files):
    """One split of a set of class folders: path/train/CLASS/, path/test/CLASS/ (or path/val/...).

    Without these, every fifth image of path/CLASS/ belongs to the test split. Classes are numbered
    in the order of their names, those of the training split if there is one. Images are the files
    with one of the `ENDINGS`, in a class's folder and in folders within it; `remarks` reports the
    number of other files. Names that start with a dot are left out. A file is opened only when it
    is read.

    Args:
        path: the set.
        split: "train" or "test".
        allow_empty: True if a folder of a class may be empty.

    Raises:
        FileNotFoundError: the split has no folders of classes.
        ValueError: the split has no images, or a class that the training split lacks; the folder of
            a class has no images; the folder of a split is named in upper case.
    """

    def __init__(self, path: str, split: str, *, allow_empty: bool = False):
        splits = ("train",) if split == "train" else ("test", "val")
        folders = [Path(path, name) for name in splits if Path(path, name).is_dir()]
        unsplit = not any(Path(path, name).is_dir() for name in _SPLITS)
        folder = Path(path) if unsplit or not folders else folders[0]
        classes = list_names(Path(path, "train"), folders=True) or list_names(folder, folders=True)
        if not classes or not (unsplit or folders):
            problem = f"has no folders of classes for the {split} split, {' or '.join(splits)}"
            raise FileNotFoundError(
                f"{path} {problem if Path(path).exists() else 'does not exist'}: arrange the "
                f"images as {path}/train/CLASS/* and {path}/val/CLASS/*, or all of them as "
                f"{path}/CLASS/*, of which every fifth is then a test image"
            )
        if misnamed := [
            name for name in classes if unsplit and name.lower() in ("train", "test", "val")
        ]:
            raise ValueError(
                f"{path} has a folder {misnamed[0]!r}: name it {misnamed[0].lower()!r} if it is a "
                "split, and otherwise if it is a class"
            )
        if unknown := sorted(set(list_names(folder, folders=True)) - set(classes)):
            raise ValueError(
                f"{folder} has a class {unknown[0]!r} that is missing in {Path(path, 'train')}"
            )
        all_files = {name: list_files(folder / name) for name in classes}
        images = {name: list(filter(_is_image, files)) for name, files in all_files.items()}
        empty = [name for name in classes if (folder / name).is_dir() and not images[name]]
        if empty and not allow_empty:
            raise ValueError(
                f"{folder / empty[0]} has no images ({len(empty)} of {len(classes)} classes are "
                f"empty): add some ({', '.join(ENDINGS)}), remove the folder, or allow it with "
                "allow_empty=True (--config.data.allow_empty=True, `data prepare --allow_empty`)"
            )
        files = [
            (f"{name}/{file}", label)
            for label, name in enumerate(classes)
            for number, file in enumerate(images[name])
            if not unsplit or (number % _HELD_OUT == _HELD_OUT - 1) == (split == "test")
        ]
        others = [f"{name}/{x}" for name in classes for x in all_files[name] if not _is_image(x)]
        repeated = unsplit and split == "test"  # the training split has the same folders
        super().__init__(
            folder,
            [name for name, _ in files],
            [label for _, label in files],
            classes,
            others=[] if repeated else others,
            name=Path(path).resolve().name,
            split=split,
        )

    def remarks(self) -> list[str]:
        others, prefix = self.about["others"], f"{self.name}, {self.split} split"
        left_out = f"files left out, as they have no extension of images ({', '.join(ENDINGS)})"
        return [f"{prefix}: {left_out}: {len(others)}, first {others[0]}"] if others else []


def list_names(folder: Path, *, folders: bool) -> list[str]:
    """Lists the folders, or the other entries, in a folder: sorted names without hidden ones."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if folders == entry.is_dir()]
    return sorted(name for name in names if not name.startswith("."))


def image_files(folder: Path) -> list[str]:
    """Relative paths of the image files below a folder, by extension; sorted."""
    return list(filter(_is_image, list_files(folder)))


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return -1


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def list_files(folder: Path) -> list[str]:
    """Relative paths of the files below a folder; sorted, without hidden ones."""
    inner = (f"{n}/{x}" for n in list_names(folder, folders=True) for x in list_files(folder / n))
    return sorted([*list_names(folder, folders=False), *inner])
