"""Image files with a PNG of the classes of their pixels: ADE20k and folders of one's own.

A PNG of classes is grey: its values are numbers of classes. One with a palette or with colours is
refused, because it does not tell which numbers are meant.
"""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from rope_jax.files import open_regular

IGNORED = 255
_IMAGES = (".jpg", ".jpeg", ".webp")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """One split of images and their classes.

    Attributes:
        images, labels: files, in the order of their names.
        class_names: of the classes, in their order.
        zero: what a label of 0 means: "class", the first one, or "none", and 1 the first.
    """

    images: tuple[Path, ...]
    labels: tuple[Path, ...]
    class_names: tuple[str, ...]
    zero: str = "class"

    def classes(
        self, example: int, size: tuple[int, int] | None = None
    ) -> UInt8[np.ndarray, "h w"]:
        """The classes of an image's pixels; 255 for none.

        Args:
            example: number of the image.
            size: (height, width) of the image, where known.

        Raises:
            ValueError: the file is no such PNG, has another size than the image or a value that is
                not of a class; the message names it.
        """
        path = self.labels[example]
        values = read_grey(path)
        if size is not None and values.shape != size:
            raise ValueError(
                f"{path} has {values.shape[0]}x{values.shape[1]} pixels, but its image "
                f"{self.images[example].name} {size[0]}x{size[1]}: both must have the same size"
            )
        if self.zero == "none":
            values = values - np.uint8(1)  # 0 becomes 255
        there = values[values != IGNORED]
        if there.size and there.max() >= len(self.class_names):
            first = int(self.zero == "none")
            last = len(self.class_names) - 1 + first
            raise ValueError(
                f"{path} has the value {there.max() + first}, which is none of its "
                f"{len(self.class_names)} classes: values are {first} to {last}"
                + ("" if first else ", and 255 for no class")
            )
        return values


def read_grey(path: Path) -> UInt8[np.ndarray, "h w"]:
    """The values of a grey PNG of 8 bits.

    Raises:
        ValueError: the file is something else, or damaged; the message names it.
    """
    try:
        with open_regular(path) as file, Image.open(file, formats=["PNG"]) as picture:
            if picture.mode != "L":
                has = {"P": "a palette", "RGB": "colours", "RGBA": "colours"}
                raise ValueError(
                    f"{path} has {has.get(picture.mode, f'pixels of mode {picture.mode}')}; labels "
                    "are grey PNGs of 8 bits whose values are the numbers of classes: convert it"
                )
            return np.array(picture)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as a PNG of labels: {error}") from error


def masks(path: str, split: str) -> Pairs:
    """Images in path/train/ and path/test/ (or path/val/), each NAME.jpg with NAME.png beside it.

    The names of the classes are the lines of path/classes.txt.

    Raises:
        FileNotFoundError: a folder, the list of classes or the labels of an image are missing.
        ValueError: labels without an image.
    """
    root = Path(path)
    folder = root / split
    if split == "test" and not folder.is_dir():
        folder = root / "val"
    return _paired(folder, folder, _names(root / "classes.txt"))


def ade20k(path: str, split: str) -> Pairs:
    """The official folder ADEChallengeData2016: 150 classes, of which a label of 0 is none.

    Raises:
        FileNotFoundError, ValueError: as `masks`.
    """
    part = {"train": "training", "test": "validation"}[split]
    table = _names(Path(path) / "objectInfo150.txt")[1:]  # its first line is a header
    names = tuple(line.split("\t")[-1].strip() for line in table)
    found = _paired(Path(path, "images", part), Path(path, "annotations", part), names)
    return dataclasses.replace(found, zero="none")


def _names(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}, which lists the classes one a line, does not exist")
    return tuple(line.rstrip() for line in path.read_text().splitlines() if line.strip())


def _paired(images: Path, labels: Path, names: tuple[str, ...]) -> Pairs:
    for folder in (images, labels):
        if not folder.is_dir():
            raise FileNotFoundError(f"the folder {folder} does not exist")
    found = sorted(file for file in images.iterdir() if file.suffix.lower() in _IMAGES)
    if not found:
        raise ValueError(f"{images} has no image ({', '.join(_IMAGES)})")
    masks = {file.stem: file for file in labels.iterdir() if file.suffix.lower() == ".png"}
    for file in found:
        if file.stem not in masks:
            raise FileNotFoundError(f"{file} has no labels: {labels / file.stem}.png is missing")
    stems = {file.stem for file in found}
    if alone := sorted(masks.keys() - stems):
        raise ValueError(
            f"{masks[alone[0]]} has no image in {images}: add it, or remove the labels"
        )
    return Pairs(tuple(found), tuple(masks[file.stem] for file in found), names)
