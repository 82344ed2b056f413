"""Images with boxes in the form of COCO: folders of images, and a JSON file of annotations each.

A file is read once, whole, and checked: what is wrong with it is found before training begins.
Only flat arrays are kept of it. Segmentations are checked, but not used.
"""

import functools
import io
import itertools
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rope_jax.data.images.decode import EncodedImage
from rope_jax.data.sources.boxes import Annotations, StreamedBoxes
from rope_jax.data.sources.folder import Files, listed
from rope_jax.files import open_regular

_LARGEST = 1 << 32  # bytes of a file of annotations; the official ones have less than 500 MB
_FILE = "annotated_{}.npy"  # an array of the index
_PARTS = {"train": "train", "test": "val"}


class Coco(Files):
    """One split of a set in the form of COCO; "test" is the validation split.

    Images are in path/train2017/ and path/val2017/, annotations in path/annotations/
    instances_train2017.json and instances_val2017.json; a set of one's own may have another ending
    than 2017. Classes are the categories in the order of their ids, images stand in the order of
    theirs. Images of the training split without an object, or with crowds only, are left out, as
    detectron2 does.

    Args:
        path: the set.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the annotations, the folder or an image are missing.
        ValueError: the annotations are damaged, or of another set.
    """

    labels_of = "boxes"

    def __init__(self, path: str, split: str):
        file = _annotation_file(Path(path, "annotations"), _PARTS[split])
        found = read_annotations(file)
        folder = Path(path, file.stem.removeprefix("instances_"))
        _check_folder(found.names, folder, file)
        kept = np.arange(len(found.names))
        if split == "train":
            kept = np.unique(found.annotations.images[~found.annotations.crowd])
            if not len(kept):
                raise ValueError(f"no image of {file} has an object to train on")
        super().__init__(
            Path(path),
            [f"{folder.name}/{found.names[k]}" for k in kept.tolist()],
            np.zeros(len(kept), int),
            found.class_names,
            arrays={
                _FILE.format(name): array
                for name, array in _chosen(found.annotations, kept).arrays().items()
            },
            name=Path(path).resolve().name,
            split=split,
        )

    def streamed(self, size: tuple[int, int], crop: str | None = None) -> StreamedBoxes:
        return StreamedBoxes(self, size, crop or "fit(short=800,long=1333)")

    @functools.cached_property
    def annotations(self) -> Annotations:
        """The objects of all images."""
        names = Annotations.__dataclass_fields__
        return Annotations(**{name: self.array(_FILE.format(name)) for name in names})

    def fingerprint(self) -> str:
        """That of the images, and a checksum of the annotations and the names of the classes."""
        names = repr(self.class_names).encode()
        checksum = zlib.crc32(names, self.annotations.checksum())
        return f"{super().fingerprint()}, annotations {checksum:08x}"

    def remarks(self) -> list[str]:
        about = f"{self.name}, {self.split} split"
        return [f"{about}: {one}" for one in self.annotations.remarks()]

    def classes_of(self, example: int) -> list[int]:
        width, height = EncodedImage(self.read(example)).size
        if [height, width] != (size := self.annotations.sizes[example].tolist()):
            raise ValueError(
                f"it has {height}x{width} pixels, but is annotated as one of {size[0]}x{size[1]}"
            )
        return np.unique(self.annotations.truth(example).labels).tolist()


class Read(NamedTuple):
    """What is in a file of annotations: the images' file names, class names and objects."""

    names: list[str]
    class_names: list[str]
    annotations: Annotations


def read_annotations(file: Path) -> Read:
    """Reads and checks a file of annotations.

    Raises:
        ValueError: it is damaged, or of another form.
    """
    try:
        with open_regular(file, at_most=_LARGEST) as opened, io.TextIOWrapper(opened, "utf-8") as x:
            # Entries become small as soon as they are read, so that memory holds no polygons.
            content = json.load(x, object_hook=_compact)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; was it downloaded completely?") from error
    except _Wrong as error:
        raise ValueError(f"{file}: {error}") from error
    try:
        return _arranged(content)
    except _Wrong as error:
        raise ValueError(f"{file}: {error}") from error


class _Wrong(Exception):
    """What is wrong with annotations, without the name of the file."""


class _Image(NamedTuple):
    id: int
    name: str
    height: int
    width: int


class _Object(NamedTuple):
    id: int
    image: int
    category: int
    box: tuple[float, ...]  # x, y, width, height
    area: float
    crowd: bool
    mask: tuple[int, ...] | None  # (height, width) of a mask that is stored in runs


