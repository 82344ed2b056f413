"""Image sets by name."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from rope_jax.data.images.crops import resize
from rope_jax.data.sources.coco import Coco
from rope_jax.data.sources.folder import Folder
from rope_jax.data.sources.huggingface import HuggingFace
from rope_jax.data.sources.imagenet import ImageNet
from rope_jax.data.sources.index import Source, Streamed
from rope_jax.data.sources.memory import MEMORY, Images
from rope_jax.data.sources.packed import Packed
from rope_jax.data.sources.pairs import Ade20k, Masks
from rope_jax.data.sources.scenes import load_scenes
from rope_jax.data.sources.tfds import Tfds
from rope_jax.names.options import convert
from rope_jax.names.registry import Registry
from rope_jax.names.text import image_pair

SPLITS = ("train", "test")
IN_MEMORY = (*MEMORY, "scenes")  # the other sources are read one image at a time
SOURCES = Registry(
    "data source",
    {
        **MEMORY,
        "scenes": load_scenes,
        "folder": Folder,
        "tfds": Tfds,
        "huggingface": HuggingFace,
        "packed": Packed,
        "imagenet": ImageNet,
        "masks": Masks,
        "ade20k": Ade20k,
        "coco": Coco,
    },
)


def register_source(name: str, open_split: Callable[[str, str], Source]) -> None:
    """Registers an image set that is read one image at a time, for `load` and `data.source`.

    >>> class Reversed(Folder):
    ...     def read(self, example):
    ...         return super().read(len(self.labels) - 1 - example)
    >>> register_source("reversed", Reversed)
    >>> del SOURCES["reversed"]  # in this example only

    Args:
        name: of the source.
        open_split: (path, split) -> the split; its class must be importable, for worker processes.

    Raises:
        ValueError: there is a source of this name, or it is not an identifier.
    """
    SOURCES.register(name, open_split)


def load(
    source: str,
    path: str | None = None,
    split: str = "train",
    image_size: int | tuple[int, int] | None = None,
    *,
    crop: str | None = None,
    allow_empty: bool = False,
    labels_of: str | None = None,
) -> Images | Streamed:
    """Opens one split of an image set, as RGB.

    Into memory:

    - `"digits"`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, values 0 to 16 spread
      over 0 to 255. Every fifth image (0, 5, 10, ...) belongs to the test split, of 360 images.
    - `"scenes"`: digits on coloured grounds with a class for every pixel, or with boxes, perhaps
      with masks, drawn at `image_size`, see `rope_jax.data.sources.scenes`.
    - `"npz"`: a file with the arrays `train_images` and `train_labels`, `test_images` and
      `test_labels`, or one of the pairs; images uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3],
      labels integers [n].
    - `"idx"`: a folder with the four files of MNIST or Fashion-MNIST under their official names,
      compressed (.gz) or not.

    One image at a time, in the order of classes and file names:

    - `"folder"`: image files in path/train/CLASS/ and path/test/CLASS/ (or path/val/CLASS/), and in
      folders within these; or in path/CLASS/, where every fifth belongs to the test split.
    - `"tfds"`: a data set prepared by tensorflow-datasets.
    - `"huggingface"`: a folder saved by Hugging Face's `datasets`, or its Parquet files.
    - `"packed"`: a data set prepared by `python -m rope_jax.data.prepare`.
    - `"imagenet"`: the official archives of ImageNet-1k.
    - `"masks"`: images and the classes of their pixels, path/train/NAME.jpg with NAME.png next to
      it, likewise path/test/ (or path/val/), and the names of the classes in path/classes.txt.
    - `"ade20k"`: the official folder ADEChallengeData2016, with 150 classes of pixels.
    - `"coco"`: images with boxes, perhaps with masks, path/train2017/ and path/val2017/, and the
      official files path/annotations/instances_train2017.json and instances_val2017.json, or others
      of this form.

    >>> images = load("digits", split="test", image_size=(16, 12))
    >>> images.images.shape, images.classes
    ((360, 16, 12, 3), 10)

    Args:
        source: one of these names.
        path: of the set; None for digits and scenes.
        split: "train" or "test".
        image_size: (h, w) in pixels, or one number. Data sets in memory are resized (bicubic with
            antialiasing), or kept unchanged for None; the others need one. Random crops are always
            cut from the images as they are stored.
        crop: of images that are read one at a time, to this size: "centre(crop=0.875)", see
            `rope_jax.data.images.crops`; of images with boxes "fit(short=800,long=1333)", see
            `rope_jax.data.images.fits`. None for the whole centre, or for this `fit`.
        allow_empty: True if class folders of `"folder"` may be empty.
        labels_of: the kind of labels, "images", "pixels", "boxes" or "masks" (boxes with masks),
            for sources that have several; None for the first. It is `labels_of` of the split.

    Returns:
        The split. The number of classes of sets in memory is that of the training split, or of
        this split if there is none.

    Raises:
        ValueError: unknown sources and splits, damaged files, unequal lengths, wrong types, labels
            out of range.
        FileNotFoundError: a file, a folder or an array of the split is missing.
    """
    size = None if image_size is None else image_pair(image_size)
    _check(source, path, split)
    if source == "scenes":
        return load_scenes(split, size or (64, 64), labels_of or "pixels")
    if source in MEMORY:
        images = MEMORY[source](path, split)
        if size in (None, images.size):
            return images
        return dataclasses.replace(images, images=resize(images.images, size), stored=images.images)
    opened = open_source(source, path, split, allow_empty=allow_empty, labels_of=labels_of)
    if size is None:
        raise ValueError(
            f"data source {source!r} ({path}) needs an image_size (height, width): "
            "its images may differ in size"
        )
    return opened.stream(size, crop)


def open_source(
    source: str,
    path: str | None,
    split: str,
    *,
    allow_empty: bool = False,
    labels_of: str | None = None,
) -> Source:
    """Opens the images of one split as they are stored.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (folder / "train" / name).mkdir(parents=True)
    ...     Image.new("RGB", (40, 30)).save(folder / "train" / name / "1.png")
    >>> images = open_source("folder", str(folder), "train")
    >>> images.class_names, images.labels.tolist()
    (['cat', 'dog'], [0, 1])

    Args:
        source: as in `load`, of those that are read one image at a time.
        path: of the set.
        split: "train" or "test".
        allow_empty, labels_of: as in `load`.

    Raises:
        ValueError: as `load`, and for sets in memory.
        FileNotFoundError: as `load`.
    """
    _check(source, path, split)
    if source in IN_MEMORY:
        raise ValueError(f"data source {source!r} is not read one image at a time: use load")
    options = {"allow_empty": allow_empty} if source == "folder" else {}
    options |= {"with_masks": labels_of == "masks"} if source == "coco" else {}
    return SOURCES[source](path, split, **options)


def _check(source: str, path: str | None, split: str) -> None:
    SOURCES[source]  # raises an error for an unknown name
    convert(split, Literal[*SPLITS], "split")
    without_path = source in ("digits", "scenes")
    if without_path != (path is None):
        need = "takes no path: leave it out" if without_path else "needs a path; none is given"
        raise ValueError(f"data source {source!r} {need}")
