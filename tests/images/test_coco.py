"""Sets in COCO's format: parsing, skipped images and boxes, and refusals."""

import pickle

import numpy as np
import pytest
from PIL import Image

from rope_jax.data import BadImages, check_labels, load
from tests.images.coco_set import OBJECTS, SIZES, annotations, write_annotations, write_coco


@pytest.fixture
def folder(tmp_path):
    return write_coco(tmp_path / "set")


def open_set(folder, split="train", size=(96, 96)):
    return load("coco", str(folder), split, size)


def test_images_and_classes_are_ordered_by_id(folder):
    images = open_set(folder, "test")
    assert images.class_names == ["cat", "dog", "bird"]
    assert (images.labels_of, images.classes, images.one_size) == ("boxes", 3, False)
    np.testing.assert_array_equal(images.annotations.sizes, list(SIZES.values()))
    for box in (images, pickle.loads(pickle.dumps(images))):
        for example, number in enumerate(SIZES):
            truth, objects = box.truth(example), OBJECTS.get(number, [])
            boxes = [(x, y, x + w, y + h) for _, x, y, w, h in objects]
            np.testing.assert_array_equal(truth.boxes, np.array(boxes).reshape(-1, 4))
            np.testing.assert_array_equal(truth.area, [0.75 * w * h for *_, w, h in objects])
            assert truth.labels.tolist() == [[3, 17, 90].index(box[0]) for box in objects]
    assert images.truth(4).crowd.tolist() == [False, False, True]


def test_training_skips_images_without_objects(folder):
    images = open_set(folder)
    names = [images.source.example_name(k) for k in range(len(images.labels))]
    assert names == [f"train2017/{number:012}.jpg" for number in (2, 11, 20, 30)]
    assert images.annotations.ends.tolist() == [2, 3, 6, 7]
    assert images.example(2)["label"].tolist() == [0, 0]  # not the crowd
    np.testing.assert_array_equal(images.annotations.counts(), [2, 1, 2, 1])


def test_images_may_lie_in_subfolders(folder):
    before = open_set(folder).example(0)["image"]
    (folder / "train2017" / "part").mkdir()
    (folder / "train2017" / "000000000002.jpg").rename(folder / "train2017" / "part" / "a.jpg")
    content = annotations()
    (entry,) = [image for image in content["images"] if image["id"] == 2]
    entry["file_name"] = "part/a.jpg"
    write_annotations(folder, "train", content)
    np.testing.assert_array_equal(open_set(folder).example(0)["image"], before)


def test_outside_boxes_are_clipped_and_empty_ones_skipped(folder, capsys):
    content = annotations()
    for k, box in {0: [-4, -6, 30, 26], 1: [60, 20, 30, 0], 3: [80, 8, 25, 20]}.items():
        content["annotations"][k]["bbox"] = box
    write_annotations(folder, "train", content)
    images = open_set(folder)
    example = images.example(0)
    scale = np.array(example["image"].shape[:2]) / images.annotations.sizes[0]
    np.testing.assert_allclose(example["boxes"], [[0, 0, 26 * scale[1], 20 * scale[0]]], rtol=1e-6)
    assert len(images.example(1)["label"]) == 0
    assert images.truth(0).boxes.tolist() == [[-4, -6, 26, 20], [60, 20, 90, 20]]
    check_labels(images)
    output = capsys.readouterr().err
    assert "set, train split: 1 of 7 boxes reach beyond their image: clipped" in output
    assert "2 of 7 boxes have no area inside their image: left out of training" in output
    check_labels(open_set(folder, "test"))
    assert capsys.readouterr().err == ""


def edit(change):
    """Returns a function that writes changed annotations into their file."""

    def damage(folder):
        content = annotations()
        change(content)
        write_annotations(folder, "train", content)

    return damage


def wrong(part, number, **entries):
    return edit(lambda content: content[part][number].update(entries))


def annotation_file(folder, year=2017):
    return folder / "annotations" / f"instances_train{year}.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong("annotations", 2, category_id=4), "image_id=7 and category_id=4"),
        (wrong("annotations", 2, image_id=4), "102 has image_id=4"),
        (wrong("annotations", 2, id="x"), "entry {'id': 'x'"),
        (wrong("annotations", 2, bbox=[1, 2, 3]), r"'bbox': \[1, 2, 3\]"),
        (wrong("annotations", 2, bbox=[1, 2, 3, 10**400]), "four finite numbers"),
        (wrong("annotations", 2, area=None), "'area': None"),
        (wrong("annotations", 2, iscrowd=2), "'iscrowd': 2"),
        (wrong("images", 0, height=None), "'000000000030.jpg', 'height': None"),
        (wrong("images", 0, id=20), "two of its images have the id 20"),
        (wrong("images", 0, height=1 << 40), "'height': 1099511627776"),
        (wrong("images", 0, file_name="other.jpg"), r"other.jpg is missing \(1 of the 6 images"),
        (wrong("categories", 0, id=3), "two of its categories have the id 3"),
        (wrong("categories", 0, name=None), "its categories must each have"),
        (edit(lambda x: x["annotations"].append({"id": 9})), "its annotations must be a list"),
        (edit(lambda x: x.pop("images")), "its images must be a list .*: None"),
        (
            edit(lambda x: [entry.update(iscrowd=1) for entry in x["annotations"]]),
            "has an object to train on",
        ),
        (
            lambda f: annotation_file(f).write_text(annotation_file(f).read_text()[:900]),
            "instances_train2017.json is damaged",
        ),
        (lambda f: annotation_file(f).write_bytes(b"\xff\xfe"), "is damaged"),
        (lambda f: annotation_file(f).write_text("[" * 100_000), "is damaged"),
        (
            lambda f: (f / "train2017" / "000000000002.jpg").unlink(),
            r"000000000002.jpg is missing \(1 of the 6 images",
        ),
        (lambda f: (f / "train2017").rename(f / "train2014"), "missing .6 of the 6 images"),
        (lambda f: annotation_file(f).unlink(), "has none"),
        (
            lambda f: annotation_file(f, 2014).write_text("{}"),
            "instances_train2014.json and instances_train2017.json",
        ),
    ],
)
def test_invalid_annotations_and_damaged_sets_are_named(folder, damage, message):
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_set(folder)


def test_images_unlike_their_annotated_size_are_bad(folder):
    Image.new("RGB", (30, 20)).save(folder / "train2017" / "000000000011.jpg")
    with pytest.raises(
        BadImages, match=r"image 1 of set \(train2017/000000000011.jpg\) .*20x30 .* one of 36x72"
    ):
        open_set(folder).example(1)


@pytest.mark.parametrize(
    "change",
    [
        wrong("annotations", 0, bbox=[4, 6, 20, 15]),
        wrong("annotations", 0, iscrowd=1),
        wrong("categories", 1, name="wolf"),
    ],
    ids=["box", "crowd", "name"],
)
def test_annotations_are_part_of_the_fingerprint(folder, change):
    before = open_set(folder).fingerprint()
    assert before == open_set(folder).fingerprint()
    change(folder)
    assert before != open_set(folder).fingerprint()


@pytest.mark.parametrize("crop", ["centre", "stretch", "scaled_crop", "detr_crop"])
def test_crops_that_change_the_aspect_ratio_are_refused(folder, crop):
    with pytest.raises(ValueError, match=f"{crop} is not for the evaluation"):
        load("coco", str(folder), "test", (96, 96), crop=crop)
