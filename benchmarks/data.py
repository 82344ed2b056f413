"""Images per second and CPU core of the data loader, compared with decoding by Pillow.

    ROPE_JAX_TEST_IMAGES=FOLDER python -m benchmarks data --out benchmarks/results/data_cpu.json

Creates a class folder and packed sets from the photographs of --images, and loads each of them in
one process, without a training step. Rates are per second of CPU time, so that other programs on
the machine have little effect; the loaders run in turns, and the median is reported. `by hand` is
the minimum work of a loader based on Pillow: decode, crop, resize.
"""

import contextlib
import functools
import io
import itertools
import os
import pathlib
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from benchmarks._runner import Keep
from rope_jax.data import batches, decode_image, load
from rope_jax.data.images.crops import resized_crop
from rope_jax.data.packing import prepare
from rope_jax.data.sources.folder import Folder

SIZE = (224, 224)
CROP = "resized_crop+flip"
PILLOW = "Pillow's decoding"
DRAWS = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64).tolist()
COLUMNS = ("loader", "images/s per core", "relative to Pillow's decoding")


def pillow(data: bytes) -> Image.Image:
    """Decodes an image with Pillow."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def by(decode: Callable[[bytes], Any], files: Sequence[bytes]) -> None:
    """Decodes images into arrays."""
    for data in files:
        np.asarray(decode(data))


def by_hand(files: Sequence[bytes]) -> None:
    """Decodes, crops and resizes with Pillow."""
    for data, draw in zip(files, DRAWS, strict=False):
        image = pillow(data)
        box = resized_crop(*image.size, SIZE, draw)
        np.asarray(image.resize(SIZE, box.interpolation, box=box.edges))


def epoch(source: str, path: str, augment: str, files: Sequence[bytes]) -> None:
    """Loads all full batches of 32, in this process."""
    images = load(source, path, "train", SIZE)
    stream = batches(images, batch_size=32, seed=0, augment=augment)
    for _ in itertools.islice(stream, len(files) // 32):
        pass


def write_sets(files: Sequence[bytes], place: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Writes the files as a class folder and packed sets; returns (source, path) by name."""
    folder = place / "photographs"
    for k in range(4):
        (folder / "train" / f"{k}").mkdir(parents=True)
        for i, data in enumerate(files[k::4]):
            (folder / "train" / f"{k}" / f"{i}.jpg").write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(Folder(str(folder), "train"), place / "packed")
        prepare(Folder(str(folder), "train"), place / "squares", square=True)
    return {
        "folder": ("folder", str(folder)),
        "packed": ("packed", f"{place}/packed"),
        "packed squares": ("packed", f"{place}/squares"),
    }


_DEFAULT = pathlib.Path(os.environ.get("ROPE_JAX_TEST_IMAGES", "."), "imagenet_photos_334.tar")


def run(
    keep: Keep,
    *,
    images: pathlib.Path = _DEFAULT,
    tfds: str | None = None,
    rounds: int = 5,
) -> None:
    """Measures the loaders.

    Args:
        keep: saves the result.
        images: a tar archive of JPEG files; default: a file in $ROPE_JAX_TEST_IMAGES
        tfds: folder of the same images, prepared by tensorflow-datasets
        rounds: measurements of each loader
    """
    with tarfile.open(images) as archive:
        members = [x for x in archive if x.name.lower().endswith((".jpg", ".jpeg"))]
        files = [archive.extractfile(x).read() for x in members]
    with tempfile.TemporaryDirectory() as place:
        sets = write_sets(files, pathlib.Path(place))
        if tfds:
            sets["tfds"] = ("tfds", tfds)
        ways: dict[str, Any] = {
            PILLOW: functools.partial(by, pillow),
            "decode_image": functools.partial(by, decode_image),
            "by hand": by_hand,
            **{f"{name}: {CROP}": functools.partial(epoch, *x, CROP) for name, x in sets.items()},
            "folder: centre": functools.partial(epoch, *sets["folder"], "none"),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _, (name, way) in itertools.product(range(rounds), ways.items()):
            count = len(files) // 32 * 32 if ":" in name else len(files)
            begun = time.process_time()
            way(files)
            rates[name].append(count / (time.process_time() - begun))
    rows = []
    for name, each in rates.items():
        ratio = statistics.median(x / y for x, y in zip(each, rates[PILLOW], strict=True))
        rows.append([name, f"{statistics.median(each):.0f}", f"{ratio:.2f}"])
    settings = {"images": images.name, "tfds": bool(tfds), "rounds": rounds}
    note = f"{len(files)} photographs, to {SIZE[0]} px."
    keep(settings=settings, columns=COLUMNS, rows=rows, note=note, images_per_cpu_second=rates)
