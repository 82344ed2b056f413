"""Sets that are read one image at a time: folders, packed pixels, archives, tfds."""

import functools
import gzip
import io
import itertools
import json
import os
import pickle
import sys
import tarfile
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageFile
from scipy.io import savemat

from rope_jax.commands.prepare import main as prepare_main
from rope_jax.commands.verify import main as verify_main
from rope_jax.data import BadImages, BadSet, batches, decode_image, evaluation_batches, load
from rope_jax.data.images.crops import centre, crop_pixels
from rope_jax.data.packing import prepare
from rope_jax.data.sources.folder import Folder
from rope_jax.data.sources.imagenet import ImageNet
from rope_jax.data.sources.packed import Packed
from rope_jax.data.verification import verify
from tests.images.streams import assert_same, take
from tests.images.test_decode import encode
from tests.refusals import expect_refusal

AUGMENT = "resized_crop(scale_min=0.3,interpolation=random)+crop(pad=1)+flip"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "cache"))


def write_folder(place, per_class=3, splits=("train", "test"), classes=("n00000002", "n00000001")):
    """Class folders with pictures of several sizes; returns the bytes by split and name."""
    written = {}
    for split, name, k in itertools.product(splits, classes, range(per_class)):
        (place / split / name).mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(len(written)).integers(0, 256, (5, 4, 3), dtype=np.uint8)
        data = encode(Image.fromarray(noise).resize((50 - 9 * k, 30 + 7 * k)), "JPEG")
        (place / split / name / f"{name}_{k}.JPEG").write_bytes(data)
        written[split, f"{name}/{name}_{k}.JPEG"] = data
    return written


def damage(place, name):
    (place / name).write_bytes((place / name).read_bytes()[:100])


def touch(place, *files):
    for name in files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")


def names(source):
    return [source.example_name(k) for k in range(len(source.labels))]


def expect_equal(source, other):
    """Checks equality of labels, names and files, also after sending a source to a worker."""
    assert source.fingerprint() == other.fingerprint()
    assert source.labels.tolist() == other.labels.tolist()
    assert len(sent := pickle.dumps(source)) < 10_000
    for k in range(len(source.labels)):
        assert pickle.loads(sent).read(k) == source.read(k) == other.read(k)


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folder(tmp_path, held_out):
    written = write_folder(tmp_path, splits=("train", held_out))
    (tmp_path / "train" / ".hidden").mkdir()
    for split, place in (("train", "train"), ("test", held_out)):
        images = load("folder", str(tmp_path), split, (8, 10))
        attributes = images.size, images.split, images.classes, images.name
        assert attributes == ((8, 10), split, 2, tmp_path.name)
        assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]  # in the order of the names
        files = [(place, name) for name in names(images.source)]
        assert files == sorted(key for key in written if key[0] == place)
        assert [images.source.read(k) for k in range(6)] == [written[key] for key in files]
    assert images.fingerprint().startswith("8x10 of 6 files 2 classes")
    index = images.source.index
    assert index.is_dir()
    del images
    assert not index.exists()  # a folder leaves no listing behind


