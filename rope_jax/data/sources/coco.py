"""Images with boxes in the form of COCO: folders of images, each with a JSON file of annotations.

A file is read once, as a whole, and checked, so that errors are detected before training begins.
Only flat arrays are kept, of masks their run lengths.
"""

import dataclasses
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
from rope_jax.data.images.masks import encode_outline
from rope_jax.data.sources.boxes import (
    Annotations,
    MaskAnnotations,
    StreamedBoxes,
    add_masks,
)
from rope_jax.data.sources.folder import Files, list_files, list_names
from rope_jax.system.files import open_regular

_LARGEST = 1 << 32  # bytes of a file of annotations; the official ones have less than 500 MB
_FILE = "annotated_{}.npy"  # an array of the index
_PARTS = {"train": "train", "test": "val"}


class Coco(Files):
    """One split of a set in the form of COCO; "test" is the validation split.

    Images are in path/train2017/ and path/val2017/, annotations in path/annotations/
    instances_train2017.json and instances_val2017.json; a custom set may have another suffix than
    2017. Classes and images are in the order of their ids. Images of the training split without an
    object, or with crowds only, are left out, as in detectron2.

    Args:
        path: the set.
        split: "train" or "test".
        with_masks: whether to read the masks of objects.

    Raises:
        FileNotFoundError: the annotations, the folder or an image are missing.
        ValueError: the annotations are damaged, or of another set.
    """

    def __init__(self, path: str, split: str, *, with_masks: bool = False):
        self.labels_of = "masks" if with_masks else "boxes"
        file = _annotation_file(Path(path, "annotations"), _PARTS[split])
        images, objects, categories = read_annotations(file, with_masks=with_masks)
        folder = Path(path, file.stem.removeprefix("instances_"))
        _check_folder([image.file_name for image in images], folder, file)
        if split == "train":
            used = {object.image_id for object in objects if not object.iscrowd}
            if not used:
                raise ValueError(f"no image of {file} has an object to train on")
            images = [image for image in images if image.id in used]
            objects = [object for object in objects if object.image_id in used]
        annotations = _annotations(images, objects, categories, with_masks=with_masks)
        super().__init__(
            Path(path),
            [f"{folder.name}/{image.file_name}" for image in images],
            np.zeros(len(images), int),
            [name for _, name in categories],
            arrays={_FILE.format(name): x for name, x in annotations.arrays().items()},
            name=Path(path).resolve().name,
            split=split,
        )

    def stream(self, size: tuple[int, int], crop: str | None = None) -> StreamedBoxes:
        return StreamedBoxes(self, size, crop or "fit(short=800,long=1333)")

    @functools.cached_property
    def annotations(self) -> Annotations:
        """The objects of all images."""
        kind = MaskAnnotations if self.labels_of == "masks" else Annotations
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(*(self.array(_FILE.format(name)) for name in names))

    def fingerprint(self) -> str:
        """The images' fingerprint, and a checksum of annotations and names of classes."""
        names = repr(self.class_names).encode()
        checksum = zlib.crc32(names, self.annotations.checksum())
        return f"{super().fingerprint()}, annotations {checksum:08x}"

    def remarks(self) -> list[str]:
        prefix = f"{self.name}, {self.split} split"
        return [f"{prefix}: {remark}" for remark in self.annotations.remarks()]

    def read_classes(self, example: int) -> list[int]:
        width, height = EncodedImage(self.read(example)).size
        self.annotations.check_size(example, (height, width))
        return np.unique(self.annotations.truth(example).labels).tolist()


def read_annotations(file: Path, *, with_masks: bool = False) -> "_Content":
    """Reads and checks a file of annotations.

    Args:
        file: of annotations.
        with_masks: whether to keep the objects' `segmentation`.

    Returns:
        Its images, its objects, and (id, name) of its categories; images and categories in the
        order of their ids.

    Raises:
        ValueError: it is damaged, or of another form.
    """
    try:
        with open_regular(file, at_most=_LARGEST) as opened, io.TextIOWrapper(opened, "utf-8") as x:
            # Entries become small as soon as they are read, so that memory holds few polygons.
            hook = functools.partial(_compact, with_masks=with_masks)
            return _check(json.load(x, object_hook=hook))
    except (ValueError, RecursionError) as error:  # includes errors of JSON
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
    segmentation: Any = None  # polygons in arrays, or run lengths; None without masks


def _compact(entry: dict[str, Any], *, with_masks: bool) -> Any:
    """Reduces an entry of the file to the fields in use; called for inner entries first."""
    kind = _Object if "image_id" in entry else _Image if "file_name" in entry else None
    if kind is None:
        return entry
    outline = entry.pop("segmentation", None)
    try:
        record = kind(**{name: entry[name] for name in kind._fields if name in entry})
        fits = _is_object(record) if kind is _Object else _is_image(record)
        if with_masks and kind is _Object:
            fits = fits and _is_outline(outline)
            if fits and not isinstance(outline, dict):
                outline = [np.array(polygon, float) for polygon in outline]
            record = record._replace(segmentation=outline)
    except TypeError:  # a field is missing, or is of another type
        fits = False
    if not fits:
        masks = "; segmentation is polygons of x, y, ..., or run lengths" if with_masks else ""
        raise ValueError(
            f"damaged entry {entry!r:.300}: an image needs id, height and width (whole numbers) "
            "and file_name; an annotation id, image_id and category_id (whole numbers), bbox (four "
            f"finite numbers: x, y, width, height) and area; iscrowd is 0 or 1{masks}"
        )
    return record


