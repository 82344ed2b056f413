"""Sets that are read one image at a time: folders, packed pixels, archives, tfds."""

import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from rope_jax.data import (
    BadImages,
    BadSet,
    Streamed,
    batches,
    decode_image,
    evaluation_batches,
    load,
)
from rope_jax.data.images.crops import centre, crop_pixels
from rope_jax.data.images.decode import EncodedImage
from rope_jax.data.prepare import main as prepare_main
from rope_jax.data.prepare import prepare
from rope_jax.data.sources.folder import Folder
from rope_jax.data.sources.imagenet import ImageNet
from rope_jax.data.sources.packed import Packed
from rope_jax.data.verify import main as verify_main
from rope_jax.data.verify import verify
from rope_jax.files import sealed

AUGMENT = "resized_crop(scale_min=0.3,interpolation=random)+crop(pad=1)+flip"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def jpeg(seed, height, width):
    noise = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def write_folder(place, per_class=3, splits=("train", "test"), classes=("n00000002", "n00000001")):
    """Class folders with pictures of several sizes; returns the bytes by split and name."""
    written = {}
    for split, name, k in itertools.product(splits, classes, range(per_class)):
        (place / split / name).mkdir(parents=True, exist_ok=True)
        data = jpeg(len(written), 30 + 7 * k, 50 - 9 * k)
        (place / split / name / f"{name}_{k}.JPEG").write_bytes(data)
        written[split, f"{name}/{name}_{k}.JPEG"] = data
    return written


def same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])


def take(count, iterator):
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folder(tmp_path, held_out):
    written = write_folder(tmp_path, splits=("train", held_out))
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "n00000001" / ".DS_Store").write_bytes(b"x")
    for split, place in (("train", "train"), ("test", held_out)):
        one = load("folder", str(tmp_path), split, (8, 10))
        assert isinstance(one, Streamed)
        assert (one.size, one.split, one.classes, one.name) == ((8, 10), split, 2, tmp_path.name)
        assert one.labels.dtype == np.int32
        assert one.labels.tolist() == [0, 0, 0, 1, 1, 1]  # in the order of the names
        names = sorted(name for folder, name in written if folder == place)
        assert [one.source.example_name(k) for k in range(6)] == names
        assert [one.source.read(k) for k in range(6)] == [written[place, name] for name in names]
        assert len(pickle.dumps(one)) < 10_000
        assert pickle.loads(pickle.dumps(one)).source.read(5) == one.source.read(5)
    assert one.fingerprint().startswith("8x10 of 6 files 2 classes")


def test_a_folder_leaves_no_listing_behind(tmp_path):
    write_folder(tmp_path)
    one = Folder(str(tmp_path), "train")
    index = one.index
    assert index.is_dir()
    del one
    assert not index.exists()


def test_fingerprints_tell_sets_apart(tmp_path):
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b")
    write_folder(tmp_path / "c", classes=("n00000001", "n00000003"))
    (tmp_path / "b" / "train" / "n00000001" / "n00000001_0.JPEG").rename(
        tmp_path / "b" / "train" / "n00000001" / "other.JPEG"
    )
    sets = [load("folder", str(tmp_path / name), "train", (8, 8)) for name in "aabc"]
    prints = [one.fingerprint() for one in sets]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_folder_numbers_classes_as_in_training(tmp_path):
    write_folder(tmp_path, splits=("train",))
    write_folder(tmp_path, splits=("test",), classes=("n00000002",))
    assert load("folder", str(tmp_path), "test", (8, 8)).labels.tolist() == [1, 1, 1]
    (tmp_path / "test" / "dog").mkdir()
    with pytest.raises(ValueError, match="has a class 'dog'"):
        load("folder", str(tmp_path), "test", (8, 8))


