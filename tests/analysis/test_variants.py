import numpy as np
import pytest
from PIL import Image

from rope_jax.data import variants


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def test_the_lists_are_the_official_ones():
    real = variants.real_labels()
    assert len(real) == 50_000
    assert sum(map(bool, real)) == 46_837
    assert real[1] == (970, 795)  # ILSVRC2012_val_00000002
    assert len(set(variants.synsets())) == 1000
    for variant, first in (("a", [6, 11, 13]), ("r", [1, 2, 4])):
        classes = variants.subset(variant)
        assert len(set(classes)) == 200
        assert list(classes[:3]) == first
        assert sorted(classes) == list(classes)


def test_folders_of_a_variant_become_positions_in_its_slice(tmp_path):
    grey = np.full((8, 8, 3), 100, np.uint8)
    for synset in ("n01498041", "n01531178"):  # classes 6 and 11, the first two of ImageNet-A
        save(tmp_path / synset / "x.png", grey)
    found = variants.samples("a", tmp_path)
    assert found.labels == ((0,), (1,))
    assert found.classes == variants.subset("a")
    assert variants.samples("imagenet", tmp_path).labels == ((6,), (11,))
    assert variants.samples("folder", tmp_path).least == 2
    save(tmp_path / "n01440764" / "x.png", grey)
    with pytest.raises(ValueError, match="n01440764, which is not one of the 200 classes of 'a'"):
        variants.samples("a", tmp_path)


def test_v2_counts_classes_by_number_not_by_name(tmp_path):
    for number in ("2", "10"):
        save(tmp_path / number / "x.png", np.zeros((4, 4, 3), np.uint8))
    assert sorted(variants.samples("v2", tmp_path).labels) == [(2,), (10,)]
    with pytest.raises(ValueError, match="not named by a synset"):
        variants.samples("imagenet", tmp_path)


def test_real_leaves_out_images_without_a_label(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path / f"ILSVRC2012_val_{number:08d}.png", np.zeros((4, 4, 3), np.uint8))
    found = variants.samples("real", tmp_path)
    assert found.labels == ((970, 795), (230, 231))
    (batch,) = variants.file_batches(found, (4, 4), batch_size=3)
    assert batch["label"].tolist() == [[970, 795], [230, 231], [-1, -1]]
    assert batch["mask"].tolist() == [True, True, False]


@pytest.mark.parametrize("shape", [(300, 400), (257, 256), (256, 256)])
def test_preparing_is_resizing_the_whole_image_and_cutting_its_centre(shape):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    short = 256  # 224 / 0.875
    scale = short / min(shape)
    full = [short if side == min(shape) else int(side * scale) for side in shape]
    whole = np.array(Image.fromarray(image).resize((full[1], full[0]), Image.Resampling.BICUBIC))
    top, left = (round((side - 224) / 2) for side in full)
    wanted = whole[top : top + 224, left : left + 224].astype(int)
    got = variants.prepare(image, (224, 224), crop=0.875, interpolation="bicubic")
    assert abs(got - wanted).max() <= 1  # rounding of the box


def test_batches_keep_the_order_and_name_a_bad_file(tmp_path):
    for number in range(5):
        save(tmp_path / "all" / f"{number}.png", np.full((4, 6, 3), 10 * number, np.uint8))
    found = variants.samples("folder", tmp_path)
    batches = list(variants.file_batches(found, (2, 2), batch_size=2))
    assert [batch["image"][:, 0, 0, 0].tolist() for batch in batches] == [[0, 10], [20, 30], [40, 0]]
    assert sum(batch["mask"].sum() for batch in batches) == 5
    (tmp_path / "all" / "3.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"3\.png: "):
        list(variants.file_batches(found, (2, 2), batch_size=2))
