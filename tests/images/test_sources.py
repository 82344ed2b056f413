import gzip
import itertools
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rope_jax.data import load, resize
from rope_jax.data.images.crops import crop_pixels, resized_crop

RNG = np.random.default_rng(0)
LABELS = np.array([0, 2, 1, 2], np.uint8)


def random_images(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def test_digits():
    train, test = load("digits", None, "train", None), load("digits", split="test")
    assert (train.name, train.split, train.classes) == ("digits", "train", 10)
    for images, count in ((train, 1437), (test, 360)):
        assert (images.images.dtype, images.images.shape) == (np.uint8, (count, 8, 8, 3))
        assert (images.labels.dtype, set(images.labels)) == (np.int32, set(range(10)))
        assert (images.images.min(), images.images.max()) == (0, 255)
    assert test.labels[:4].tolist() == [0, 5, 0, 5]  # images 0, 5, 10, 15 of the set


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 6, 1), (4, 5, 6, 3)])
def test_npz(tmp_path, shape):
    images, path = random_images(*shape), str(tmp_path / "set.npz")
    arrays = {"train_images": images, "train_labels": LABELS}
    np.savez(path, **arrays, test_images=images[:2], test_labels=LABELS[[0, 0]])
    train, test = load("npz", path, "train", None), load("npz", path, "test", None)
    colours = np.broadcast_to(images.reshape(4, 5, 6, -1), (4, 5, 6, 3))
    np.testing.assert_array_equal(train.images, colours)
    np.testing.assert_array_equal(train.labels, LABELS)
    assert (train.name, train.classes, test.classes, test.split) == ("set", 3, 3, "test")
    smaller = load("npz", path, "train", (3, 4))
    crop = partial(resized_crop, scale_min=0.2)  # of the stored images
    np.testing.assert_array_equal(
        smaller.example(1, crop, 7)["image"], crop_pixels(train.images[1], crop, (3, 4), 7)
    )


def test_npz_with_one_pair(tmp_path):
    path = str(tmp_path / "set.npz")
    np.savez(path, test_images=random_images(4, 5, 6), test_labels=LABELS.astype(np.int64))
    assert load("npz", path, "test", None).classes == 3
    with pytest.raises(FileNotFoundError, match="has no train images"):
        load("npz", path, "train", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": random_images(3, 5, 6)}, "3 images and 4 labels"),
        ({"train_images": random_images(0, 5, 6), "train_labels": LABELS[:0]}, "0 images and 0"),
        ({"train_images": random_images(4, 5, 6) / 255}, r"float64 \[.*; they must be uint8"),
        ({"train_images": random_images(4, 0, 0)}, r"\[4, 0, 0, 3\]; .* of at least one pixel"),
        ({"train_images": random_images(4, 5, 6, 2)}, r"images are uint8 \[4, 5, 6, 2\]"),
        ({"train_images": random_images(4, 5)}, r"images are uint8 \[4, 5\]"),
        ({"train_labels": LABELS.astype(float)}, "labels are float64.*they must be integers"),
        ({"train_labels": LABELS.astype(str)}, "labels are <U.*they must be integers"),
        ({"train_labels": LABELS.astype(np.int64) - 2**32}, "labels are at least -42949"),
        ({"train_labels": LABELS[:, None]}, r"labels are int32 \[4, 1\]"),
        ({"train_labels": np.array([0, 1, -1, 2])}, "labels are -1 to 2; allowed are 0"),
        ({"train_labels": np.array([0, 1, 2, 100_000])}, "at most 100000; .* from 0 to 99999"),
        ({"train_labels": np.array([0, 1, 2, 2**40])}, f"at most {2**40}"),
        ({"test_images": random_images(4, 5, 6), "test_labels": LABELS + 1}, "labels are 1 to 3"),
    ],
)
def test_npz_refuses(tmp_path, change, message):
    path = str(tmp_path / "set.npz")
    np.savez(path, **{"train_images": random_images(4, 5, 6), "train_labels": LABELS, **change})
    with pytest.raises(ValueError, match=message):
        load("npz", path, "test" if "test_images" in change else "train", None)


def idx(array):
    header = np.array([0x800 + array.ndim, *array.shape], ">u4")
    return header.tobytes() + array.tobytes()


def write_idx(folder, images, labels, *, half="train", compressed=False):
    packed, ending = (gzip.compress, ".gz") if compressed else (bytes, "")
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = array if isinstance(array, bytes) else idx(array)
        (folder / f"{half}-{name}-ubyte{ending}").write_bytes(packed(content))