def _compact(entry: dict[str, Any]) -> Any:
    """An entry of the file without what is not needed; called for inner entries first."""
    if "image_id" in entry:
        return _object(entry)
    if "file_name" in entry:
        return _image(entry)
    return entry


def _image(entry: dict[str, Any]) -> _Image:
    name, sides = entry["file_name"], (entry.get("height"), entry.get("width"))
    whole = all(type(x) is int for x in (entry.get("id"), *sides))
    if not whole or not isinstance(name, str) or not 0 < min(sides) <= max(sides) < 1 << 20:
        raise _Wrong(
            f"the image {name!r:.80} has id={entry.get('id')!r:.40}, height={sides[0]!r:.40} and "
            f"width={sides[1]!r:.40}: an image needs a whole number for each, and a file_name"
        )
    return _Image(entry["id"], name, *sides)


def _object(entry: dict[str, Any]) -> _Object:
    about = f"annotation {entry.get('id')!r:.40}"
    for name in ("id", "image_id", "category_id"):
        if type(entry.get(name)) is not int:
            raise _Wrong(
                f"{about} has {name}={entry.get(name)!r:.40}, which must be a whole number (boxes "
                "are in the files called instances_*.json)"
            )
    box, area, crowd = entry.get("bbox"), entry.get("area"), entry.get("iscrowd", 0)
    if not _finite(box) or len(box) != 4:
        raise _Wrong(
            f"{about} has bbox={box!r:.80}, which must be four finite numbers: x, y, width, height"
        )
    if not _finite([area]) or crowd not in (0, 1):
        raise _Wrong(
            f"{about} has area={area!r:.40} and iscrowd={crowd!r:.40}: the first must be a finite "
            "number, the second 0 or 1"
        )
    mask, segmentation = None, entry.get("segmentation")
    if isinstance(segmentation, dict):
        mask = _runs(segmentation, about)
    elif segmentation:
        _check_polygons(segmentation, about)
    box = tuple(map(float, box))
    ids = (entry["id"], entry["image_id"], entry["category_id"])
    return _Object(*ids, box, float(area), bool(crowd), mask)