def _is_image(image: _Image) -> bool:
    return (
        0 < image.height < 1 << 20
        and 0 < image.width < 1 << 20
        and _are_integers(image.id, image.height, image.width)
        and isinstance(image.file_name, str)
    )


def _is_object(annotation: _Object) -> bool:
    return (
        _are_integers(annotation.id, annotation.image_id, annotation.category_id)
        and annotation.iscrowd in (0, 1)
        and len(annotation.bbox) == 4
        and all(map(_is_finite, (*annotation.bbox, annotation.area)))
    )


def _is_outline(outline: Any) -> bool:
    """Checks for run lengths, or polygons of three corners or more near any image's pixels."""
    return isinstance(outline, dict) or (
        bool(outline)
        and all(
            len(polygon) >= 6
            and len(polygon) % 2 == 0
            and all(_is_finite(x) and abs(x) < 1 << 20 for x in polygon)
            for polygon in outline
        )
    )


def _are_integers(*values: Any) -> bool:
    return all(type(x) is int for x in values)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _check(content: Any) -> "_Content":
    """Checks the content of a file; returns images and categories in the order of their ids."""
    parts = [content.get(name) if isinstance(content, dict) else None for name in _SECTIONS]
    for (name, kind), part in zip(_SECTIONS.items(), parts, strict=True):
        entries = part if isinstance(part, list) else [None]
        if strange := [entry for entry in entries if not isinstance(entry, kind)]:
            raise ValueError(
                f"its {name} must be a list of entries like COCO's: {strange[0]!r:.80}"
            )
    images, objects, categories = parts
    ids = [(category.get("id"), category.get("name")) for category in categories]
    if not all(_are_integers(id) and isinstance(name, str) for id, name in ids):
        raise ValueError("its categories must each have a whole number as id, and a name")
    images, categories = sorted(images), sorted(ids)
    for name, entries in (("images", images), ("categories", categories)):
        for (before, *_), (id, *_) in itertools.pairwise(entries):
            if before == id:
                raise ValueError(f"two of its {name} have the id {id}")
    places, classes = {image.id for image in images}, {id for id, _ in categories}
    for entry in objects:
        if entry.image_id not in places or entry.category_id not in classes:
            raise ValueError(
                f"annotation {entry.id} has image_id={entry.image_id} and category_id="
                f"{entry.category_id}, which must be ids of its {len(images)} images and "
                f"{len(classes)} categories: do the annotations belong to another set?"
            )
    return images, objects, categories


_Content = tuple[list[_Image], list[_Object], list[tuple[int, str]]]
_SECTIONS = {"images": _Image, "annotations": _Object, "categories": dict}


def _annotations(
    images: Sequence[_Image],
    objects: Sequence[_Object],
    categories: Sequence[tuple[int, str]],
    *,
    with_masks: bool,
) -> Annotations:
    """The objects in arrays, in the order of their images."""
    places = {image.id: place for place, image in enumerate(images)}
    classes = {id: label for label, (id, _) in enumerate(categories)}
    owner = np.array([places[entry.image_id] for entry in objects], np.int64)
    order = np.argsort(owner, kind="stable")
    x, y, width, height = np.array([entry.bbox for entry in objects], np.float64).reshape(-1, 4).T
    annotations = Annotations(
        sizes=np.array([(image.height, image.width) for image in images], np.int32),
        ends=np.cumsum(np.bincount(owner, minlength=len(images))),
        boxes=np.stack([x, y, x + width, y + height], axis=1)[order],
        labels=np.array([classes[entry.category_id] for entry in objects], np.int32)[order],
        crowd=np.array([entry.iscrowd for entry in objects], bool)[order],
        area=np.array([entry.area for entry in objects], np.float64)[order],
    )
    if not with_masks:
        return annotations
    return add_masks(annotations, [_encode(objects[k], images[owner[k]]) for k in order])


def _encode(entry: _Object, image: _Image) -> bytes:
    """The run lengths of an object's mask."""
    try:
        return encode_outline(entry.segmentation, (image.height, image.width))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the segmentation of annotation {entry.id} is damaged: {error}"
        ) from error


def _annotation_file(folder: Path, part: str) -> Path:
    """The file of annotations of a split."""
    start = f"instances_{part}"
    files = [name for name in list_names(folder, folders=False) if name.startswith(start)]
    files = [name for name in files if name.endswith(".json")]
    if len(files) != 1:
        raise FileNotFoundError(
            f"{folder} must have one file {start}*.json, such as {start}2017.json, and has "
            f"{' and '.join(files) or 'none'}"
        )
    return folder / files[0]


def _check_folder(names: Sequence[str], folder: Path, file: Path) -> None:
    """Rejects annotations of images that are not in the folder."""
    existing = set(list_files(folder))
    missing = [name for name in names if name not in existing]
    if missing:
        raise FileNotFoundError(
            f"{folder / missing[0]} is missing ({len(missing)} of the {len(names)} images of "
            f"{file} are): add them, or use annotations of the existing images"
        )