@pytest.mark.parametrize("compressed", [False, True])
def test_idx(tmp_path, compressed):
    images = random_images(4, 5, 6)
    write_idx(tmp_path, images, LABELS, compressed=compressed)
    write_idx(tmp_path, images[:1], LABELS[:1], half="t10k", compressed=compressed)
    train, test = (
        load("idx", str(tmp_path), "train", None),
        load("idx", str(tmp_path), "test", None),
    )
    np.testing.assert_array_equal(train.images, np.repeat(images[..., None], 3, axis=3))
    np.testing.assert_array_equal(train.labels, LABELS)
    assert (len(test.labels), test.classes, test.split) == (1, 3, "test")


GOOD = idx(random_images(4, 5, 6))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (b"", "not enough values"),
        (GOOD[:10], "buffer size"),
        (idx(LABELS), "header is not that of bytes in 3 dimensions"),
        (GOOD[:-1], "size 119"),
        (GOOD + b"x", "size 121"),
        (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "not a valid idx file"),
        (random_images(3, 5, 6), "3 images and 4 labels"),
    ],
)
def test_idx_refuses(tmp_path, images, message):
    write_idx(tmp_path, images, LABELS)
    with pytest.raises(ValueError, match=message):
        load("idx", str(tmp_path), "train", None)


def rewrite(change):
    return lambda file: file.write_bytes(change(file.read_bytes()))


IDX, DAMAGED = "train-images-idx3-ubyte", r"not (an \.npz|a valid idx) file|array train_images of"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        *itertools.product(
            ("stored.npz", "deflated.npz", f"{IDX}.gz"),
            [
                rewrite(lambda data: b""),
                rewrite(lambda data: b"text"),
                rewrite(lambda data: data[:1000]),
                rewrite(lambda data: data[:200] + b"xxxx" + data[204:]),
            ],
            [DAMAGED],
        ),
        (f"{IDX}.gz", rewrite(lambda data: data[:10] + b"\xff" * 4 + data[14:]), DAMAGED),
        (
            "stored.npz",
            rewrite(lambda data: data.replace(b"(400, 5, 6)", b"(200, 5, 6)")),
            DAMAGED,
        ),
        *itertools.product(  # reading would wait for a writer, or never end
            ("set.npz", IDX),
            [os.mkfifo, os.mkdir, lambda place: place.symlink_to("/dev/zero")],
            ["not a regular file"],
        ),
    ],
)
def test_damaged_and_other_files_are_refused(tmp_path, name, damage, message):
    images, labels, file = random_images(400, 5, 6), np.resize(LABELS, 400), tmp_path / name
    write_idx(tmp_path, images, labels, compressed=True)
    np.savez(tmp_path / "stored.npz", train_images=images, train_labels=labels)
    np.savez_compressed(tmp_path / "deflated.npz", train_images=images, train_labels=labels)
    damage(file)
    source, path = ("npz", file) if file.suffix == ".npz" else ("idx", tmp_path)
    with pytest.raises(ValueError, match=message):
        load(source, str(path), "train", None)


@pytest.mark.images("fashion_mnist")
def test_fashion_mnist():
    folder = Path(os.environ["ROPE_JAX_TEST_IMAGES"], "fashion_mnist")
    train, test = load("idx", str(folder), "train", None), load("idx", str(folder), "test", None)
    assert np.bincount(train.labels).tolist() == [6_000] * 10
    assert np.bincount(test.labels).tolist() == [1_000] * 10
    assert abs(train.images.mean() / 255 - 0.2860) < 1e-4  # the set's published mean


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cifar", None), "unknown data source 'cifar'; known: digits, npz, idx, scenes, folder"),
        (("digits", None, "val"), "split must be one of train, test, not 'val'"),
        (("digits", "here"), "leave it out"),
        (("digits", None, "train", (0, 8)), r"image size \(0, 8\)"),
        (("npz", None), "needs a path"),
        (("idx", "/nowhere"), "/nowhere has no train images"),
    ],
)
def test_load_refuses(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(*arguments)


def test_resize_matches_pillows_bicubic():
    images = random_images(3, 12, 10, 3)
    for size in ((12, 10), (6, 5), (24, 31), (1, 1)):
        expected = Image.fromarray(images[1]).resize(size[::-1], Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(resize(images, size)[1], np.asarray(expected))


@pytest.mark.usefixtures("unchecked_annotations")
def test_resize_refuses_a_single_image():
    with pytest.raises(ValueError, match=r"they must be uint8 \[n, H, W, 3\]: a single one is"):
        resize(random_images(3, 12, 10, 3)[0], (8, 8))
