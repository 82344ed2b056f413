"""ImageNet and its variants to evaluate on: files with the labels that count as right, and images prepared by a stated protocol.

The lists in `labels/` come with their licences (Apache-2.0): the synsets in the order of the 1,000 classes and the classes of ImageNet-A
and ImageNet-R as in timm, and the reassessed labels of Beyer et al. (arXiv 2006.07159).
"""

import dataclasses
import functools
import gzip
import importlib.resources
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from rope_jax.data.decode import decode_image

VARIANTS = ("imagenet", "real", "v2", "a", "r", "folder")
INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_ENDINGS = (".jpeg", ".jpg", ".png", ".webp")


def _list(name: str) -> bytes:
    return (importlib.resources.files("rope_jax.data") / "labels" / name).read_bytes()


@functools.cache
def synsets() -> tuple[str, ...]:
    """WordNet ids of the 1,000 classes, in their order: n01440764 is class 0."""
    return tuple(_list("imagenet_synsets.txt").decode().split())


@functools.cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """Of each of the 50,000 validation images, all classes that are right; 3,163 images have none, and are not scored."""
    return tuple(map(tuple, json.loads(gzip.decompress(_list("imagenet_real.json.gz")))))


@functools.cache
def subset(variant: str) -> tuple[int, ...]:
    """The 200 classes of "a" or "r", as indices into the 1,000."""
    return tuple(int(line) for line in _list(f"imagenet_{variant}.txt").decode().split())


@dataclasses.dataclass(frozen=True)
class Samples:
    """What to evaluate on.

    Attributes:
        name: of the set, for reports.
        files: paths of the images.
        labels: of each, the positions that are right among the logits in use.
        classes: the logits in use, by index, or None for all.
        least: how many logits a model must have.
        note: how it is scored, for the protocol.
    """

    name: str
    files: tuple[str, ...]
    labels: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...] | None
    least: int
    note: str


def samples(variant: str, path: str | os.PathLike) -> Samples:
    """Finds the images of a set.

    Args:
        variant: "imagenet", "a" or "r", whose images lie in folders named by synset (n01440764); "v2", in folders named by synset or by
            class number; "real", files of the validation set (ILSVRC2012_val_00000001.JPEG) in whatever folders; or "folder", any folder of
            classes, numbered in the order of their names.
        path: the folder.

    Raises:
        ValueError: no such variant; folders or files of other names, or none.
        FileNotFoundError: there is no such folder.
    """
    if variant not in VARIANTS:
        raise ValueError(f"dataset {variant!r} is unknown; use one of {', '.join(VARIANTS)}")
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder: give the one that holds the images of {variant!r}")
    if variant == "real":
        return _real(root)
    folders = sorted(child.name for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    files = {name: found for name in folders if (found := image_files(root / name))}
    if not files:
        raise ValueError(f"{root} has no folders of images: {variant!r} needs one folder for each class")
    classes, note = None, "all classes compete"
    if variant == "folder":
        labels, least = {name: number for number, name in enumerate(folders)}, len(folders)
    else:
        labels, least = {name: _class_of(name, variant, root) for name in folders}, len(synsets())
    if variant in ("a", "r"):
        classes, note = subset(variant), "only the set's 200 classes compete"
        if outside := [name for name in folders if labels[name] not in classes]:
            raise ValueError(f"{root} holds {outside[0]}, which is not one of the 200 classes of {variant!r}: is it another set?")
        labels = {name: classes.index(label) for name, label in labels.items()}
    name = {"folder": root.name, "imagenet": "imagenet"}.get(variant, f"imagenet_{variant}")
    pairs = [(file, (labels[folder],)) for folder, found in files.items() for file in found]
    return Samples(name, *map(tuple, zip(*pairs, strict=True)), classes, least, note)


def _class_of(folder: str, variant: str, root: Path) -> int:
    if folder in synsets():
        return synsets().index(folder)
    if variant == "v2" and folder.isdecimal() and int(folder) < len(synsets()):
        return int(folder)
    raise ValueError(f"folder {folder!r} of {root} is not named by a synset like n01440764: rename it, or use dataset 'folder'")


def image_files(path: str | os.PathLike) -> list[str]:
    """The images in a folder and the folders within, sorted; or the file itself."""
    path = Path(path)
    if path.is_file():
        return [str(path)]
    return sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in _ENDINGS and not file.name.startswith("."))


