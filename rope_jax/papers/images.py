"""Images of --data: files of packed JPEGs become files of pixels."""

import dataclasses
import itertools
import pathlib
import zlib

import numpy as np

from rope_jax import data
from rope_jax.papers.lab import Lab
from rope_jax.system.npz import open_npz


def is_packed(path: str) -> bool:
    """Checks if a path is that of an .npz file of packed JPEGs.

    Raises:
        ValueError: the file does not hold images.
        OSError: it cannot be read.
    """
    if not path.endswith(".npz"):
        return False
    with open_npz(path) as file:
        names = file.shapes.keys()
    needed = {f"{split}_{kind}" for split in ("train", "test") for kind in ("images", "labels")}
    if "body" not in names and not needed <= names:
        raise ValueError(
            f"{path} holds {', '.join(sorted(names)) or 'no arrays'}: it must hold train_images, "
            "train_labels, test_images and test_labels, or packed JPEGs"
        )
    return "body" in names


def unpack(lab: Lab) -> Lab:
    """The lab with pixels in place of packed JPEGs, which are decoded once into its workdir."""
    path = pathlib.Path(lab.data.get("images", ""))
    if not is_packed(str(path)):
        return lab
    content = path.stat()
    version = f"{path.resolve()} {content.st_size} {content.st_mtime_ns}"
    pixels = lab.workdir / f"images-{zlib.crc32(version.encode()):08x}" / path.name
    if not pixels.exists():
        pixels.parent.mkdir(parents=True, exist_ok=True)
        temporary = pixels.with_suffix(".part.npz")
        try:
            np.savez(temporary, **decode_packed(path))
            temporary.rename(pixels)
        finally:
            temporary.unlink(missing_ok=True)
    return dataclasses.replace(lab, data=dict(lab.data) | {"images": str(pixels)})


def decode_packed(file: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays train_images, train_labels, test_images and test_labels of packed JPEGs.

    Args:
        file: with an array `body`, in which image k is from offsets[k] to offsets[k + 1], without
            its first bytes. These are in `header`, or in the piece header_id[k] of it, from
            header_offsets[i] to header_offsets[i + 1]. `split` is 0 for training and 1 for test
            images; without it, the first 50,000 are for training. `labels` are renumbered from 0
            without gaps.
    """
    stored = dict(np.load(file, allow_pickle=False))
    body, offsets, header = stored["body"].tobytes(), stored["offsets"], stored["header"].tobytes()
    starts = stored.get("header_offsets", [0, len(header)])
    header_ids = stored.get("header_id", np.zeros(len(offsets) - 1, int))
    headers = [header[start:end] for start, end in itertools.pairwise(starts)]
    pieces = zip(header_ids, itertools.pairwise(offsets), strict=True)
    images = np.stack([data.decode_image(headers[i] + body[a:b]) for i, (a, b) in pieces])
    labels = np.unique(stored["labels"], return_inverse=True)[1].astype(np.int32)
    split = stored.get("split", np.arange(len(labels)) >= 50_000)
    return {
        f"{name}_{kind}": values[split == number]
        for number, name in enumerate(("train", "test"))
        for kind, values in (("images", images), ("labels", labels))
    }
