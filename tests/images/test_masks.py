"""Masks of objects: from annotations to batches, in which they move with images and boxes."""

import numpy as np
import pytest

from rope_jax.data import batches, load
from rope_jax.data.images.fits import Placing, detr_crop, place_boxes, place_masks, place_pixels
from rope_jax.data.images.masks import decode_masks, encode_mask, encode_outline
from tests.images.coco_set import COLOURS, write_coco
from tests.images.streams import take
from tests.images.test_boxes import FIT, OPTIONS, unpack
from tests.images.test_coco import wrong
from tests.images.test_fits import SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "set")


def open_set(folder, split="train"):
    return load("coco", str(folder), split, (136, 136), crop=FIT, labels_of="masks")


def test_polygons_and_run_lengths_are_masks(folder):
    images = open_set(folder, "test")
    assert images.labels_of == "masks"
    for example in range(len(images.labels)):
        truth, size = images.truth(example), tuple(images.annotations.sizes[example].tolist())
        for mask, box in zip(decode_masks(truth.masks, size), truth.boxes.astype(int), strict=True):
            expected = np.zeros(size, np.uint8)
            expected[box[1] : box[3], box[0] : box[2]] = 1
            np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("window", [0, 40])
def test_masks_move_with_pixels_and_boxes(folder, window):
    """Rectangles of one colour stay as large as their boxes; images grow, so that none is lost."""
    images = open_set(folder)
    options = OPTIONS | {"augment": OPTIONS["augment"].replace(")+", f",window={window})+")}
    flips = set()
    for batch in take(20, batches(images, batch_size=3, **options)):
        assert not window or batch["extent"].max() <= window
        for pixels, boxes, labels, masks in zip(
            batch["image"], batch["boxes"], batch["label"], unpack(batch), strict=True
        ):
            assert not masks[labels < 0].any()
            for box, label, mask in zip(boxes, labels, masks, strict=True):
                if label < 0 or min(box[2:] - box[:2]) < 8:
                    continue
                rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
                edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                np.testing.assert_allclose(edges, box, atol=2.5)
                inner = pixels[rows[2] : rows[-2], columns[2] : columns[-2]].mean((0, 1))
                assert np.abs(inner - list(COLOURS.values())[label]).max() < 128
                flips.add(box[0] < pixels.shape[1] / 2)
    assert len(flips) == 2 or window  # which leaves most of a canvas empty


def test_a_window_is_cut_out_of_what_it_would_be_without(folder):
    size = (60, 90)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    masks = np.random.default_rng(1).integers(0, 2, (2, *size), np.uint8)
    boxes = np.array([[4.0, 5, 80, 50]])
    for draw in (1, 2, 3, 10**18):
        whole, part = (detr_crop(size, draw, **SMALL, window=n) for n in (0, 50))
        assert part[:3] == whole[:3]
        assert max(part.extent) == 50
        (top, left), (height, width) = part.offset, part.extent
        cut = (slice(top, top + height), slice(left, left + width))
        np.testing.assert_array_equal(place_pixels(image, part), place_pixels(image, whole)[cut])
        for one, other in zip(place_masks(masks, part), place_masks(masks, whole), strict=True):
            np.testing.assert_array_equal(one, other[cut])
        placed, _ = place_boxes(boxes, size, part)
        expected, _ = place_boxes(boxes, size, whole)
        limits = [width, height] * 2
        np.testing.assert_allclose(placed, np.clip(expected - [left, top] * 2, 0, limits))


def test_masks_are_resized_by_the_pixel_to_the_upper_left():
    masks = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    placed = place_masks(masks, Placing((2, 3), (0, 1), (2, 2), (3, 3), (0, 0), (3, 3)))
    np.testing.assert_array_equal(placed[0], masks[0][[0, 0, 1]][:, [1, 1, 2]])


@pytest.mark.parametrize(
    "outline",
    [
        None,
        [],
        [[1, 1, 2, 2]],
        [[1, 1, 2, 2, 3]],
        [[1, 1, 2, 2, float("nan"), 3]],
        "polygon",
        {"size": [48, 64], "counts": [1, -1]},
        {"size": [48, 64], "counts": [1, 2]},
        {"size": [48, 63], "counts": [48 * 63]},
        {"size": None, "counts": "1"},
        {"size": [48, 64], "counts": ""},
        {"size": [48, 64], "counts": "PP3o"},
        {"size": [48, 64], "counts": "PP3é"},
        {"size": [48, 64], "counts": "o" * 8 + "0"},
        {"size": [48, 64], "counts": "1OPP3"},  # 1, -1 and 48 * 64
    ],
)
def test_damaged_segmentations_are_refused(outline, tmp_path):
    folder = write_coco(tmp_path / "set")
    wrong("annotations", 0, segmentation=outline)(folder)
    message = (
        "segmentation of annotation 100 is damaged: run|damaged entry .*; segmentation is polygons"
    )
    with pytest.raises(ValueError, match=message):
        open_set(folder)
    load("coco", str(folder), "train", (136, 136), crop=FIT)  # which reads boxes alone


@pytest.mark.parametrize(("width", "left_out"), [(0.5, 1), (1, 0)])
def test_objects_narrower_than_a_pixel_are_not_trained_on(width, left_out, tmp_path):
    folder = write_coco(tmp_path / "set")
    wrong("annotations", 0, bbox=[0.13, 6, width, 14])(folder)  # 0.13 + 1 - 0.13 is less than 1
    images, boxes = open_set(folder), load("coco", str(folder), "train", (136, 136), crop=FIT)
    assert images.annotations.counts().sum() == boxes.annotations.counts().sum() - left_out
    assert len(images.example(0)["label"]) == 2 - left_out
    remarks = "\n".join(images.source.remarks())
    assert remarks.count("left out") == remarks.count("a side of less than a pixel") == left_out


def test_run_lengths_are_those_of_pycocotools():
    rng = np.random.default_rng(0)
    for size in ((1, 1), (5, 7), (300, 400)):
        for threshold in (0, 0.001, 0.5, 1):
            mask = encode_mask(rng.random(size) < threshold)
            outline = {"size": [*size], "counts": mask["counts"].decode()}
            assert encode_outline(outline, size) == mask["counts"]