def test_folders_are_read_recursively_and_other_files_counted(tmp_path, capsys):
    cat, image = tmp_path / "train" / "cat", Image.new("RGB", (9, 8))
    (tmp_path / "elsewhere").mkdir()
    touch(cat, ".DS_Store", "._1.png", "Thumbs.db", "desktop.ini", "new/notes.txt", ".x/1.png")
    (cat / "new" / "deep").mkdir()
    (cat / "old").symlink_to(tmp_path / "elsewhere")
    expected = ["1.BMP", "1.JPEG", "1.PNG", "1.webp", "new/deep/1.TIF", "old/1.png"]
    for name in expected:
        image.save(cat / name, lossless=True)
    assert (
        verify_main([f"--path={tmp_path}", "--source=folder", "--splits=train", "--workers=0"]) == 0
    )
    (message,) = (line for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert message.endswith(": 3, first cat/Thumbs.db")
    images = load("folder", str(tmp_path), "train", (4, 4))
    assert names(images.source) == [f"cat/{name}" for name in expected]


FIRST, LAST = (f"train/n00000001/n00000001_{k}.JPEG" for k in (0, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda place: (place / FIRST).rename(place / FIRST.replace("_0", "_00")),
        lambda place: (place / LAST).rename(
            place / LAST.replace("train/n00000001", "train/n00000002")
        ),
        lambda place: (place / "train/n00000002").rename(place / "train/n00000003"),
        lambda place: (place / FIRST).write_bytes((place / FIRST).read_bytes()[::-1]),
        # Nobody writes to the pipe; training reports it.
        lambda place: (place / FIRST).unlink() or os.mkfifo(place / FIRST),
    ],
    ids=["name", "label", "class", "content", "pipe"],
)
def test_fingerprints_tell_changes_from_copies(tmp_path, change):
    for name in "abc":
        write_folder(tmp_path / name)
    change(tmp_path / "c")
    original, copy, changed = (
        load("folder", str(tmp_path / name), "train", (8, 8)).fingerprint() for name in "abc"
    )
    assert original == copy != changed


def test_fingerprints_compare_the_sizes_of_all_files(tmp_path):
    """The contents of only 256 files are compared."""
    touch(tmp_path, *(f"cat/{k:03}.png" for k in range(600)))
    fingerprint = lambda: load("folder", str(tmp_path), "train", (8, 8)).fingerprint()
    before = fingerprint()
    (tmp_path / "cat" / "001.png").write_bytes(b"xx")
    assert fingerprint() != before


def test_a_folder_without_splits_is_split(tmp_path):
    for name, count in (("cat", 11), ("dog", 5), ("eel", 1)):
        touch(tmp_path / name, *(f"{k:02}.png" for k in range(count)))
    touch(tmp_path, "cat/00.txt")  # not counted among the five
    train, test = (Folder(str(tmp_path), split) for split in ("train", "test"))
    assert (len(train.remarks()), test.remarks()) == (1, [])  # the files are those of both
    assert names(test) == ["cat/04.png", "cat/09.png", "dog/04.png"]
    assert test.labels.tolist() == [0, 0, 1]
    assert len({*names(train), *names(test)}) == len(names(train)) + 3 == 17
    assert train.class_names == test.class_names == ["cat", "dog", "eel"]


@pytest.mark.parametrize(
    ("size", "crop", "message"),
    [(None, None, "needs an image_size"), ((8, 8), "flip", "not a crop")],
)
def test_size_and_crop_are_checked(tmp_path, size, crop, message):
    touch(tmp_path, "train/cat/1.png")
    with pytest.raises(ValueError, match=message):
        load("folder", str(tmp_path), "train", size, crop=crop)


@pytest.mark.parametrize(
    ("files", "split", "words"),
    [
        (["Train/cat/1.png", "Val/cat/1.png"], "train", "has a folder 'Train'"),  # no classes
        (["train/1.png", "val/1.png"], "train", "has no folders of classes for the train split"),
        ([], "train", "has no folders of classes"),
        (["train/cat/1.png"], "test", "test or val"),
        (["train/cat/1.png", "test/dog/1.png"], "test", "has a class 'dog'"),
        # As in torchvision: the images of an empty class are missing, or its folder is not a class.
        (["train/cat/1.png", "train/dog/1.txt"], "train", "dog has no images"),
    ],
)
def test_images_in_the_wrong_folders_are_refused(tmp_path, files, split, words):
    touch(tmp_path, *files)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        Folder(str(tmp_path), split)


def test_classes_are_numbered_as_in_training(tmp_path):
    touch(tmp_path, "train/ape/1.txt", "train/cat/1.png", "train/dog/1.png", "test/dog/1.png")
    assert Folder(str(tmp_path), "test").labels.tolist() == [2]
    assert load("folder", str(tmp_path), "train", 8, allow_empty=True).classes == 3


def test_files_and_arrays_give_equal_streams(tmp_path):
    """Pictures of the set's size, in memory and as (lossless) files, give equal streams."""
    pictures = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    for k, picture in enumerate(pictures):
        (tmp_path / "train" / f"{k // 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "train" / f"{k // 3}" / f"{k}.png")
    np.savez(tmp_path / "set.npz", train_images=pictures, train_labels=np.arange(6) // 3)
    memory = load("npz", str(tmp_path / "set.npz"), "train")
    files = load("folder", str(tmp_path), "train", (12, 12))
    for augment in ("none", "crop(pad=2)+flip", AUGMENT):
        options = {"batch_size": 4, "seed": 3, "augment": augment}
        stream = batches(files, ahead=True, **options)
        assert_same(take(5, stream), take(5, batches(memory, **options)))
    assert_same(evaluation_batches(files, batch_size=4), evaluation_batches(memory, batch_size=4))


def test_evaluation_crops(tmp_path):
    written = write_folder(tmp_path)
    images = load("folder", str(tmp_path), "test", (16, 16), crop="centre(crop=0.8)")
    for k, name in enumerate(names(images.source)):
        picture = decode_image(written["test", name])
        expected = crop_pixels(picture, functools.partial(centre, crop=0.8), (16, 16))
        np.testing.assert_array_equal(images.example(k)["image"], expected)


@pytest.fixture
def images(tmp_path):
    """The training images of a folder."""
    write_folder(tmp_path)
    return load("folder", str(tmp_path), "train", (8, 8))


def test_errors_name_the_bad_image(tmp_path, images):
    damage(tmp_path, "train/n00000001/n00000001_1.JPEG")
    for stream in (
        batches(images, batch_size=6, seed=0),
        batches(images, batch_size=6, seed=0, ahead=True),
        evaluation_batches(images, batch_size=4),
    ):
        with pytest.raises(BadImages, match=r"image 1 of .* \(n00000001/n00000001_1.JPEG\) cannot"):
            next(stream)
    (tmp_path / "train/n00000001/n00000001_1.JPEG").unlink()
    with pytest.raises(BadImages, match=r"No such file"):
        next(batches(images, batch_size=6, seed=0))


def test_skipped_images_are_replaced_and_counted(tmp_path, images):
    options = {"batch_size": 6, "seed": 0}
    clean = take(3, batches(images, **options))
    damage(tmp_path, "train/n00000001/n00000001_2.JPEG")  # number 2, the last of its class
    stream = batches(images, bad_images="skip", **options)
    for got, expected in zip(take(3, stream), clean, strict=True):
        replaced, substitute = got["index"] == 2, expected["index"] == 3
        assert_same(
            [{n: got[n][~replaced] for n in got}], [{n: expected[n][~replaced] for n in got}]
        )
        assert got["label"][replaced].tolist() == [1]
        np.testing.assert_array_equal(got["image"][replaced], expected["image"][substitute])
    assert stream.skipped == {2}
    copies = batches(images, batch_size=18, seed=0, bad_images="skip")
    take(1, copies)  # a batch that holds each image three times
    assert copies.skipped == {2}
    damage(tmp_path, "train/n00000002/n00000002_2.JPEG")
    with pytest.raises(BadSet, match=r"2 of 6 images .* more than 1 \(one in 1000\): 2, 5"):
        take(1, batches(images, bad_images="skip", **options))


def test_skipped_images_are_not_evaluated(tmp_path):
    write_folder(tmp_path)
    damage(tmp_path, "test/n00000001/n00000001_2.JPEG")
    images = load("folder", str(tmp_path), "test", (8, 8))
    first, second = evaluation_batches(images, batch_size=4, bad_images="skip")
    assert first["mask"].tolist() == [True, True, False, True]
    assert second["mask"].tolist() == [True, True, False, False]
    assert not first["image"][2].any()


@pytest.mark.parametrize(("make", "options"), [(batches, {"seed": 0}), (evaluation_batches, {})])
def test_the_only_image_is_not_skipped(tmp_path, make, options):
    write_folder(tmp_path, per_class=1, classes=("n00000001",))
    images = load("folder", str(tmp_path), "train", (8, 8))
    damage(tmp_path, "train/n00000001/n00000001_0.JPEG")
    with pytest.raises(BadSet, match="1 of 1 images"):
        next(make(images, batch_size=3, bad_images="skip", **options))


def test_lack_of_memory_is_not_blamed_on_an_image(images, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        next(batches(images, batch_size=6, seed=0, bad_images="skip"))


def tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def write_archives(place, written):
    """Writes official archives of the pictures: one of archives by synset, one of files.

    Returns the synset and the content of each validation image by name.
    """
    place.mkdir()
    inner = {}
    for (split, name), data in written.items():
        if split == "train":
            inner.setdefault(name.split("/")[0], []).append((name.split("/")[1], data))
    train = tar([(f"{synset}.tar", tar(files)) for synset, files in inner.items()])
    (place / "ILSVRC2012_img_train.tar").write_bytes(train)
    test = [(n.split("/")[0], data) for (split, n), data in written.items() if split == "test"]
    held_out = {f"ILSVRC2012_val_{k + 1:08}.JPEG": example for k, example in enumerate(test)}
    files = [(name, data) for name, (_, data) in held_out.items()]
    (place / "ILSVRC2012_img_val.tar").write_bytes(tar(files[::-1]))
    return held_out


def test_imagenet_archives_are_read_without_unpacking(tmp_path):
    held_out = write_archives(tmp_path / "a", write_folder(tmp_path / "folder"))
    for _ in range(2):  # the second time from the cache
        train = ImageNet(str(tmp_path / "a"), "train")
        expect_equal(train, Folder(str(tmp_path / "folder"), "train"))
    with pytest.raises(FileNotFoundError, match="labels of the validation images are missing"):
        ImageNet(str(tmp_path / "a"), "test")
    # The development kit numbers the synsets in another order.
    rows = [(7, "n00000001"), (3, "n00000002")]
    mat = io.BytesIO()
    savemat(mat, {"synsets": np.array(rows, [("ILSVRC2012_ID", "i4"), ("WNID", "O")])})
    truth = b"".join(b"7\n" if synset == "n00000001" else b"3\n" for synset, _ in held_out.values())
    kit = [("d/meta.mat", mat.getvalue()), ("d/ILSVRC2012_validation_ground_truth.txt", truth)]
    (tmp_path / "a" / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(kit)))
    by_kit = ImageNet(str(tmp_path / "a"), "test")
    synsets = tmp_path / "a" / "validation_synsets.txt"
    synsets.write_text("".join(f"{synset}\n" for synset, _ in held_out.values()))
    for source in (by_kit, ImageNet(str(tmp_path / "a"), "test")):
        assert source.labels.tolist() == [0, 0, 0, 1, 1, 1]
        for k, name in enumerate(names(source)):
            synset, file = name.split("/")
            assert (synset, source.read(k)) == held_out[file]
    synsets.write_text("n00000001\n")
    with pytest.raises(ValueError, match="holds 6 images, but there are labels of 1"):
        ImageNet(str(tmp_path / "a"), "test")


@pytest.mark.parametrize("content", [b"", b"no archive" * 100, None])
@pytest.mark.parametrize("name", ["img_train.tar", "img_val.tar", "devkit_t12.tar.gz"])
def test_damaged_archives_are_refused(tmp_path, name, content):
    write_archives(tmp_path / "archives", write_folder(tmp_path / "folder"))
    archive = tmp_path / "archives" / f"ILSVRC2012_{name}"
    if name == "img_val.tar":
        (tmp_path / "archives" / "validation_synsets.txt").write_text("n00000001\n" * 6)
    if not archive.exists():
        archive.write_bytes(gzip.compress(tar([("kit/data/meta.mat", b"")])))
    intact = archive.read_bytes()
    archive.write_bytes(intact[: len(intact) // 3] if content is None else content)
    with pytest.raises(ValueError, match=r"cannot be read|there are labels of 6"):
        ImageNet(str(tmp_path / "archives"), "train" if "train" in name else "test")


def shorten(picture):
    width, height = (max(1, s * 24 // min(picture.shape[:2])) for s in picture.shape[1::-1])
    return Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def source(tmp_path):
    write_folder(tmp_path / "set")
    return Folder(str(tmp_path / "set"), "train")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"side": 0}, lambda picture: picture),
        ({"side": 24}, shorten),
        ({"side": 20, "square": True}, lambda picture: crop_pixels(picture, centre, (20, 20))),
    ],
)
def test_packed_images_are_resized_once(tmp_path, source, options, expected):
    prepare(source, tmp_path / "packed", shard_images=4, **options)
    packed = Packed(str(tmp_path / "packed"), "train")
    assert (packed.labels.tolist(), names(packed)) == (source.labels.tolist(), names(source))
    assert [shard["examples"] for shard in packed.about["shards"]] == [4, 2]
    sent = pickle.loads(pickle.dumps(packed))
    for k in range(6):
        picture = np.asarray(expected(decode_image(source.read(k))))
        np.testing.assert_array_equal(sent.read(k), picture)
    if options == {"side": 0}:  # streams equal those of the files
        sets = [either.stream((12, 12)) for either in (source, packed)]
        assert_same(*(take(4, batches(x, batch_size=5, seed=0, augment=AUGMENT)) for x in sets))


def test_an_interrupted_preparation_resumes(tmp_path, source, monkeypatch, capsys):
    prepare(source, tmp_path / "whole", shard_images=2)
    read, read_examples = Folder.read, []

    def read_until_interrupt(self, example):
        read_examples.append(example)
        if len(read_examples) == 4:
            raise KeyboardInterrupt
        return read(self, example)

    monkeypatch.setattr(Folder, "read", read_until_interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "packed", shard_images=2)
    with pytest.raises(FileNotFoundError, match="not finished"):
        Packed(str(tmp_path / "packed"), "train")
    with pytest.raises(ValueError, match=r"in another way .*'side': 256.* now .*'side': 24"):
        prepare(source, tmp_path / "packed", shard_images=2, side=24)
    prepare(source, tmp_path / "packed", shard_images=2)
    assert read_examples == [0, 1, 2, 3, 2, 3, 4, 5]  # the first shard existed
    uninterrupted, resumed = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "train").iterdir()}
        for name in ("whole", "packed")
    )
    assert uninterrupted == resumed
    prepare(source, tmp_path / "packed", shard_images=2)
    printed = capsys.readouterr().out
    assert "already exists" in printed
    assert printed.count("written: ") == 2
    assert len(read_examples) == 8


@pytest.fixture
def packed(tmp_path, source):
    """The folder of a split."""
    return prepare(source, tmp_path / "packed", side=0)


def verify_packed(folder):
    return verify_main(
        ["--source=packed", f"--path={folder.parent}", "--splits=train", "--workers=0"]
    )


@pytest.mark.parametrize("name", ["labels.npy", "shapes.npy", "names.npy", "ends.npy"])
def test_an_index_with_swapped_entries_is_refused(packed, name, capsys):
    """The entries keep length and values, in another order."""
    np.save(packed / name, np.load(packed / name)[::-1])
    with expect_refusal(capsys, f"{name} was changed after it was written"):
        verify_packed(packed)


def test_packed_refuses_changed_files(packed, capsys):
    before = Packed(str(packed.parent), "train").fingerprint()
    shard, metadata = packed / "images-00000.bin", packed / "about.json"
    content, text = bytearray(shard.read_bytes()), metadata.read_text()
    content[1000] ^= 1
    shard.write_bytes(content)  # only a command verifies it, as shards are large
    assert verify_packed(packed) == 1
    assert "damaged: train images-00000.bin: its checksum" in capsys.readouterr().out
    metadata.write_text(text.replace("n00000001", "n00000009"))  # another set
    assert Packed(str(packed.parent), "train").fingerprint() != before
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"images-00000\.bin was changed"):
        Packed(str(packed.parent), "train")
    shard.write_bytes(content)
    elsewhere = text.replace(shard.name, f"../{packed.name}/{shard.name}")
    changes = {"files": None}, {"shards": []}, {"class_names": ["n00000001"]}
    for other in (
        *(text[:100], "[" * 100_000, "", "{}", text.replace('"format": 2', '"format": 1')),
        *(elsewhere, *(json.dumps(json.loads(text) | change) for change in changes)),
    ):
        metadata.write_text(other)
        with pytest.raises(ValueError, match=r"about\.json (is not|was changed)"):
            Packed(str(packed.parent), "train")


