"""Images decoded and resized in advance by `python -m rope_jax.data.prepare`.

An image is copied from a file. PATH/train/ and PATH/test/ each hold an index
(`rope_jax.data.sources.index`) and these files:

    images-00000.bin, ...   uint8 pixels [h, w, 3] of all images, in index order
    shapes.npy              int32 [n, 2]: (h, w)
    about.json              also `format` 2, `resized` (in words), `interpolation`, `skipped`, bytes
                            and sha256 of the arrays' `files`, and file, examples, bytes and sha256
                            of the `shards`

The arrays are compared with their checksums whenever a set is opened; the large shards only by
`python -m rope_jax.data.verify`.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import weakref
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from rope_jax.data.sources.index import Source
from rope_jax.system.files import file_sha256

FORMAT = 2


class Packed(Source):
    """One split of a packed set.

    Args:
        path: the folder that `rope_jax.data.prepare` wrote.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the split is missing or was not finished.
        ValueError: another version of the format, or files that have changed since.
    """

    def __init__(self, path: str, split: str):
        super().__init__(Path(path, split).absolute())
        if not (self.index / "about.json").is_file():
            raise FileNotFoundError(
                f"{self.index} holds no packed images, or their preparation was not finished: "
                "run it again"
            )
        if not isinstance(self.about, dict) or self.about.get("format") != FORMAT:
            raise ValueError(
                f"{self.index / 'about.json'} is not of format {FORMAT}: remove the folder, and "
                "prepare it again"
            )
        try:
            changed = self._find_changed()
        except (KeyError, TypeError, AttributeError):
            changed = ["about.json"]
        if changed:
            raise ValueError(
                f"{self.index / changed[0]} was changed after it was written: restore it, or "
                "prepare the set again"
            )

    def _find_changed(self) -> list[str]:
        """Finds the files that differ from `about.json`; shards are compared by length only."""
        arrays, shards = self.about["files"].items(), self.about["shards"]
        sizes = {x["file"]: (self.index / x["file"]).stat().st_size for x in shards}
        changed = [x["file"] for x in shards if sizes[x["file"]] != x["bytes"]]
        changed += ["about.json" for name in sizes if Path(name).name != name]
        changed += [x for x, facts in arrays if file_sha256(self.index / x) != facts["sha256"]]
        missing = sum(x["examples"] for x in shards) != len(self.labels)
        if missing or self.labels.max(initial=-1) >= len(self.class_names):
            changed.append("about.json")
        return changed

    def read(self, example: int) -> UInt8[np.ndarray, "H W 3"]:
        height, width = self.array("shapes.npy")[example].tolist()
        shard = bisect.bisect_right(self._first_examples, example) - 1
        start = int(self._starts[example] - self._starts[self._first_examples[shard]])
        pixels = os.pread(self._shards[shard], height * width * 3, start)
        if len(pixels) < height * width * 3:
            name = self.about["shards"][shard]["file"]
            raise ValueError(f"{name} was shortened after the set was opened: restore it")
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)

    def fingerprint(self) -> str:
        """The fingerprint of any source, and the sha256 of classes, labels, shapes and pixels."""
        content = [self.about[entry] for entry in ("class_names", "files", "shards")]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{super().fingerprint()} content {digest[:16]}"

    def damaged_files(self) -> list[str]:
        """Names of the shards whose content has changed since."""
        return [
            shard["file"]
            for shard in self.about["shards"]
            if file_sha256(self.index / shard["file"]) != shard["sha256"]
        ]

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        sizes = np.prod(self.array("shapes.npy"), axis=1, dtype=np.int64) * 3
        return np.cumsum(sizes) - sizes

    @functools.cached_property
    def _first_examples(self) -> list[int]:
        return [0, *itertools.accumulate(shard["examples"] for shard in self.about["shards"][:-1])]

    @functools.cached_property
    def _shards(self) -> list[int]:
        """Descriptors of the files. Not mapped: a cut file would kill the process (SIGBUS)."""
        files = [self.index / shard["file"] for shard in self.about["shards"]]
        descriptors = [os.open(file, os.O_RDONLY) for file in files]
        for descriptor in descriptors:
            weakref.finalize(self, os.close, descriptor)
        return descriptors
