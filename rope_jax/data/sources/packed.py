"""Images decoded and resized in advance by `python -m rope_jax.data.prepare`.

Reading one is a copy from a mapped file. PATH/train/ and PATH/test/ each hold an index
(`rope_jax.data.sources.index`) and beside it:

    images-00000.bin, ...   uint8 pixels [h, w, 3] of one image after the other, in index order
    shapes.npy              int32 [n, 2]: (h, w)
    about.json              also `format` 2, `resized` (in words), `interpolation`, `skipped`, and
                            file, examples, bytes and sha256 of the `shards`

The index is compared with its checksums whenever it is opened; the shards, which are large, by
`python -m rope_jax.data.verify`.
"""

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from rope_jax.data.sources.index import Source
from rope_jax.files import has_sha256, open_regular, read_json

FORMAT = 2


class Packed(Source):
    """One split of a packed set.

    Args:
        path: the folder that `rope_jax.data.prepare` wrote.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the split is missing or was not finished.
        ValueError: another version of the format, a damaged index, shards of the wrong length, or
            an index that does not match them.
    """

    def __init__(self, path: str, split: str):
        super().__init__(Path(path, split).absolute())
        if not (self.index / "about.json").is_file():
            raise FileNotFoundError(
                f"{self.index} holds no packed images, or their preparation was not finished: "
                "run it again"
            )
        stored = read_json(self.index / "about.json")
        version = stored.get("format") if isinstance(stored, dict) else None
        if version != FORMAT:
            raise ValueError(
                f"{self.index} is of format {version!r}; this version reads format {FORMAT}: "
                "remove it, and prepare it again"
            )
        try:
            self.check_index()
            self._check_shards()
            self._check_lengths()
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"{self.index}: about.json is not as this program writes it ({error!r}): prepare "
                "it again"
            ) from error

    def _check_shards(self) -> None:
        for shard in self.about["shards"]:
            if Path(shard["file"]).name != shard["file"]:
                raise ValueError(
                    f"{self.index} names the file {shard['file']!r}, "
                    "which is not one of its own: prepare it again"
                )
            with open_regular(self.index / shard["file"]):
                size = (self.index / shard["file"]).stat().st_size
            if size != shard["bytes"]:
                raise ValueError(
                    f"{self.index / shard['file']} has {size:,} bytes; "
                    f"{shard['bytes']:,} were written: prepare it again"
                )

    def _check_lengths(self) -> None:
        shards, count = self.about["shards"], len(self.labels)
        numbers = [shard["examples"] for shard in shards]
        fits = self._shapes.shape == (count, 2) and len(self._ends) == sum(numbers) == count
        if fits and self._shapes.min() >= 1 and min(numbers) >= 1:
            lengths = np.add.reduceat(self._sizes, self._first_examples).tolist()
            fits = lengths == [shard["bytes"] for shard in shards]
        else:
            fits = False
        if not fits or self.labels.min() < 0 or self.labels.max() >= len(self.class_names):
            raise ValueError(
                f"{self.index}: labels, shapes and shards do not fit each other: prepare it again"
            )

    def read(self, example: int) -> UInt8[np.ndarray, "H W 3"]:
        height, width = (int(side) for side in self._shapes[example])
        shard = bisect.bisect_right(self._first_examples, example) - 1
        start = int(self._starts[example] - self._starts[self._first_examples[shard]])
        return self._shard(shard)[start : start + height * width * 3].reshape(height, width, 3)

    def fingerprint(self) -> str:
        """As of other sources, and the sha256 of classes, labels, shapes and pixels."""
        content = [self.about[entry] for entry in ("class_names", "files", "shards")]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{super().fingerprint()} content {digest[:16]}"

    def damaged(self, intact: Callable[[Path, str], bool] = has_sha256) -> list[str]:
        """Names of the shards whose content has changed since; see `Source.damaged`."""
        return [
            shard["file"]
            for shard in self.about["shards"]
            if not intact(self.index / shard["file"], shard["sha256"])
        ]

    @functools.cached_property
    def _shapes(self) -> np.ndarray:
        return self.array("shapes.npy")

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum(self._sizes) - self._sizes

    @property
    def _sizes(self) -> np.ndarray:
        return np.prod(self._shapes, axis=1, dtype=np.int64) * 3

    @functools.cached_property
    def _first_examples(self) -> list[int]:
        return [0, *itertools.accumulate(shard["examples"] for shard in self.about["shards"][:-1])]

    def _shard(self, number: int) -> np.ndarray:
        mapped = self.__dict__.setdefault("_mapped", {})
        if number not in mapped:
            file = self.index / self.about["shards"][number]["file"]
            # An array, because slices of a memmap are slow.
            mapped[number] = np.asarray(np.memmap(file, np.uint8, mode="r"))
        return mapped[number]