def test_a_shard_truncated_during_reading_is_named(packed):
    """Mapped files would end the process with SIGBUS."""
    opened = Packed(str(packed.parent), "train")
    first = opened.read(0)
    os.truncate(packed / "images-00000.bin", first.nbytes)
    np.testing.assert_array_equal(opened.read(0), first)
    with pytest.raises(BadImages, match=r"image 1 of .*images-00000\.bin was shortened"):
        opened.stream((12, 12)).example(1)


@pytest.mark.parametrize("option", ["bad_images", "interpolation"])
def test_preparation_refuses_unknown_values(tmp_path, source, option):
    with pytest.raises(ValueError, match=f"{option} must be one of .*, not 'eror'"):
        prepare(source, tmp_path / "packed", **{option: "eror"})
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.touch() or os.truncate(path, 200_000_000), "has 200,000,000 bytes"),
    ],
)
def test_images_are_regular_files_of_limited_size(tmp_path, make, reason):
    write_folder(tmp_path, splits=("train",))
    (tmp_path / "train" / "n00000001" / "0.jpg").mkdir()  # a folder is not an image
    make(tmp_path / "train" / "n00000001" / "a.jpg")
    (bad,) = verify(Folder(str(tmp_path), "train"), workers=0)["bad"]
    assert bad["name"] == "n00000001/a.jpg"
    assert reason in bad["reason"]


