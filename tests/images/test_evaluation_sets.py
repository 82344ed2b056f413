import numpy as np
import pytest

from rope_jax.data import EvaluationSet, Streamed, evaluation_batches
from rope_jax.data.sources.evaluation_sets import real_labels, subset, synsets
from tests.images.test_pairs import save


def test_label_lists_match_the_official_ones():
    real = real_labels()
    assert (len(real), sum(map(bool, real))) == (50_000, 46_837)
    assert real[1] == (970, 795)  # ILSVRC2012_val_00000002
    assert len(set(synsets())) == 1000
    for variant, first in (("a", [6, 11, 13]), ("r", [1, 2, 4])):
        classes = list(subset(variant))
        assert (len(classes), classes[:3]) == (200, first)
        assert classes == sorted(set(classes))


def test_labels_index_the_competing_logits(tmp_path):
    grey = np.full((8, 8, 3), 100, np.uint8)
    for synset in ("n01498041", "n01531178"):  # classes 6 and 11, the first two of ImageNet-A
        save(tmp_path / synset / "x.png", grey)
    adversarial = EvaluationSet("a", tmp_path)
    assert (adversarial.labels.tolist(), adversarial.competing) == ([0, 1], subset("a"))
    assert EvaluationSet("imagenet", tmp_path).labels.tolist() == [6, 11]
    assert Streamed(EvaluationSet("folder", tmp_path), (4, 4)).classes == 2
    save(tmp_path / "n01440764" / "x.png", grey)
    for name, message in (
        ("a", r"'n01440764' .* one of the 200 classes of 'a'"),
        ("b", r"dataset must be one of imagenet, real, v2.*, not 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            EvaluationSet(name, tmp_path)


def test_a_part_of_a_set_has_all_classes_and_says_so(tmp_path):
    for number, synset in enumerate(("n01440764", "n01443537")):
        for name in "abcd":
            save(tmp_path / synset / f"{name}.png", np.full((4, 4, 3), number, np.uint8))
    part = EvaluationSet("imagenet", tmp_path).spread(4)
    assert part.labels.tolist() == [0, 0, 1, 1]
    assert [part.example_name(k)[-5] for k in range(4)] == ["a", "c", "a", "c"]
    assert part.note == "all classes compete; 4 of 8 images, evenly spaced"
    assert Streamed(part, (4, 4)).example(2)["image"].max() == 1
    assert len(EvaluationSet("imagenet", tmp_path).spread(9).labels) == 8


def test_v2_orders_classes_by_number(tmp_path):
    for number in ("2", "10"):
        save(tmp_path / number / "x.png", np.zeros((4, 4, 3), np.uint8))
    assert sorted(EvaluationSet("v2", tmp_path).labels) == [2, 10]
    with pytest.raises(ValueError, match="not named by a synset"):
        EvaluationSet("imagenet", tmp_path)


def test_real_skips_images_without_a_label(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path / f"ILSVRC2012_val_{number:08d}.png", np.zeros((4, 4, 3), np.uint8))
    source = EvaluationSet("real", tmp_path)
    (batch,) = evaluation_batches(Streamed(source, (4, 4)), batch_size=3)
    assert batch["label"][batch["mask"]].tolist() == [[970, 795], [230, 231]]
    assert batch["mask"].tolist() == [True, True, False]
    save(tmp_path / "ILSVRC2012_val_00000004.png", np.zeros((4, 4, 3), np.uint8))
    assert real_labels()[3] == (809,)  # one valid label, where other images have two
    assert EvaluationSet("real", tmp_path).labels[2].tolist() == [809, -1]
