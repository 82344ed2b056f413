"""Image files in folders of classes."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from rope_jax.data.index import Source, write_index


class Folder(Source):
    """One split of a set of image files: path/train/CLASS/ and path/test/CLASS/ (or path/val/CLASS/).

    Classes are numbered in the order of their names, those of the training split where there is one; names that start with a dot are
    passed over. Nothing is decoded or opened here: the listing is made once, of names alone, and kept in a temporary folder as long as
    this object lives.

    Args:
        path: the set.
        split: "train" or "test".

    Raises:
        FileNotFoundError: where the split has no folder or no files.
        ValueError: where it has a class that the training split has not.
    """

    def __init__(self, path: str, split: str):
        wanted = ("train",) if split == "train" else ("test", "val")
        found = [Path(path, name) for name in wanted if Path(path, name).is_dir()]
        if not found:
            raise FileNotFoundError(f"{path} has no folder for the {split} split: {' or '.join(wanted)} is missing")
        folder = found[0]
        classes = _listed(Path(path, "train"), folders=True) or _listed(folder, folders=True)
        if unknown := sorted(set(_listed(folder, folders=True)) - set(classes)):
            raise ValueError(f"{folder} has a class {unknown[0]!r} that {Path(path, 'train')} has not")
        files = [(label, f"{name}/{file}") for label, name in enumerate(classes) for file in _listed(folder / name, folders=False)]
        if not files:
            raise FileNotFoundError(f"{folder} has no images; they are looked for in {folder / 'CLASS'}")
        super().__init__(Path(tempfile.mkdtemp(prefix="rope_jax.")))
        weakref.finalize(self, shutil.rmtree, self.index, ignore_errors=True)
        write_index(
            self.index,
            labels=[label for label, _ in files],
            names=[name for _, name in files],
            class_names=classes,
            name=Path(path).resolve().name,
            split=split,
        )
        self._folder = folder.absolute()

    def read(self, example: int) -> bytes:
        """The bytes of a file."""
        return (self._folder / self.example_name(example)).read_bytes()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_folder": self._folder}


def _listed(folder: Path, *, folders: bool) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and folders == entry.is_dir())