def test_verify_lists_every_bad_image(tmp_path, capsys):
    write_folder(tmp_path / "set")
    (tmp_path / "set" / "train" / "empty").mkdir()
    arguments = ["--source=folder", f"--path={tmp_path / 'set'}", "--workers=0"]
    report = f"--report={tmp_path / 'new' / 'report.json'}"
    assert verify_main(arguments) == 0
    damage(tmp_path / "set", "train/n00000001/n00000001_1.JPEG")
    (tmp_path / "set" / "test" / "n00000002" / "n00000002_0.JPEG").write_bytes(b"")
    assert verify_main([*arguments, report]) == 1
    assert "1 of 3 classes have no images" in capsys.readouterr().out
    train, test = json.loads((tmp_path / "new" / "report.json").read_text())
    bad = [entry["name"] for entry in train["bad"] + test["bad"]]
    assert bad == ["n00000001/n00000001_1.JPEG", "n00000002/n00000002_0.JPEG"]
    # prepare refuses the images that verify lists, or skips them on request.
    packing = [*arguments, "--allow_empty", f"--out={tmp_path / 'packed'}"]
    with pytest.raises(SystemExit, match="1"):
        prepare_main(packing)
    assert "1 of 6 images cannot be used" in capsys.readouterr().err
    prepare_main([*packing, "--bad_images=skip"])  # resumes
    packed = Packed(str(tmp_path / "packed"), "train")
    assert (len(packed.labels), packed.about["skipped"][0][1]) == (5, bad[0])


