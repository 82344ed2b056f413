"""Minimal versions of the files and folders that the documented commands name."""

import gzip
import pathlib
import shutil
import struct
import tarfile

import numpy as np
from PIL import Image

from tests.images.coco_set import write_coco

ROOT = pathlib.Path(__file__).parents[2]
SYNSETS = ("n01498041", "n01531178")  # of ImageNet, and of ImageNet-A
ALIASES = {
    "COCO": "IMAGES",
    "PATH": "IMAGES",
    "DIR": "IMAGES",
    "ADEChallengeData2016": "ADE20K",
    "IMAGENET": "FOLDER",
    "val": "FOLDER/val",
    "ILSVRC2012_val": "FOLDER/val",
    "imagenet-a": "FOLDER/val",
}


def write(folder):
    """Writes them into a folder; weights and runs, which tests replace, have no content."""
    images(folder / "IMAGES")
    ade20k(folder / "ADE20K")
    imagenet(folder / "FOLDER", folder / "ARCHIVES")
    fashion_mnist(folder / "FOLDER")
    for name, target in ALIASES.items():
        (folder / name).symlink_to(folder / target)
    for name in ("FILE.npz", "cifar10.npz"):
        pixels, labels = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 10
        splits = {f"{split}_images": pixels for split in ("train", "test")}
        splits |= {f"{split}_labels": labels for split in ("train", "test")}
        np.savez(folder / name, **splits)
    for name in ("WEIGHTS", "flowers"):
        (folder / name).mkdir()
    save(folder / "cat.jpg")
    shutil.copy(ROOT / "docs" / "examples" / "my_schemes.py", folder)
    shutil.copy(ROOT / "configs" / "digits.py", folder / "my.py")


PICTURE = Image.new("RGB", (24, 20), (90, 60, 30))
LABELS = Image.fromarray(np.eye(20, 24, dtype=np.uint8))


def save(path, picture=PICTURE):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def images(folder):
    """Writes images with classes, masks and boxes: the pages call all three IMAGES."""
    write_coco(folder)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            save(folder / split / name / "1.jpg")
        save(folder / split / "1.jpg")
        save(folder / split / "1.png", LABELS)
    (folder / "classes.txt").write_text("sky\nsea\n")


def ade20k(folder):
    for part in ("training", "validation"):
        save(folder / "images" / part / "ADE_1.jpg")
        save(folder / "annotations" / part / "ADE_1.png", LABELS)
    names = [f"{number}\tname {number}" for number in range(1, 151)]
    (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tName", *names]))


def imagenet(folder, archives):
    """Writes ImageNet as folders of two classes and as archives."""
    archives.mkdir()
    for number, synset in enumerate(SYNSETS, 1):
        for k in range(128):  # repeated augmentation needs 256 images
            save(folder / "train" / synset / f"{synset}_{k}.JPEG")
        save(folder / "val" / synset / f"ILSVRC2012_val_{number:08}.JPEG")
        tar(archives / f"{synset}.tar", (folder / "train" / synset).iterdir())
    tar(archives / "ILSVRC2012_img_train.tar", archives.glob("n*.tar"))
    tar(archives / "ILSVRC2012_img_val.tar", (folder / "val").rglob("*.JPEG"))
    (archives / "validation_synsets.txt").write_text("\n".join(SYNSETS))


def tar(path, files):
    with tarfile.open(path, "w") as archive:
        for file in sorted(files):
            archive.add(file, file.name)


def fashion_mnist(folder):
    for split, count in (("train", 64), ("t10k", 16)):
        pixels = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + bytes(count * 784)
        classes = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(k % 10 for k in range(count))
        for stem, content in (("images-idx3", pixels), ("labels-idx1", classes)):
            (folder / f"{split}-{stem}-ubyte.gz").write_bytes(gzip.compress(content))
