import math

import numpy as np
import pytest
from PIL import Image

from rope_jax.data.draws import example_draws
from rope_jax.data.images.joint import bilinear_crop, nearest_crop, scaled_crop, scaled_size
from rope_jax.data.sources.pairs import ade20k, masks


def draws(count):
    zeros = np.zeros(count, int)
    return example_draws(0, zeros, np.arange(count), count, "test").tolist()


def test_images_are_resized_between_centres_without_antialiasing():
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    for resized in ((5, 7), (20, 30)):
        found = bilinear_crop(image, resized, (0, 0), resized)
        for i, j in np.ndindex(*resized):
            y, x = (
                (k + 0.5) * n / m - 0.5 for k, n, m in zip((i, j), (9, 13), resized, strict=True)
            )
            wanted = 0
            for row in (math.floor(y), math.floor(y) + 1):
                for column in (math.floor(x), math.floor(x) + 1):
                    share = (1 - abs(y - row)) * (1 - abs(x - column))
                    wanted = wanted + share * image[min(max(row, 0), 8), min(max(column, 0), 12)]
            assert np.abs(found[i, j] - wanted).max() <= 0.501


def test_a_part_of_the_resized_image_is_cut_out_of_it():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)
    classes = rng.integers(0, 5, (9, 13), dtype=np.uint8)
    whole = bilinear_crop(image, (20, 30), (0, 0), (20, 30))
    part = bilinear_crop(image, (20, 30), (4, 7), (6, 8))
    np.testing.assert_array_equal(part, whole[4:10, 7:15])
    whole = nearest_crop(classes, (20, 30), (0, 0), (20, 30))
    np.testing.assert_array_equal(
        nearest_crop(classes, (20, 30), (4, 7), (6, 8)), whole[4:10, 7:15]
    )
    for i, j in np.ndindex(20, 30):
        assert whole[i, j] == classes[int((i + 0.5) * 9 / 20), int((j + 0.5) * 13 / 30)]


def test_image_and_classes_stay_together():
    """Each class has a colour: after augmentation, pixels away from borders still have it."""
    classes = np.repeat(np.repeat(np.arange(12).reshape(3, 4), 16, 0), 16, 1).astype(np.uint8)
    image = np.repeat((classes * 20)[..., None], 3, -1)
    sizes = set()
    for draw in draws(20):
        pixels, labels, extent = scaled_crop(image, classes, (48, 40), draw, short=48, long=64)
        assert pixels.shape == (48, 40, 3)
        assert labels.shape == (48, 40)
        inside = np.zeros((48, 40), bool)
        inside[: extent[0], : extent[1]] = True
        assert (labels[~inside] == 255).all()
        assert not pixels[~inside].any()
        same = pixels[..., 0][inside] == labels[inside] * 20
        assert same.mean() > 0.8
        sizes.add(extent)
    assert len(sizes) > 5


def test_crops_of_one_class_are_drawn_again():
    classes = np.zeros((64, 64), np.uint8)
    classes[:, 40:] = 1
    image = np.zeros((64, 64, 3), np.uint8)
    options = {"low": 1.0, "high": 1.0, "short": 64, "long": 64}
    shares = {}
    for share in (0.75, 1.0):
        crops = [
            scaled_crop(image, classes, (24, 24), d, share=share, **options)[1] for d in draws(60)
        ]
        shares[share] = np.mean(
            [np.bincount(c.ravel(), minlength=2).max() < 0.75 * c.size for c in crops]
        )
    assert shares[0.75] > 0.95 > 0.5 > shares[1.0]


def test_the_size_of_official_recipes():
    assert scaled_size((512, 683), 1.0, short=512, long=2048) == (512, 683)
    assert scaled_size((300, 2000), 1.0, short=512, long=2048) == (307, 2048)
    assert scaled_size((480, 640), 0.5, short=512, long=2048) == (256, 341)
    with pytest.raises(ValueError, match="low=2"):
        scaled_crop(
            np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8), (2, 2), 0, low=2.0, high=1.0
        )


def save(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(array)
    (picture if mode is None else picture.convert(mode)).save(path)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("b", "a"):
            save(tmp_path / split / f"{name}.jpg", rng.integers(0, 256, (4, 6, 3), dtype=np.uint8))
            save(tmp_path / split / f"{name}.png", rng.integers(0, 3, (4, 6), dtype=np.uint8))
    (tmp_path / "classes.txt").write_text("sky\nsea\nsand\n")
    return tmp_path


def test_a_folder_of_pairs(folder):
    found = masks(str(folder), "test")
    assert [file.name for file in found.images] == ["a.jpg", "b.jpg"]
    assert found.class_names == ("sky", "sea", "sand")
    wanted = np.array(Image.open(folder / "val" / "a.png"))
    np.testing.assert_array_equal(found.classes(0, (4, 6)), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "b.png").unlink(), "b.jpg has no labels: .*b.png is missing"),
        (lambda f: (f / "b.jpg").unlink(), "b.png has no image in"),
        (lambda f: save(f / "a.png", np.zeros((4, 5), np.uint8)), "a.png has 4x5 .* a.jpg 4x6"),
        (
            lambda f: save(f / "a.png", np.full((4, 6), 3, np.uint8)),
            "a.png has the value 3, .* 0 to 2",
        ),
        (lambda f: save(f / "a.png", np.zeros((4, 6), np.uint8), "P"), "a.png has a palette"),
        (lambda f: save(f / "a.png", np.zeros((4, 6, 3), np.uint8)), "a.png has colours"),
        (lambda f: (f / "a.png").write_bytes(b"no picture"), "a.png cannot be read as a PNG"),
        (lambda f: (f.parent / "classes.txt").unlink(), "classes.txt, which lists the classes"),
    ],
)
def test_bad_pairs_are_named(folder, change, message):
    change(folder / "train")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        masks(str(folder), "train").classes(0, (4, 6))


def test_ade20k_has_no_class_at_zero(tmp_path):
    labels = np.array([[0, 1, 150], [2, 0, 3]], np.uint8)
    save(tmp_path / "images" / "validation" / "ADE_val_1.jpg", np.zeros((2, 3, 3), np.uint8))
    save(tmp_path / "annotations" / "validation" / "ADE_val_1.png", labels)
    lines = [f"{i}\t0.1\t1\t2\tname {i}, other" for i in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *lines]))
    found = ade20k(str(tmp_path), "test")
    assert len(found.class_names) == 150
    assert found.class_names[0] == "name 1, other"
    np.testing.assert_array_equal(found.classes(0), [[255, 0, 149], [1, 255, 2]])
    save(tmp_path / "annotations" / "validation" / "ADE_val_1.png", labels + np.uint8(1))
    with pytest.raises(
        ValueError, match="has the value 151, which is none of its 150 classes: values"
    ):
        found.classes(0)