def test_sets_of_huggingface_equal_their_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs datasets (the extra `datasets`)")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    written = write_folder(tmp_path / "folder")
    classes = datasets.ClassLabel(names=["n00000001", "n00000002"])
    features = datasets.Features({"label": classes, "picture": datasets.Image()})
    rows = {
        split: [
            {"label": name.split("/")[0], "picture": {"path": name.split("/")[1], "bytes": data}}
            for (of, name), data in reversed(written.items())
            if of == split
        ]
        for split in ("train", "test")
    }
    sets = {x: datasets.Dataset.from_list(rows[x], features=features) for x in rows}
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for split, part in sets.items():
        part.to_parquet(
            tmp_path / "parquet" / "data" / f"{split}-00000-of-00001.parquet", batch_size=2
        )
    sets["train"].save_to_disk(tmp_path / "one")
    for name, split in itertools.product(("saved", "parquet"), sets):
        other = load("huggingface", str(tmp_path / name), split, (12, 12)).source
        expect_equal(other, Folder(str(tmp_path / "folder"), split))
    rows["test"][1]["picture"] = None
    lacking = datasets.Dataset.from_list(rows["test"], features=features, split="test")
    lacking.save_to_disk(tmp_path / "lacking")
    sets["test"].remove_columns("label").save_to_disk(tmp_path / "unlabelled")
    for name, split, words in (
        ("one", "test", r"no split validation .* it has train"),
        ("lacking", "test", r"lacking: 1 of \d+ rows have no 'picture'"),
        ("unlabelled", "train", "0 features of the type ClassLabel"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            load("huggingface", str(tmp_path / name), split, 12)


def test_tfds_and_folders_give_equal_sets(tmp_path):
    reason = "needs tensorflow-datasets (the extra `data`)"
    tfds = pytest.importorskip("tensorflow_datasets", reason=reason)
    written = write_folder(tmp_path / "folder")

    class Pictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(names=["n00000001", "n00000002"]),
                "file_name": tfds.features.Text(),
            }
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {name: self._generate_examples(name) for name in ("train", "test")}

        def _generate_examples(self, requested):
            for (split, name), data in written.items():
                if split == requested:
                    label, file = name.split("/")
                    yield name, {"image": io.BytesIO(data), "label": label, "file_name": file}

    builder = Pictures(data_dir=tmp_path / "tfds", file_format="array_record")
    builder.download_and_prepare()
    for split in ("train", "test"):
        other = load("tfds", str(builder.data_dir), split, (12, 12)).source
        expect_equal(other, Folder(str(tmp_path / "folder"), split))
    assert "tensorflow" not in sys.modules