def _finite(values: Any) -> bool:
    """Whether it is a list of finite numbers."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        return False
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # an integer beyond all floats
        return False


def _check_polygons(polygons: Any, about: str) -> None:
    """Rejects what is no list of polygons, of which one at least has three corners."""
    if not isinstance(polygons, list) or not all(map(_finite, polygons)):
        raise _Wrong(
            f"{about} has a damaged segmentation: polygons are lists of finite numbers, x, y, ..."
        )
    if any(len(polygon) % 2 for polygon in polygons) or max(map(len, polygons)) < 6:
        lengths = ", ".join(str(len(polygon)) for polygon in polygons[:8])
        raise _Wrong(
            f"{about} has a damaged segmentation: its polygons have {lengths} numbers; they must "
            "be pairs x, y of three corners or more"
        )


def _runs(mask: dict[str, Any], about: str) -> tuple[int, int]:
    """The (height, width) of a mask stored in runs, which must cover it."""
    size, counts = mask.get("size"), mask.get("counts")
    if not _finite(size) or len(size) != 2 or min(size) < 1 or not all(x == int(x) for x in size):
        raise _Wrong(f"{about} has a damaged RLE: its size={size!r:.40} must be height and width")
    height, width = map(int, size)
    try:
        lengths = _unpacked(counts) if isinstance(counts, str) else counts
    except ValueError as error:
        raise _Wrong(f"{about} has a damaged RLE: {error}") from error
    whole = isinstance(lengths, list) and all(type(x) is int and x >= 0 for x in lengths)
    if not whole or sum(lengths) != height * width:
        covered = f"of {sum(lengths)} pixels" if whole else "that are not all whole numbers"
        raise _Wrong(
            f"{about} has a damaged RLE: it has runs {covered} for a mask of {height}x{width}"
        )
    return height, width


def _unpacked(text: str) -> list[int]:
    """The lengths of runs in pycocotools' packed form.

    Each number is in groups of five bits, low ones first, a sign bit in the last; from the fourth
    on it is the difference from the number two before.

    Raises:
        ValueError: the text is damaged.
    """
    lengths: list[int] = []
    value = shift = 0
    for letter in text:
        group = ord(letter) - 48
        if not 0 <= group < 64 or shift > 60:
            raise ValueError(f"its counts have the character {letter!r} where none can be")
        value |= (group & 31) << shift
        shift += 5
        if group & 32:
            continue
        if group & 16:
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("its counts end within a number")
    return lengths


def _arranged(content: Any) -> Read:
    """The content of a file in arrays, images in the order of their ids."""
    parts = [content.get(n) if isinstance(content, dict) else None for n in _SECTIONS]
    for (name, kind), part in zip(_SECTIONS.items(), parts, strict=True):
        if not isinstance(part, list):
            raise _Wrong(f"it has no list of {name}: it is no file of annotations of COCO's form")
        for number, entry in enumerate(part):
            if not isinstance(entry, kind):
                raise _Wrong(f"number {number} of its {name} is none: {entry!r:.80}")
    images, objects, categories = parts
    if not images:
        raise _Wrong("it has no images")
    ids = [(one.get("id"), one.get("name")) for one in categories]
    if not ids or not all(type(id) is int and isinstance(name, str) for id, name in ids):
        raise _Wrong("its categories must each have a whole number as id, and a name")
    images, categories = sorted(images), sorted(ids)
    for name, found in (("images", images), ("categories", categories)):
        numbers = [one[0] for one in found]
        if len(set(numbers)) < len(numbers):
            twice = next(a for a, b in itertools.pairwise(numbers) if a == b)
            raise _Wrong(f"two of its {name} have the id {twice}")
    names, class_names = [one.name for one in images], [name for _, name in categories]
    return Read(names, class_names, _annotations(images, objects, [id for id, _ in categories]))


_SECTIONS = {"images": _Image, "annotations": _Object, "categories": dict}


def _annotations(
    images: Sequence[_Image], objects: Sequence[_Object], categories: Sequence[int]
) -> Annotations:
    places = {image.id: place for place, image in enumerate(images)}
    classes = {id: label for label, id in enumerate(categories)}
    for one in objects:
        if one.image not in places:
            raise _Wrong(
                f"annotation {one.id} is of the image {one.image}, which is none of its "
                f"{len(images)} images: the annotations are of another set"
            )
        if one.category not in classes:
            raise _Wrong(
                f"annotation {one.id} has the category {one.category}, which is none of its "
                f"{len(classes)} categories"
            )
        image = images[places[one.image]]
        if one.mask not in (None, (image.height, image.width)):
            raise _Wrong(
                f"annotation {one.id} has a damaged RLE: a mask of {one.mask[0]}x{one.mask[1]} "
                f"pixels, but its image has {image.height}x{image.width}"
            )
    owner = np.array([places[one.image] for one in objects], np.int64)
    order = np.argsort(owner, kind="stable")
    x, y, width, height = np.array([one.box for one in objects], np.float64).reshape(-1, 4).T
    return Annotations(
        sizes=np.array([(image.height, image.width) for image in images], np.int32),
        ends=np.cumsum(np.bincount(owner, minlength=len(images))),
        boxes=np.stack([x, y, x + width, y + height], axis=1)[order],
        labels=np.array([classes[one.category] for one in objects], np.int32)[order],
        crowd=np.array([one.crowd for one in objects], bool)[order],
        area=np.array([one.area for one in objects], np.float64)[order],
    )


def _chosen(annotations: Annotations, kept: np.ndarray) -> Annotations:
    """The annotations of some images, in ascending order."""
    own = np.isin(annotations.images, kept)
    counts = np.bincount(annotations.images, minlength=len(annotations.ends))[kept]
    objects = ("boxes", "labels", "crowd", "area")
    return Annotations(
        sizes=annotations.sizes[kept],
        ends=np.cumsum(counts),
        **{name: getattr(annotations, name)[own] for name in objects},
    )


def _annotation_file(folder: Path, part: str) -> Path:
    """The file of annotations of a split."""
    found = [n for n in listed(folder, folders=False) if n.startswith(f"instances_{part}")]
    found = [name for name in found if name.endswith(".json")]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no file instances_{part}*.json, such as instances_{part}2017.json"
        )
    if len(found) > 1:
        raise ValueError(f"{folder} has {' and '.join(found)}: leave the one that is meant")
    return folder / found[0]


def _check_folder(names: Sequence[str], folder: Path, file: Path) -> None:
    """Rejects annotations of images that are not in the folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}, the folder of the images of {file}, does not exist")
    there = set(listed(folder, folders=False))
    missing = [name for name in names if name not in there]
    if missing and len(missing) == len(names):
        raise FileNotFoundError(
            f"{folder} has none of the {len(names)} images of {file}: the annotations are of "
            "another set, or the images are elsewhere"
        )
    if missing:
        raise FileNotFoundError(
            f"{folder / missing[0]} is missing ({len(missing)} of the {len(names)} images of "
            f"{file} are): add them, or use the annotations of these images"
        )
