"""Images with PNGs of the classes of their pixels: folders, batches, bad input."""

import itertools
import pickle

import numpy as np
import pytest
from PIL import Image

from rope_jax.commands.prepare import main as prepare_main
from rope_jax.commands.verify import main as verify_main
from rope_jax.data import BadImages, Images, batches, check_labels, evaluation_batches, load
from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import parse_loader
from rope_jax.data.verification import verify
from tests.images.test_decode import png
from tests.refusals import expect_refusal

CROP = "scaled_crop(short=12,long=40)"


def save(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(array)
    (picture if mode is None else picture.convert(mode)).save(path)


def write_pairs(folder, held_out="test", count=4, scale=lambda number: (24, 24)):
    """Images of several sizes per split, with colours of 80 times their class."""
    rng = np.random.default_rng(0)
    for split, number in itertools.product(("train", held_out), range(count)):
        rows, columns = scale(number)
        classes = rng.integers(0, 3, (3, 4), np.uint8).repeat(rows, 0).repeat(columns, 1)
        save(folder / split / f"{number}.jpg", np.repeat(80 * classes[..., None], 3, -1))
        save(folder / split / f"{number}.png", classes)
    (folder / "classes.txt").write_text("sky\nsea\nsand\n")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_pairs(tmp_path, "val", 5, lambda number: (6 + number, 5 + number))


def read_classes(folder, split, number):
    return np.array(Image.open(folder / split / f"{number}.png"))


def test_a_folder_of_pairs(folder):
    Image.open(folder / "val" / "3.jpg").save(folder / "val" / "3.TIF")
    (folder / "val" / "3.jpg").unlink()
    images = load("masks", str(folder), "test", (16, 12))
    expected = [f"val/{k}.{'TIF' if k == 3 else 'jpg'}" for k in range(5)]
    assert [images.source.example_name(k) for k in range(5)] == expected
    assert images.class_names == ["sky", "sea", "sand"]
    for copied in (images, pickle.loads(pickle.dumps(images))):
        image, classes = copied.original(3)
        np.testing.assert_array_equal(classes, read_classes(folder, "val", 3))
        assert np.abs(image[..., 1].astype(int) - 80 * classes.astype(int)).mean() < 10
    check_labels(images)


def test_training_batches_crop_and_flip_pairs_before_padding(folder):
    images = load("masks", str(folder), "train", (16, 12))
    batch = next(batches(images, batch_size=20, seed=3, augment=f"{CROP}+flip"))
    assert batch["label"].dtype == np.uint8
    crop, _ = parse_loader(f"{CROP}+flip")
    draws = example_draws(3, batch["epoch"], batch["index"], 5, "0 scaled_crop").tolist()
    flipped = set()
    for k, draw in enumerate(draws):
        pixels, classes = crop(*images.original(int(batch["index"][k])), (16, 12), draw)
        height, width = batch["extent"][k]
        mirrored = not np.array_equal(batch["image"][k, :height, :width], pixels)
        flipped.add(mirrored)
        step, padding = -1 if mirrored else 1, ((0, 16 - height), (0, 12 - width))
        padded = np.pad(pixels[:, ::step], (*padding, (0, 0)))
        np.testing.assert_array_equal(batch["image"][k], padded)
        padded = np.pad(classes[:, ::step], padding, constant_values=255)
        np.testing.assert_array_equal(batch["label"][k], padded)
    assert flipped == {False, True}
    assert len(np.unique(batch["extent"], axis=0)) > 2


def test_evaluation_batches_have_one_size(folder):
    images = load("masks", str(folder), "test", (24, 20), crop="stretch(interpolation=bilinear)")
    _, last = evaluation_batches(images, batch_size=3)
    assert last["mask"].tolist() == [True, True, False]
    stretched = Image.fromarray(read_classes(folder, "val", 4)).resize((20, 24), Image.NEAREST)
    np.testing.assert_array_equal(last["label"][1], stretched)
    assert "stretch(interpolation=bilinear) of each image" in images.protocol


def store_upside_down(path):
    """Stores an image upside down, with the matching Exif orientation."""
    image = Image.open(path)
    exif = image.getexif()
    exif[274] = 3
    image.rotate(180).save(path, exif=exif)


def write_four_bits(path):
    """Writes a grey PNG of 4 bits, whose values Pillow multiplies by 17."""
    path.write_bytes(png(24, 21, 4, 0, (b"\0" + b"\x11" * 12) * 21))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "1.png").unlink(), "train/1 and .*train/1.png do not match"),
        (lambda f: (f / "1.jpg").unlink(), "train/1 and .*train/1.png do not match"),
        (lambda f: (f / "1.webp").write_bytes(b""), "train/1 and .*train/1.png do not match"),
        (lambda f: save(f / "1.png", np.zeros((4, 5), np.uint8)), "1.png has 4x5 .*1.jpg 21x24"),
        (
            lambda f: save(f / "1.png", np.full((21, 24), 3, np.uint8)),
            "1.png has the value 3, .* 0 to 2, and 255 for no class",
        ),
        (lambda f: save(f / "1.png", np.zeros((21, 24), np.uint8), "P"), "1.png .* mode is P"),
        (lambda f: save(f / "1.png", np.zeros((21, 24, 3), np.uint8)), "1.png .* mode is RGB"),
        (lambda f: write_four_bits(f / "1.png"), "1.png .* of 4 bits"),
        (lambda f: (f / "1.png").write_bytes(b"no picture"), "1.png cannot be read as a PNG"),
        (lambda f: (f / "1.png").write_bytes((f / "1.png").read_bytes()[:60]), "1.png cannot be"),
        (lambda f: (f.parent / "classes.txt").unlink(), "No such file.*classes.txt"),
        (lambda f: (f.parent / "classes.txt").write_text("\nsky\n"), "classes.txt has an empty"),
        (lambda f: (f.parent / "classes.txt").write_text("\n"), "classes.txt has an empty"),
        (lambda f: (f.parent / "classes.txt").write_bytes(b"\xff\n"), "classes.txt is not text in"),
        (
            lambda f: store_upside_down(f / "1.jpg"),
            r"train/1.jpg has an Exif rotation \(orientation 3\)",
        ),
        (lambda f: [file.unlink() for file in f.iterdir()], "train has no images"),
    ],
)
def test_bad_pairs_are_named(folder, change, message):
    change(folder / "train")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_labels(load("masks", str(folder), "train", (16, 12)))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: save(f / "train" / "1.png", 1 - np.minimum(read_classes(f, "train", 1), 1)),
        lambda f: (f / "classes.txt").write_text("sea\nsky\nsand\n"),
    ],
    ids=["labels", "names"],
)
def test_labels_and_class_names_are_part_of_the_fingerprint(folder, change):
    before = load("masks", str(folder), "train", (16, 12)).fingerprint()
    change(folder)
    assert load("masks", str(folder), "train", (16, 12)).fingerprint() != before