def test_a_folder_without_splits_is_split(tmp_path):
    for name, count in (("cat", 11), ("dog", 5), ("eel", 1)):
        (tmp_path / name).mkdir()
        for k in range(count):
            (tmp_path / name / f"{k:02}.png").write_bytes(b"x")
    train, test = (load("folder", str(tmp_path), split, (8, 8)) for split in ("train", "test"))
    held_out = [test.source.example_name(k) for k in range(len(test.labels))]
    assert held_out == ["cat/04.png", "cat/09.png", "dog/04.png"]
    assert test.labels.tolist() == [0, 0, 1]
    kept = {train.source.example_name(k) for k in range(len(train.labels))}
    assert len(kept) == 14
    assert not kept & set(held_out)
    assert train.class_names == test.class_names == ["cat", "dog", "eel"]


def test_folder_refuses(tmp_path):
    write_folder(tmp_path, splits=("train",))
    with pytest.raises(ValueError, match="needs an image_size"):
        load("folder", str(tmp_path), "train", None)
    with pytest.raises(ValueError, match="is not a crop"):
        load("folder", str(tmp_path), "train", (8, 8), crop="flip")
    both = (
        r"for the test split, test or val: arrange .*/train/CLASS/\* and .*/val/CLASS/\*, or all "
    )
    with pytest.raises(FileNotFoundError, match=both):
        load("folder", str(tmp_path), "test", (8, 8))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/CLASS/\*, of which every fifth is then"):
        load("folder", str(tmp_path / "empty"), "train", (8, 8))
    (tmp_path / "val").mkdir()
    with pytest.raises(FileNotFoundError, match="has no images"):
        load("folder", str(tmp_path), "test", (8, 8))