def _real(root: Path) -> Samples:
    pairs = []
    for file in image_files(root):
        number = re.search(r"ILSVRC2012_val_(\d{8})", Path(file).name)
        if number is None or not 1 <= int(number[1]) <= len(real_labels()):
            raise ValueError(f"{file} is not named like ILSVRC2012_val_00000001.JPEG, which says which labels are its own")
        if right := real_labels()[int(number[1]) - 1]:
            pairs.append((file, right))
    if not pairs:
        raise ValueError(f"{root} has no validation images that are scored")
    note = "right is any of the reassessed labels, images without one are left out"
    return Samples("imagenet_real", *map(tuple, zip(*pairs, strict=True)), None, len(synsets()), note)


def prepare(image: UInt8[np.ndarray, "H W 3"], size: tuple[int, int], *, crop: float, interpolation: str) -> UInt8[np.ndarray, "h w 3"]:
    """Resizes so that `crop` of the image's height or width is `size`, and keeps the centre, as torchvision does.

    The sides to which it is resized are rounded down; where the cut leaves an odd number of pixels, half is rounded to even. Antialiased.

    Args:
        image: uint8 [H, W, 3].
        size: (h, w) in pixels.
        crop: share in (0, 1].
        interpolation: a key of `INTERPOLATIONS`.
    """
    height, width = image.shape[:2]
    target = [math.floor(side / crop) for side in size]
    if target[0] * width >= target[1] * height:  # the height decides
        full = (target[0], max(int(target[0] * width / height), target[1]))
    else:
        full = (max(int(target[1] * height / width), target[0]), target[1])
    top, left = (round((whole - side) / 2) for whole, side in zip(full, size, strict=True))
    # Only what is kept is resized, to the same pixels: of a thin strip the whole would not fit into memory.
    down, across = height / full[0], width / full[1]
    box = (left * across, top * down, min((left + size[1]) * across, width), min((top + size[0]) * down, height))
    return np.array(Image.fromarray(image).resize((size[1], size[0]), INTERPOLATIONS[interpolation], box=box))


def read(file: str, size: tuple[int, int], *, crop: float = 1.0, interpolation: str = "bicubic") -> UInt8[np.ndarray, "h w 3"]:
    """One file, see `prepare`; ValueError names the file where it cannot be read."""
    try:
        return prepare(decode_image(Path(file).read_bytes()), size, crop=crop, interpolation=interpolation)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: {error}") from error


def file_batches(
    found: Samples, size: tuple[int, int], *, batch_size: int, crop: float = 1.0, interpolation: str = "bicubic", threads: int = 8
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of one shape; two of them are in memory at a time.

    Args:
        found: from `samples`.
        size: (h, w) in pixels.
        batch_size: images in each; the last is filled up.
        crop, interpolation: see `prepare`.
        threads: that decode.

    Yields:
        "image" uint8 [B, h, w, 3], "label" int32 [B, M] with -1 where an image has fewer than M right labels, "mask" bool [B].

    Raises:
        ValueError: an image cannot be read; the message names the file.
    """
    width = max(map(len, found.labels))
    rows = itertools.batched(zip(found.files, found.labels, strict=True), batch_size)
    with ThreadPoolExecutor(threads) as pool:

        def start(chunk: Sequence[tuple]) -> tuple[list, list]:
            futures = [pool.submit(read, file, size, crop=crop, interpolation=interpolation) for file, _ in chunk]
            return futures, [labels for _, labels in chunk]

        waiting = start(next(rows))
        for chunk in rows:
            coming = start(chunk)  # is decoded while this batch is in use
            yield _batch(*waiting, batch_size, width, size)
            waiting = coming
        yield _batch(*waiting, batch_size, width, size)


def _batch(futures: list, labels: Sequence[tuple[int, ...]], batch_size: int, width: int, size: tuple[int, int]) -> dict[str, np.ndarray]:
    batch = {
        "image": np.zeros((batch_size, *size, 3), np.uint8),
        "label": np.full((batch_size, width), -1, np.int32),
        "mask": np.arange(batch_size) < len(futures),
    }
    for row, (future, right) in enumerate(zip(futures, labels, strict=True)):
        batch["image"][row] = future.result()
        batch["label"][row, : len(right)] = right
    return batch