def test_bad_labels_can_be_skipped_like_bad_images(folder):
    save(folder / "train" / "1.png", np.zeros((4, 5), np.uint8))
    images = load("masks", str(folder), "train", (16, 12))
    check_labels(images, "skip")
    with pytest.raises(BadImages, match=r"image 1 of .* \(train/1.jpg\) cannot be used: .*4x5"):
        next(batches(images, batch_size=5, seed=0, augment=CROP))
    stream = batches(images, batch_size=5, seed=0, augment=CROP, bad_images="skip")
    next(stream)
    assert stream.skipped == {1}
    store_upside_down(folder / "train" / "2.jpg")
    with pytest.raises(BadImages, match=r"image 2 of .* train/2.jpg has an Exif rotation"):
        images.original(2)
    with pytest.raises(ValueError, match=r"1.png has 4x5 .* \(2 of 5 images are affected\)"):
        check_labels(images, "skip")


def test_verify_reads_labels_and_reports_empty_classes(folder, capsys):
    (folder / "classes.txt").write_text("sky\nsea\nsand\nsnow\n")
    report = verify(load("masks", str(folder), "train", (8, 8)).source, workers=0)
    assert (report["images"], report["classes"], report["bad"]) == (5, 4, [])
    assert report["empty_classes"] == ["snow"]
    store_upside_down(folder / "train" / "2.jpg")
    save(folder / "val" / "1.png", np.full((21, 24), 9, np.uint8))
    asked = ["--source=masks", f"--path={folder}", "--workers=0"]
    assert verify_main(asked) == 1
    output = capsys.readouterr().out
    assert all(f"bad: {x}.jpg: " in output for x in ("train 2 train/2", "test 1 val/1"))
    with expect_refusal(capsys, "classes of pixels, which a packed set cannot hold"):
        prepare_main([*asked, f"--out={folder / 'packed'}"])


def test_ade20k_has_no_class_at_zero(tmp_path):
    labels = np.array([[0, 1, 150], [2, 0, 3]], np.uint8)
    save(tmp_path / "images" / "validation" / "ADE_val_1.jpg", np.zeros((2, 3, 3), np.uint8))
    save(tmp_path / "annotations" / "validation" / "ADE_val_1.png", labels)
    lines = [f"{i}\t0.1\t1\t2\tname {i}, other" for i in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *lines]))
    images = load("ade20k", str(tmp_path), "test", (8, 8))
    assert images.class_names == [f"name {i}, other" for i in range(1, 151)]
    np.testing.assert_array_equal(images.original(0)[1], [[255, 0, 149], [1, 255, 2]])
    assert images.source.read_classes(0) == [0, 1, 2, 149]
    save(tmp_path / "annotations" / "validation" / "ADE_val_1.png", labels + np.uint8(1))
    with pytest.raises(
        ValueError, match="value 151, which is none of its 150 classes: values are 1"
    ):
        check_labels(images)


def test_augmentations_that_ignore_labels_are_refused(folder):
    images = load("masks", str(folder), "train", (16, 12))
    digits = Images(np.zeros((2, 8, 8, 3), np.uint8), np.int32([0, 1]), "digits", "train", 2)
    for wrong, augment in ((images, "crop(pad=2)"), (digits, CROP)):
        with pytest.raises(ValueError, match="crop changes images, but not the labels"):
            batches(wrong, batch_size=1, seed=0, augment=augment)
    for crop in ("scaled_crop", "resized_crop"):
        with pytest.raises(
            ValueError, match=f"{crop} is not for the evaluation of .* use centre, stretch"
        ):
            load("masks", str(folder), "test", (16, 12), crop=crop)