def test_the_stream_of_files_is_that_of_their_pixels(tmp_path):
    """Pictures of the set's size in memory and as (lossless) files: the same stream."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    for k, picture in enumerate(pictures):
        (tmp_path / "train" / f"{k // 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "train" / f"{k // 3}" / f"{k}.png")
    np.savez(tmp_path / "set.npz", train_images=pictures, train_labels=np.arange(6) // 3)
    memory, files = (
        load("npz", str(tmp_path / "set.npz"), "train"),
        load("folder", str(tmp_path), "train", (12, 12)),
    )
    for augment in ("none", "crop(pad=2)+flip", AUGMENT):
        options = {"batch_size": 4, "seed": 3, "augment": augment}
        for left, right in zip(
            take(5, batches(memory, **options)),
            take(5, batches(files, ahead=True, **options)),
            strict=True,
        ):
            same(left, right)
    for left, right in zip(
        evaluation_batches(memory, batch_size=4),
        evaluation_batches(files, batch_size=4),
        strict=True,
    ):
        same(left, right)


@pytest.mark.parametrize("of", [2, 3])
def test_a_stream_of_files_does_not_depend_on_start_or_shards(tmp_path, of):
    write_folder(tmp_path)
    images, options = (
        load("folder", str(tmp_path), "train", (16, 16)),
        {"batch_size": 6, "seed": 0, "augment": AUGMENT},
    )
    whole = take(4, batches(images, **options))
    parts = [take(2, batches(images, start_step=2, shard=(k, of), **options)) for k in range(of)]
    for step in range(2):
        same(
            {key: np.concatenate([part[step][key] for part in parts]) for key in whole[0]},
            whole[2 + step],
        )
    assert sorted(np.concatenate([one["index"] for one in whole[:1]])) == list(range(6))


def test_evaluation_crops(tmp_path):
    written = write_folder(tmp_path)
    images = load("folder", str(tmp_path), "test", (16, 16), crop="centre(crop=0.8)")
    got = list(evaluation_batches(images, batch_size=4))
    pixels = np.concatenate([one["image"][one["mask"]] for one in got])
    assert np.concatenate([one["mask"] for one in got]).tolist() == [True] * 6 + [False] * 2
    for k, image in enumerate(pixels):
        picture = decode_image(written["test", images.source.example_name(k)])
        expected = crop_pixels(picture, lambda *args: centre(*args, crop=0.8), (16, 16))
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("of", [2, 3])
def test_shards_of_an_evaluation_of_files_are_the_whole(tmp_path, of):
    write_folder(tmp_path, per_class=4)
    images = load("folder", str(tmp_path), "test", (16, 16))
    parts = [evaluation_batches(images, batch_size=6, shard=(k, of)) for k in range(of)]
    for whole, *pieces in zip(evaluation_batches(images, batch_size=6), *parts, strict=True):
        same({key: np.concatenate([piece[key] for piece in pieces]) for key in whole}, whole)


def damage(place, name):
    file = place / name
    file.write_bytes(file.read_bytes()[:100])


def test_a_bad_image_is_an_error_that_names_it(tmp_path):
    write_folder(tmp_path)
    damage(tmp_path, "train/n00000001/n00000001_1.JPEG")
    images = load("folder", str(tmp_path), "train", (8, 8))
    for ahead in (False, True):
        with pytest.raises(
            BadImages,
            match=r"image 1 of .* \(n00000001/n00000001_1.JPEG\) cannot be used: the JPEG image",
        ):
            take(2, batches(images, batch_size=6, seed=0, ahead=ahead))
    (tmp_path / "train/n00000001/n00000001_1.JPEG").unlink()
    with pytest.raises(BadImages, match=r"No such file"):
        take(2, batches(images, batch_size=6, seed=0))
    with pytest.raises(ValueError, match="bad_images 'ignore' is unknown"):
        batches(images, batch_size=6, seed=0, bad_images="ignore")


def test_a_skipped_image_is_replaced_by_the_next_and_counted(tmp_path):
    write_folder(tmp_path)
    images = load("folder", str(tmp_path), "train", (8, 8))
    options = {"batch_size": 6, "seed": 0}
    clean = take(3, batches(images, **options))
    damage(tmp_path, "train/n00000001/n00000001_2.JPEG")  # number 2, the last of its class
    stream = batches(images, bad_images="skip", **options)
    for got, expected in zip(take(3, stream), clean, strict=True):
        same(
            {key: got[key][got["index"] != 2] for key in got},
            {key: expected[key][expected["index"] != 2] for key in expected},
        )
        replaced, substitute = got["index"] == 2, expected["index"] == 3
        assert got["label"][replaced].tolist() == [1]
        np.testing.assert_array_equal(got["image"][replaced], expected["image"][substitute])
    assert stream.skipped == {2}
    damage(tmp_path, "train/n00000002/n00000002_2.JPEG")
    with pytest.raises(
        BadSet, match=r"2 of 6 images cannot be used, more than 1 \(one in 1000\): 2, 5"
    ):
        take(1, batches(images, bad_images="skip", **options))


def test_a_skipped_image_is_not_evaluated(tmp_path):
    write_folder(tmp_path)
    damage(tmp_path, "test/n00000001/n00000001_2.JPEG")
    images = load("folder", str(tmp_path), "test", (8, 8))
    with pytest.raises(BadImages, match="image 2 of"):
        list(evaluation_batches(images, batch_size=4))
    got = list(evaluation_batches(images, batch_size=4, bad_images="skip"))
    assert np.concatenate([one["mask"] for one in got]).tolist() == [
        True,
        True,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert not got[0]["image"][2].any()


def test_a_set_without_a_usable_image_is_an_error_under_any_policy(tmp_path):
    write_folder(tmp_path, per_class=1, classes=("n00000001",))
    images = [load("folder", str(tmp_path), split, (8, 8)) for split in ("train", "test")]
    assert next(batches(images[0], batch_size=3, seed=0))["index"].tolist() == [0, 0, 0]
    for split in ("train", "test"):
        damage(tmp_path, f"{split}/n00000001/n00000001_0.JPEG")
    with pytest.raises(BadSet, match="1 of 1 images cannot be used, more than 0"):
        next(batches(images[0], batch_size=3, seed=0, bad_images="skip"))
    with pytest.raises(BadSet, match="1 of 1 images cannot be used, more than 0"):
        next(evaluation_batches(images[1], batch_size=3, bad_images="skip"))


def test_lack_of_memory_is_no_fault_of_an_image(tmp_path, monkeypatch):
    write_folder(tmp_path)
    images = load("folder", str(tmp_path), "train", (8, 8))
    monkeypatch.setattr(EncodedImage, "picture", lack_memory)
    with pytest.raises(MemoryError):
        next(batches(images, batch_size=6, seed=0, bad_images="skip"))


def lack_memory(image, **_):
    with image._blame():
        raise MemoryError


def tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def write_archives(place, written):
    """The official archives of the same pictures: one of archives by synset, one of files."""
    place.mkdir()
    synsets = sorted({name.split("/")[0] for _, name in written}, reverse=True)
    inner = {
        s: tar(
            [
                (n.split("/")[1], d)
                for (split, n), d in written.items()
                if split == "train" and n.startswith(s)
            ]
        )
        for s in synsets
    }
    (place / "ILSVRC2012_img_train.tar").write_bytes(
        tar([(f"{synset}.tar", inner[synset]) for synset in synsets])
    )
    held_out = [
        (name.split("/")[0], data) for (split, name), data in written.items() if split == "test"
    ]
    names = [f"ILSVRC2012_val_{k + 1:08}.JPEG" for k in range(len(held_out))]
    files = [(name, data) for name, (_, data) in zip(names, held_out, strict=True)]
    (place / "ILSVRC2012_img_val.tar").write_bytes(tar(files[::-1]))
    return names, held_out


def test_imagenet_archives_are_read_without_unpacking(tmp_path):
    from scipy.io import savemat

    written = write_folder(tmp_path / "folder")
    names, held_out = write_archives(tmp_path / "archives", written)
    archives = str(tmp_path / "archives")
    folder, train = Folder(str(tmp_path / "folder"), "train"), ImageNet(archives, "train")
    assert train.fingerprint() == folder.fingerprint()
    np.testing.assert_array_equal(train.labels, folder.labels)
    assert [train.read(k) for k in range(6)] == [folder.read(k) for k in range(6)]
    assert pickle.loads(pickle.dumps(train)).read(2) == folder.read(2)
    options = {"batch_size": 4, "seed": 0, "augment": AUGMENT}
    streams = [
        batches(load(*where, "train", (12, 12)), **options)
        for where in (("imagenet", archives), ("folder", str(tmp_path / "folder")))
    ]
    for left, right in zip(*(take(4, stream) for stream in streams), strict=True):
        same(left, right)

    with pytest.raises(FileNotFoundError, match="labels of the validation images are missing"):
        ImageNet(archives, "test")
    # The development kit numbers the synsets in an order of its own.
    numbers = {"n00000001": 7, "n00000002": 3}
    table = np.array(
        [(7, "n00000001"), (3, "n00000002")], dtype=[("ILSVRC2012_ID", "i4"), ("WNID", "O")]
    )
    mat = io.BytesIO()
    savemat(mat, {"synsets": table})
    truth = "".join(f"{numbers[synset]}\n" for synset, _ in held_out).encode()
    kit = [
        ("kit/data/meta.mat", mat.getvalue()),
        ("kit/data/ILSVRC2012_validation_ground_truth.txt", truth),
    ]
    (tmp_path / "archives" / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(kit)))
    by_kit = ImageNet(archives, "test")
    (tmp_path / "archives" / "validation_synsets.txt").write_text(
        "".join(f"{synset}\n" for synset, _ in held_out)
    )
    by_list = ImageNet(archives, "test")
    for source in (by_kit, by_list):
        assert source.labels.tolist() == [0, 0, 0, 1, 1, 1]
        data = dict(zip(names, (data for _, data in held_out), strict=True))
        for k in range(6):
            synset, name = source.example_name(k).split("/")
            assert source.read(k) == data[name]
            assert synset == held_out[names.index(name)][0] == f"n0000000{source.labels[k] + 1}"
    (tmp_path / "archives" / "validation_synsets.txt").write_text("n00000001\n")
    with pytest.raises(ValueError, match="holds 6 images, but there are labels of 1"):
        ImageNet(archives, "test")


@pytest.mark.parametrize(
    "name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"]
)
def test_damaged_archives_are_refused(tmp_path, name):
    write_archives(tmp_path / "archives", write_folder(tmp_path / "folder"))
    archive, split = tmp_path / "archives" / name, "train" if "train" in name else "test"
    whole = (
        archive.read_bytes()
        if archive.exists()
        else gzip.compress(tar([("kit/data/meta.mat", b"")]))
    )
    for content in (whole[: len(whole) // 3], b"", b"no archive" * 100):
        archive.write_bytes(content)
        with pytest.raises((ValueError, OSError), match=r"cannot be read|Not a gzipped file"):
            ImageNet(str(tmp_path / "archives"), split)
    if name.endswith(".gz"):
        archive.write_bytes(whole)
        with pytest.raises(
            ValueError, match=r"holds no file ILSVRC2012_validation_ground_truth.txt of at most"
        ):
            ImageNet(str(tmp_path / "archives"), split)


def test_an_archive_that_promises_more_than_it_has_is_refused(tmp_path):
    image = tarfile.TarInfo("n00000001_1.JPEG")
    image.size = 1 << 50
    inner = image.tobuf() + bytes(1024)
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar([("n00000001.tar", inner)]))
    with pytest.raises(ValueError, match=r"'n00000001_1.JPEG' does not lie in it as a whole"):
        ImageNet(str(tmp_path), "train")


def test_packed_images_are_the_pictures_resized_once(tmp_path):
    write_folder(tmp_path / "set")
    source = Folder(str(tmp_path / "set"), "train")
    for name, options, expected in [
        ("whole", {"side": 0}, lambda picture: picture.size),
        (
            "short",
            {"side": 24},
            lambda picture: tuple(max(1, s * 24 // min(picture.size)) for s in picture.size),
        ),
        ("square", {"side": 20, "square": True}, lambda picture: (20, 20)),
    ]:
        prepare(source, tmp_path / name, shard_images=4, **options)
        packed = Packed(str(tmp_path / name), "train")
        assert packed.labels.tolist() == source.labels.tolist()
        assert [packed.example_name(k) for k in range(6)] == [
            source.example_name(k) for k in range(6)
        ]
        assert [shard["examples"] for shard in packed.about["shards"]] == [4, 2]
        for k in range(6):
            picture = Image.fromarray(decode_image(source.read(k)))
            size = expected(picture)
            stored = packed.read(k)
            assert stored.shape == (*size[::-1], 3)
            if name != "square":
                resized = (
                    picture
                    if size == picture.size
                    else picture.resize(size, Image.Resampling.BICUBIC)
                )
                np.testing.assert_array_equal(stored, np.asarray(resized))
            else:
                np.testing.assert_array_equal(
                    stored, crop_pixels(np.asarray(picture), centre, (20, 20))
                )
        assert len(pickle.dumps(packed)) < 10_000
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(packed)).read(5), packed.read(5))
        assert packed.damaged() == []
    # Packed as they are, the pictures make the stream that their files make.
    options = {"batch_size": 5, "seed": 0, "augment": AUGMENT}
    streams = [
        batches(load(kind, str(tmp_path / name), "train", (12, 12)), **options)
        for kind, name in (("folder", "set"), ("packed", "whole"))
    ]
    for left, right in zip(*(take(4, stream) for stream in streams), strict=True):
        same(left, right)


def test_a_preparation_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "set")
    source = Folder(str(tmp_path / "set"), "train")
    prepare(source, tmp_path / "whole", shard_images=2)
    read, seen = Folder.read, []

    def failing(self, example):
        seen.append(example)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return read(self, example)

    monkeypatch.setattr(Folder, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "packed", shard_images=2)
    with pytest.raises(FileNotFoundError, match="not finished"):
        Packed(str(tmp_path / "packed"), "train")
    with pytest.raises(ValueError, match=r"was prepared in another way \(side: 256, now 24\)"):
        prepare(source, tmp_path / "packed", shard_images=2, side=24)
    prepare(source, tmp_path / "packed", shard_images=2)
    assert seen == [0, 1, 2, 3, 2, 3, 4, 5]  # the first shard was there
    left, right = (tmp_path / name / "train" for name in ("whole", "packed"))
    assert {file.name: file.read_bytes() for file in left.iterdir()} == {
        file.name: file.read_bytes() for file in right.iterdir()
    }
    prepare(source, tmp_path / "packed", shard_images=2)
    assert "is there already" in capsys.readouterr().out
    assert len(seen) == 8
    with pytest.raises(ValueError, match="was not written by this program: choose another folder"):
        prepare(source, tmp_path / "set")


def rewritten(folder, **changes):
    """about.json with other entries, and checksums of the arrays as they are now."""
    about = json.loads((folder / "about.json").read_text())
    del about["sha256"]
    for name in about["files"]:
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        about["files"][name] = {"bytes": len(content), "sha256": digest}
    (folder / "about.json").write_text(json.dumps(sealed(about | changes)))


def test_packed_refuses_what_is_not_whole(tmp_path):
    write_folder(tmp_path / "set")
    folder = prepare(Folder(str(tmp_path / "set"), "train"), tmp_path / "packed")
    shard = folder / "images-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert Packed(str(tmp_path / "packed"), "train").damaged() == ["images-00000.bin"]
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="were written: prepare it again"):
        Packed(str(tmp_path / "packed"), "train")
    shard.write_bytes(content)
    about = json.loads((folder / "about.json").read_text())
    rewritten(folder, shards=[about["shards"][0] | {"file": str(shard)}])
    with pytest.raises(ValueError, match="is not one of its own"):
        Packed(str(tmp_path / "packed"), "train")
    for shards in ("[]", 3, [{}], [about["shards"][0] | {"examples": 2**70}]):
        rewritten(folder, shards=shards)
        with pytest.raises(ValueError, match=r"do not fit each other|is not as this program"):
            Packed(str(tmp_path / "packed"), "train")
    shapes = np.load(folder / "shapes.npy")
    for wrong in (shapes + 1, shapes[:-1], -shapes, shapes.astype(np.int32)[:, :1]):
        np.save(folder / "shapes.npy", wrong)
        rewritten(folder, shards=about["shards"])
        with pytest.raises(ValueError, match="labels, shapes and shards do not fit each other"):
            Packed(str(tmp_path / "packed"), "train")
    np.save(folder / "shapes.npy", shapes)
    rewritten(folder, class_names=["one"])
    with pytest.raises(ValueError, match="labels, shapes and shards do not fit each other"):
        Packed(str(tmp_path / "packed"), "train")
    rewritten(folder, format=1)
    with pytest.raises(ValueError, match="is of format 1; this version reads format 2: remove it"):
        Packed(str(tmp_path / "packed"), "train")
    (folder / "about.json").unlink()
    os.mkfifo(folder / "about.json")
    with pytest.raises(FileNotFoundError, match="holds no packed images"):
        Packed(str(tmp_path / "packed"), "train")


@pytest.mark.parametrize("name", ["labels.npy", "shapes.npy", "names.npy", "ends.npy"])
def test_an_index_whose_entries_are_swapped_is_refused(tmp_path, name, capsys):
    """Of the same length and with the same values, in another order."""
    write_folder(tmp_path / "set")
    folder = prepare(Folder(str(tmp_path / "set"), "train"), tmp_path / "packed", side=0)
    before = load("packed", str(tmp_path / "packed"), "train", (8, 8)).fingerprint()
    np.save(folder / name, np.load(folder / name)[::-1])
    path = f"--path={tmp_path / 'packed'}"
    for opening in (
        lambda: load("packed", str(tmp_path / "packed"), "train", (8, 8)),
        lambda: sys.exit(verify_main(["--source=packed", path, "--splits=train"])),
    ):
        with pytest.raises((ValueError, SystemExit)) as caught:
            opening()
        told = str(caught.value) + capsys.readouterr().err
        assert f"{name} was changed after it was written" in told
    if name in ("labels.npy", "names.npy"):  # the lengths of the others fit no pixels any more
        rewritten(folder)  # as if the index were forged: at least it is another set
        after = load("packed", str(tmp_path / "packed"), "train", (8, 8)).fingerprint()
        assert after != before


def test_an_about_that_is_edited_is_refused(tmp_path):
    write_folder(tmp_path / "set")
    folder = prepare(Folder(str(tmp_path / "set"), "train"), tmp_path / "packed")
    text = (folder / "about.json").read_text()
    for damaged in (text.replace("n00000001", "n00000009"), text[:100], "[" * 100_000, "", "{}"):
        (folder / "about.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"about\.json|is of format None"):
            Packed(str(tmp_path / "packed"), "train")


def test_a_damaged_index_in_the_cache_is_written_again(tmp_path, cache, capsys):
    written = write_folder(tmp_path / "set", splits=("train",))
    write_archives(tmp_path / "archives", written)
    whole = ImageNet(str(tmp_path / "archives"), "train")
    index, labels = whole.index, whole.labels.tolist()
    np.save(index / "labels.npy", whole.labels[::-1])
    assert ImageNet(str(tmp_path / "archives"), "train").labels.tolist() == labels
    assert "labels.npy was changed after it was written; the index is" in capsys.readouterr().err


def endless(path):
    path.symlink_to("/dev/zero")


def too_large(path):
    with path.open("wb") as file:
        file.truncate(200_000_000)


@pytest.mark.parametrize("make", [os.mkfifo, endless, too_large, os.mkdir])
def test_only_regular_files_of_a_limited_size_are_images(tmp_path, make):
    write_folder(tmp_path, splits=("train",))
    make(tmp_path / "train" / "n00000001" / "a.jpg")
    if make is os.mkdir:  # not an image, as in any other viewer of folders
        assert len(Folder(str(tmp_path), "train").labels) == 6
        return
    images = load("folder", str(tmp_path), "train", (8, 8))
    with pytest.raises(BadImages, match=r"a\.jpg.* (not a regular file|200,000,000 bytes; al)"):
        images.read(0)
    (bad,) = verify(images.source, workers=0)["bad"]
    assert bad["name"] == "n00000001/a.jpg"


def test_an_empty_class_is_refused_unless_it_is_allowed(tmp_path):
    """As by torchvision: its images are missing, or its folder is no class."""
    write_folder(tmp_path)
    (tmp_path / "train" / "n00000003").mkdir()
    (tmp_path / "train" / "n00000003" / ".gitkeep").touch()
    for split in ("train", "test"):
        if split == "test":
            (tmp_path / "train" / "n00000003" / "1.png").touch()
            (tmp_path / "test" / "n00000003").mkdir()
        with pytest.raises(ValueError, match=r"n00000003 has no images.*allow_empty=True"):
            load("folder", str(tmp_path), split, (8, 8))
        assert load("folder", str(tmp_path), split, (8, 8), allow_empty=True).classes == 3


def test_verify_lists_every_bad_image(tmp_path, capsys):
    write_folder(tmp_path / "set")
    (tmp_path / "set" / "train" / "empty").mkdir()
    arguments = [
        "--source=folder",
        f"--path={tmp_path / 'set'}",
        "--workers=0",
        f"--report={tmp_path / 'report.json'}",
    ]
    assert verify_main(arguments) == 0
    damage(tmp_path / "set", "train/n00000001/n00000001_1.JPEG")
    (tmp_path / "set" / "test" / "n00000002" / "n00000002_0.JPEG").write_bytes(b"")
    capsys.readouterr()
    assert verify_main(arguments) == 1
    told = capsys.readouterr().out
    assert "bad: train 1 n00000001/n00000001_1.JPEG: the JPEG image cannot be decoded" in told
    assert "bad: test" in told
    assert "the image file is empty" in told
    assert "1 of 3 classes have no images" in told
    train, test = json.loads((tmp_path / "report.json").read_text())
    assert ([one["name"] for one in train["bad"]], train["images"]) == (
        ["n00000001/n00000001_1.JPEG"],
        6,
    )
    assert [one["name"] for one in test["bad"]] == ["n00000002/n00000002_0.JPEG"]
    assert verify_main(["--source=folder", f"--path={tmp_path / 'nothing'}"]) == 2
    # What verify lists is what prepare refuses, and leaves out where it is told to.
    packing = [
        "--source=folder",
        f"--path={tmp_path / 'set'}",
        "--workers=0",
        f"--out={tmp_path / 'packed'}",
    ]
    assert prepare_main(packing) == 1
    assert "train/empty has no images" in capsys.readouterr().err
    packing.append("--allow_empty")
    assert prepare_main(packing) == 1
    assert "1 of 6 images cannot be used" in capsys.readouterr().err
    assert prepare_main([*packing, "--bad_images=skip"]) == 0  # goes on from there
    assert prepare_main(packing) == 1
    assert (
        "was prepared without 1 images: accept that with --bad_images=skip"
        in capsys.readouterr().err
    )
    packed = Packed(str(tmp_path / "packed"), "train")
    assert len(packed.labels) == 5
    assert packed.about["skipped"][0][1] == "n00000001/n00000001_1.JPEG"
    assert verify(packed, workers=0)["bad"] == []


def test_tfds_and_a_folder_of_the_same_images_are_one_stream(tmp_path):
    tfds = pytest.importorskip(
        "tensorflow_datasets", reason="needs tensorflow-datasets (the extra `data`)"
    )
    written = write_folder(tmp_path / "folder")
    classes = sorted({name.split("/")[0] for _, name in written})

    class Pictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            label = tfds.features.ClassLabel(names=classes)
            features = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": label,
                "file_name": tfds.features.Text(),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            return {
                "train": self._generate_examples("train"),
                "validation": self._generate_examples("test"),
            }

        def _generate_examples(self, wanted):
            for (split, name), data in written.items():
                if split == wanted:
                    yield (
                        name,
                        {
                            "image": io.BytesIO(data),
                            "label": name.split("/")[0],
                            "file_name": name.split("/")[1],
                        },
                    )

    builder = Pictures(data_dir=tmp_path / "tfds", file_format="array_record")
    builder.download_and_prepare()
    places = (("folder", str(tmp_path / "folder")), ("tfds", str(builder.data_dir)))
    for split in ("train", "test"):
        folder, other = (load(*place, split, (12, 12)) for place in places)
        assert folder.fingerprint() == other.fingerprint()
        assert len(pickle.dumps(other)) < 10_000
        assert [folder.source.read(k) for k in range(6)] == [
            pickle.loads(pickle.dumps(other)).source.read(k) for k in range(6)
        ]
        options = {"batch_size": 4, "seed": 0, "augment": AUGMENT}
        for left, right in zip(
            take(6, batches(folder, **options)), take(6, batches(other, **options)), strict=True
        ):
            same(left, right)
    import sys

    assert "tensorflow" not in sys.modules
