"""ImageNet and its variants for evaluation.

The lists in `label_lists/` come with their licences (Apache-2.0): the synsets in the order of the
1,000 classes and the classes of ImageNet-A and ImageNet-R as in timm, and the reassessed labels of
Beyer et al. (arXiv 2006.07159).
"""

import functools
import gzip
import importlib.resources
import json
import os
import re
from pathlib import Path
from typing import Literal

import numpy as np

from rope_jax.data.sources.folder import Files, image_files, list_names
from rope_jax.names.options import convert

EVALUATION_SETS = ("imagenet", "real", "v2", "a", "r", "folder")


def _list(name: str) -> bytes:
    return (importlib.resources.files("rope_jax.data") / "label_lists" / name).read_bytes()


@functools.cache
def synsets() -> tuple[str, ...]:
    """WordNet ids of the 1,000 classes, in their order: n01440764 is class 0."""
    return tuple(_list("imagenet_synsets.txt").decode().split())


@functools.cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """The correct classes of each of the 50,000 validation images; 3,163 images have none."""
    return tuple(map(tuple, json.loads(gzip.decompress(_list("imagenet_real.json.gz")))))


@functools.cache
def subset(name: str) -> tuple[int, ...]:
    """The 200 classes of "a" or "r", as indices into the 1,000."""
    return tuple(int(line) for line in _list(f"imagenet_{name}.txt").decode().split())


class EvaluationSet(Files):
    """The images of an evaluation set and their scoring rule.

    Labels are indices into the competing logits; if several are correct, they are int32 [n, M],
    padded with -1. A model needs as many logits as there are class names.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "n01498041")
    >>> folder.mkdir()
    >>> Image.new("RGB", (8, 8)).save(folder / "ray.png")
    >>> images = EvaluationSet("a", folder.parent)
    >>> images.labels.tolist(), len(images.class_names), len(images.competing)
    ([0], 1000, 200)

    Args:
        variant: "imagenet", "a" or "r", with folders named by synset (n01440764); "v2", with
            folders named by synset or class number; "real", files of the validation set
            (ILSVRC2012_val_00000001.JPEG) in any folders; or "folder", any folder of classes,
            numbered in the order of their names.
        path: the folder.

    Attributes:
        competing: indices of the logits in use, or None for all.
        note: the scoring rule, in words, for the protocol.

    Raises:
        ValueError: no such variant; folders or files with other names, or none.
    """

    def __init__(self, variant: str, path: str | os.PathLike):
        convert(variant, Literal[*EVALUATION_SETS], "dataset")
        root = Path(path)
        class_names, self.competing, self.note = synsets(), None, "all classes compete"
        if variant == "real":
            self.note = "right is any of the reassessed labels, images without one are left out"
            names, labels = _real(root)
        else:
            folders = list_names(root, folders=True)
            if variant == "folder":
                class_names = folders
            if variant in ("a", "r"):
                self.competing, self.note = subset(variant), "only the set's 200 classes compete"
            names, labels = [], []
            for number, name in enumerate(folders):
                files = image_files(root / name)
                label = number if variant == "folder" else _label(name, variant, root)
                names += [f"{name}/{file}" for file in files]
                labels += [label] * len(files)
        if not names:
            raise ValueError(f"{root} has no images of {variant!r}, or is not a folder")
        name = {"folder": root.name, "imagenet": "imagenet"}.get(variant, f"imagenet_{variant}")
        super().__init__(root, names, labels, class_names, name=name, split="files")


def _label(folder: str, variant: str, root: Path) -> int:
    """The index of a folder's class among the competing ones."""
    label = {synset: number for number, synset in enumerate(synsets())}.get(folder)
    if label is None and variant == "v2" and folder.isdecimal():
        label = int(folder)
    classes = subset(variant) if variant in ("a", "r") else range(len(synsets()))
    if label not in classes:
        raise ValueError(
            f"folder {folder!r} of {root} is not named by a synset like n01440764 of one of the "
            f"{len(classes)} classes of {variant!r}: rename it, or use dataset 'folder'"
        )
    return classes.index(label)


def _real(root: Path) -> tuple[list[str], np.ndarray]:
    """Files of the validation set with reassessed labels, and the labels, padded with -1."""
    names, labels = [], []
    for name in image_files(root):
        number = re.search(r"ILSVRC2012_val_(\d{8})", Path(name).name)
        if number is None or not 1 <= int(number[1]) <= len(real_labels()):
            raise ValueError(
                f"{root / name} is not named like ILSVRC2012_val_00000001.JPEG, "
                "whose number identifies its labels"
            )
        if correct := real_labels()[int(number[1]) - 1]:
            names.append(name)
            labels.append(correct)
    width = max(map(len, labels), default=0)
    return names, np.array([correct + (-1,) * (width - len(correct)) for correct in labels])
