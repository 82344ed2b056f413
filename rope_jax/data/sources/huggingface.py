"""Data sets of Hugging Face's `datasets`, saved to a folder, or Parquet files; no downloads."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from rope_jax.data.sources.index import Source, cache_index, write_index

_SPLITS = {"train": ("train",), "test": ("validation", "valid", "val", "test")}


class HuggingFace(Source):
    """One split of a set with one feature of the type `Image` and one of the type `ClassLabel`.

    Examples are ordered by class and file name, as in a class folder; if images have no names, by
    class and in storage order. Parquet files are written once into the cache of `datasets`, which
    maps them.

    Args:
        path: of `save_to_disk`; or a folder with files SPLIT-*.parquet, or data/SPLIT-*.parquet, as
            the hub's repositories have them.
        split: "train" or "test"; the latter is the split "validation" if there is one.

    Raises:
        ValueError: the set has other features, or the package `datasets` is missing.
        FileNotFoundError: the folder has no set, or the set lacks the split.
    """

    def __init__(self, path: str, split: str):
        self._path, self._split = str(Path(path).resolve()), split
        features = self._rows.features
        self._image, self._label = (_only(features, kind, path) for kind in ("Image", "ClassLabel"))
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = " ".join(map(str, (1, self._path, split, facts)))
        super().__init__(cache_index("huggingface", key, self._write))

    def read(self, example: int) -> bytes:
        image = self._rows[int(self.array("places.npy")[example])][self._image]
        return Path(image["path"]).read_bytes() if image["bytes"] is None else image["bytes"]

    def _write(self, folder: Path) -> None:
        rows, classes = self._rows, self._rows.features[self._label].names
        for name in (self._image, self._label):
            if missing := rows.data.column(name).null_count:
                raise ValueError(f"{self._path}: {missing} of {len(rows)} rows have no {name!r}")
        labels = np.array(rows[self._label])
        chunks = rows.data.column(self._image).chunks  # together they may exceed Arrow's 2 GB
        paths = [path for chunk in chunks for path in chunk.field("path").to_pylist()]
        names = [Path(path).name if path else f"{k:09}" for k, path in enumerate(paths)]
        order = sorted(range(len(labels)), key=lambda k: (labels[k], names[k]))
        write_index(
            folder,
            arrays={"places.npy": np.array(order, np.int64)},
            labels=labels[order],
            names=[f"{classes[labels[k]]}/{names[k]}" for k in order],
            class_names=classes,
            name=Path(self._path).name,
            split=self._split,
        )

    @functools.cached_property
    def _rows(self) -> Any:
        """The split; its images are not decoded."""
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                "data source 'huggingface' needs datasets: pip install 'rope_jax[datasets]'"
            ) from error

        datasets.disable_progress_bars()
        folder = Path(self._path)
        if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(self._path)
            splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        else:
            splits = {}
            for file in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
                splits.setdefault(file.stem.partition("-")[0], []).append(str(file))
        stored = next((name for name in _SPLITS[self._split] if name in splits), None)
        if stored is None:
            raise FileNotFoundError(
                f"{self._path} has no split {' or '.join(_SPLITS[self._split])}; it has "
                f"{', '.join(splits) or 'neither a saved set nor files SPLIT-*.parquet'}"
            )
        rows = splits[stored]
        if isinstance(rows, list):
            rows = datasets.load_dataset("parquet", data_files=rows, split="train")
        for name, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows


def _only(features: Any, kind: str, path: str) -> str:
    """The name of the only feature of this type."""
    found = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} features of the type {kind}: there must be one; it has "
            f"{', '.join(f'{name} ({type(x).__name__})' for name, x in features.items())}"
        )
    return found[0]
