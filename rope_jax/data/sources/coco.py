"""Images with boxes in the form of COCO: folders of images, and a JSON file of annotations each.

A file is read once, whole, and checked: what is wrong with it is found before training begins.
Only flat arrays are kept of it. Segmentations are not read.
"""

import functools
import io
import itertools
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rope_jax.data.images.decode import EncodedImage
from rope_jax.data.sources.boxes import Annotations, StreamedBoxes
from rope_jax.data.sources.folder import Files, listed
from rope_jax.system.files import open_regular

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
        images, objects, categories = read_annotations(file)
        folder = Path(path, file.stem.removeprefix("instances_"))
        _check_folder([image.file_name for image in images], folder, file)
        if split == "train":
            wanted = {one.image_id for one in objects if not one.iscrowd}
            if not wanted:
                raise ValueError(f"no image of {file} has an object to train on")
            images = [image for image in images if image.id in wanted]
            objects = [one for one in objects if one.image_id in wanted]
        arrays = _annotations(images, objects, categories).arrays()
        super().__init__(
            Path(path),
            [f"{folder.name}/{image.file_name}" for image in images],
            np.zeros(len(images), int),
            [name for _, name in categories],
            arrays={_FILE.format(name): array for name, array in arrays.items()},
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
        """The images' fingerprint, and a checksum of annotations and names of classes."""
        names = repr(self.class_names).encode()
        checksum = zlib.crc32(names, self.annotations.checksum())
        return f"{super().fingerprint()}, annotations {checksum:08x}"

    def remarks(self) -> list[str]:
        about = f"{self.name}, {self.split} split"
        return [f"{about}: {one}" for one in self.annotations.remarks()]

    def classes_of(self, example: int) -> list[int]:
        width, height = EncodedImage(self.read(example)).size
        self.annotations.check_size(example, (height, width))
        return np.unique(self.annotations.truth(example).labels).tolist()


def read_annotations(file: Path) -> "_Content":
    """Reads and checks a file of annotations.

    Returns:
        Its images in the order of their ids, its objects, and (id, name) of its categories in the
        order of theirs.

    Raises:
        ValueError: it is damaged, or of another form.
    """
    try:
        with open_regular(file, at_most=_LARGEST) as opened, io.TextIOWrapper(opened, "utf-8") as x:
            # Entries become small as soon as they are read, so that memory holds no polygons.
            return _checked(json.load(x, object_hook=_compact))
    except (ValueError, RecursionError) as error:  # of JSON, too
        raise ValueError(f"{file} is damaged, or not as COCO's: {error}") from error


class _Image(NamedTuple):
    id: int
    file_name: str
    height: int
    width: int


class _Object(NamedTuple):
    id: int
    image_id: int
    category_id: int
    bbox: list[float]  # x, y, width, height
    area: float
    iscrowd: int = 0


def _compact(entry: dict[str, Any]) -> Any:
    """An entry of the file without what is not needed; called for inner entries first."""
    kind = _Object if "image_id" in entry else _Image if "file_name" in entry else None
    if kind is None:
        return entry
    try:
        one = kind(**{name: entry[name] for name in kind._fields if name in entry})
        fits = _is_object(one) if kind is _Object else _is_image(one)
    except TypeError:  # a field is missing, or is of another type
        fits = False
    if not fits:
        entry.pop("segmentation", None)
        raise ValueError(
            f"damaged entry {entry!r:.300}: an image needs id, height and width (whole numbers) "
            "and file_name; an annotation id, image_id and category_id (whole numbers), bbox (four "
            "finite numbers: x, y, width, height) and area; iscrowd is 0 or 1"
        )
    return one


def _is_image(one: _Image) -> bool:
    sizes = 0 < one.height < 1 << 20 and 0 < one.width < 1 << 20
    return _whole(one.id, one.height, one.width) and isinstance(one.file_name, str) and sizes


def _is_object(one: _Object) -> bool:
    ids = _whole(one.id, one.image_id, one.category_id) and one.iscrowd in (0, 1)
    return ids and len(one.bbox) == 4 and all(map(_finite, (*one.bbox, one.area)))


def _whole(*values: Any) -> bool:
    return all(type(x) is int for x in values)


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _checked(content: Any) -> "_Content":
    """The content of a file, images and categories in the order of their ids."""
    parts = [content.get(name) if isinstance(content, dict) else None for name in _SECTIONS]
    for (name, kind), part in zip(_SECTIONS.items(), parts, strict=True):
        listed_as = part if isinstance(part, list) else [None]
        if strange := [entry for entry in listed_as if not isinstance(entry, kind)]:
            raise ValueError(f"its {name} must be a list of entries as COCO's: {strange[0]!r:.80}")
    images, objects, categories = parts
    ids = [(one.get("id"), one.get("name")) for one in categories]
    if not all(_whole(id) and isinstance(name, str) for id, name in ids):
        raise ValueError("its categories must each have a whole number as id, and a name")
    images, categories = sorted(images), sorted(ids)
    for name, entries in (("images", images), ("categories", categories)):
        for (before, *_), (id, *_) in itertools.pairwise(entries):
            if before == id:
                raise ValueError(f"two of its {name} have the id {id}")
    places, classes = {image.id for image in images}, {id for id, _ in categories}
    for one in objects:
        if one.image_id not in places or one.category_id not in classes:
            raise ValueError(
                f"annotation {one.id} has image_id={one.image_id} and category_id="
                f"{one.category_id}, which must be ids of its {len(images)} images and "
                f"{len(classes)} categories: are the annotations of another set?"
            )
    return images, objects, categories


_Content = tuple[list[_Image], list[_Object], list[tuple[int, str]]]
_SECTIONS = {"images": _Image, "annotations": _Object, "categories": dict}


def _annotations(
    images: Sequence[_Image], objects: Sequence[_Object], categories: Sequence[tuple[int, str]]
) -> Annotations:
    """The objects in arrays, in the order of their images."""
    places = {image.id: place for place, image in enumerate(images)}
    classes = {id: label for label, (id, _) in enumerate(categories)}
    owner = np.array([places[one.image_id] for one in objects], np.int64)
    order = np.argsort(owner, kind="stable")
    x, y, width, height = np.array([one.bbox for one in objects], np.float64).reshape(-1, 4).T
    return Annotations(
        sizes=np.array([(image.height, image.width) for image in images], np.int32),
        ends=np.cumsum(np.bincount(owner, minlength=len(images))),
        boxes=np.stack([x, y, x + width, y + height], axis=1)[order],
        labels=np.array([classes[one.category_id] for one in objects], np.int32)[order],
        crowd=np.array([one.iscrowd for one in objects], bool)[order],
        area=np.array([one.area for one in objects], np.float64)[order],
    )


def _annotation_file(folder: Path, part: str) -> Path:
    """The file of annotations of a split."""
    start = f"instances_{part}"
    found = [name for name in listed(folder, folders=False) if name.startswith(start)]
    found = [name for name in found if name.endswith(".json")]
    if len(found) != 1:
        raise FileNotFoundError(
            f"{folder} must have one file {start}*.json, such as {start}2017.json, and has "
            f"{' and '.join(found) or 'none'}"
        )
    return folder / found[0]


def _check_folder(names: Sequence[str], folder: Path, file: Path) -> None:
    """Rejects annotations of images that are not in the folder."""
    there = set(listed(folder, folders=False))
    missing = [name for name in names if name not in there]
    if missing:
        raise FileNotFoundError(
            f"{folder / missing[0]} is missing ({len(missing)} of the {len(names)} images of "
            f"{file} are): add them, or use the annotations of the images that are there"
        )
