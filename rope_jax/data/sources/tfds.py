"""Data sets prepared by tensorflow-datasets, read from their array_record files.

TensorFlow is neither needed nor imported.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from rope_jax.data.sources.index import Source, cache_index, write_index

# Features with the name of an image's file, in order of preference.
_NAMES = ("file_name", "filename", "image/filename", "image_id", "id")
_SPLITS = {"train": ("train",), "test": ("validation", "test")}


class Tfds(Source):
    """One split of a prepared set with the features `image` and `label`.

    Examples are ordered by class and file name (the feature `file_name` or a similar one), as in a
    class folder, otherwise in storage order. Labels are the set's own; they agree with those of a
    class folder if the set's classes are in the order of their names, as ImageNet's are. To find
    the order, every record is read once; the order is kept in the cache folder.

    Args:
        path: the folder of a version of the set: ~/tensorflow_datasets/imagenet2012/5.1.0.
        split: "train" or "test"; the latter is the split "validation" if there is one.

    Raises:
        ValueError: the set is not in array_record files or has other features, or the package
            tensorflow-datasets is missing.
        FileNotFoundError: the set lacks the split.
    """

    def __init__(self, path: str, split: str):
        self._path = str(Path(path).resolve())
        builder = _builder(self._path)
        stored = next((name for name in _SPLITS[split] if name in builder.info.splits), None)
        if stored is None:
            raise FileNotFoundError(
                f"{path} has no split {' or '.join(_SPLITS[split])}; "
                f"it has {', '.join(builder.info.splits)}"
            )
        self._stored = stored
        if missing := {"image", "label"} - set(builder.info.features):
            raise ValueError(
                f"{path} has no feature {', '.join(sorted(missing))}; "
                f"it has {', '.join(builder.info.features)}"
            )
        info = builder.info.splits[stored]
        facts = (info.num_examples, info.num_bytes, info.shard_lengths, builder.info.release_notes)
        key = " ".join(map(str, (2, self._path, stored, *facts)))
        write = functools.partial(self._write, builder=builder, split=split)
        super().__init__(cache_index("tfds", key, write))

    def read(self, example: int) -> bytes:
        return self._records[int(self.array("places.npy")[example])]["image"]

    def _write(self, folder: Path, builder: Any, split: str) -> None:
        feature = next((name for name in _NAMES if name in builder.info.features), None)
        labels, names = [], []
        for place in range(len(self._records)):
            record = self._records[place]
            labels.append(int(record["label"]))
            text = record[feature] if feature is not None else f"{place:09}"
            names.append(Path(text.decode() if isinstance(text, bytes) else str(text)).name)
        classes = builder.info.features["label"].names or [str(k) for k in range(max(labels) + 1)]
        order = list(range(len(labels)))
        if feature is not None:
            order.sort(key=lambda k: (labels[k], names[k]))
        write_index(
            folder,
            arrays={"places.npy": np.array(order, np.int64)},
            labels=[labels[k] for k in order],
            names=[f"{classes[labels[k]]}/{names[k]}" for k in order],
            class_names=classes,
            name=builder.info.name,
            split=split,
        )

    @functools.cached_property
    def _records(self) -> Any:
        import tensorflow_datasets as tfds

        return _builder(self._path).as_data_source(
            self._stored, decoders={"image": tfds.decode.SkipDecoding()}
        )


def _builder(path: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            "data source 'tfds' needs tensorflow-datasets: pip install 'rope_jax[data]'"
        ) from error

    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is not a folder of tensorflow-datasets")
    builder = tfds.builder_from_directory(path)
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise ValueError(
            f"{path} is stored as {builder.info.file_format.value}, which cannot be read by "
            "number; prepare it again with tfds build --file_format=array_record"
        )
    return builder
