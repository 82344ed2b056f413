"""Runs on folders of images with masks or boxes: refusals before training, and exact resume."""

import numpy as np
import pytest
from PIL import Image

from rope_jax.evaluate import read_results
from rope_jax.training.setup import prepare, training_batches
from tests.images.coco_set import annotations, write_annotations, write_coco
from tests.images.test_pairs import write_pairs
from tests.training.recipe import assert_refused, assert_same_end, run, run_in_parts, tiny

MASKS = {
    "data__source": "masks",
    "data__image_size": 16,
    "data__augment": "scaled_crop(short=16,long=64)+flip+photometric",
    "model__head": "linear",
    "model__options": "depth=1,width=16,heads=1,patch_size=4",
    "batch_size": 4,
    "steps": 4,
    "checkpoint_every": 100,
    "eval__resolutions": (),
}
CROP = "detr_crop(low=24,high=40,step=8,long=64,before_low=20,before_high=30,before_step=5,"
CROP += "cut_low=16,cut_high=30)"
COCO = {
    "data__source": "coco",
    "data__image_size": 64,
    "data__canvases": ((40, 64), 64),
    "data__max_boxes": 4,
    "data__augment": f"{CROP}+flip",
    "model__head": "dino(width=16,levels=1,groups=2,heads=2,points=1,encoder_depth=1,"
    "decoder_depth=1,hidden=16,queries=100,denoising=4,detections=10)",
    "model__options": "depth=1,width=16,heads=1,patch_size=8",
    "optim__backbone_rate": 0.1,
    "ema_decay": 0.9,
    "eval__frame": "fit(short=40,long=64)",
    "eval__resolutions": (),
    "eval__batch_size": 2,
    "batch_size": 2,
    "steps": 4,
    "checkpoint_every": 100,
}
NO_FIT = r"centre is not for the evaluation of .* use fit.*"


@pytest.fixture
def on_masks(tmp_path):
    return MASKS | {"data__path": str(write_pairs(tmp_path))}


@pytest.fixture
def on_boxes(tmp_path):
    return COCO | {"data__path": str(write_coco(tmp_path / "set"))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__image_size": 30}, r"30x30 .*patch.*--config\."),
        (
            {"model__head": None},
            "masks has classes of pixels, but vit_digits without a head",
        ),
        (
            {"data__augment": "crop(pad=1)"},
            r"crop changes images, but not .* \[--config.data.augment\]",
        ),
        ({"data__augment": "erase"}, "augment: erase changes images"),
        (
            {"data__source": "digits", "data__path": None},
            "head=linear needs classes of pixels, but .*source=digits",
        ),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 is for"),
    ],
)
def test_settings_that_masks_do_not_allow_are_named(on_masks, changes, message):
    assert_refused(message, **on_masks | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__head": None}, "boxes with classes, but vit_digits without a head .*model.head"),
        ({"model__head": "linear"}, "head=linear needs classes of pixels, but .*coco has boxes"),
        ({"model__head": "unknown"}, "head 'unknown'.*--config.model.head"),
        ({"data__max_boxes": 1}, r"has 2 objects .* 2 or more \[--config.data.max_boxes\]"),
        ({"data__canvases": ((40, 64),)}, r"64x64 .* but .* 40x64: .*\[--config.data.canvases\]"),
        ({"data__canvases": (64, 70)}, r"patch.*\[--config.data.canvases\]"),
        ({"data__canvases": ((24, 64), 64)}, r"queries.*\[--config.data.canvases\]"),
        ({"eval__frame": "centre"}, NO_FIT + r"\[--config.data\]"),
        (
            {"eval__frames": ("fit(short=20,long=30)", "centre")},
            NO_FIT + r"\[--config.eval.frames\]",
        ),
        (
            {"eval__frames": ("fit(short=40,long=72)",)},
            r"may need 72x72 pixels, but .* 40x64, .*\[--config.eval.frames\]",
        ),
        (
            {"data__augment": "resized_crop"},
            r"resized_crop changes images, but not .*\[--config.data.augment\]",
        ),
        ({"data__on_device": True}, r"on_device=True .* set is not one.*data.on_device\]"),
        ({"eval__resolutions": (32,)}, r"eval.resolutions=\(32,\), but the images of set keep the"),
    ],
)
def test_settings_that_boxes_do_not_allow_are_named(on_boxes, changes, message):
    assert_refused(message, **on_boxes | changes)


def test_unpaired_files_and_other_classes_are_named(on_masks, tmp_path):
    Image.fromarray(np.full((72, 96), 7, np.uint8)).save(tmp_path / "test" / "2.png")
    assert_refused(r"test/2.png has the value 7, .* \[--config.data.path\]", **on_masks)
    (tmp_path / "train" / "0.png").unlink()
    assert_refused(r"0.png do not match: .* \[--config.data\]", **on_masks)


OBJECTS, CLASSES = annotations()["annotations"], annotations()["categories"]
NO_OBJECT = r"no image of set, test split, has an object that .*\[--config.data.path\]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": []}, NO_OBJECT),
        ({"annotations": [x for x in OBJECTS if x["iscrowd"]]}, NO_OBJECT),
        (
            {"annotations": [OBJECTS[0] | {"category_id": 5}]},
            r"val2017.json is .*annotation 100 has .*category_id=5, .*\[--config.data\]",
        ),
        (
            {"annotations": [], "categories": CLASSES[:-1]},
            r"the splits of set have other classes: .*\[--config.data.path\]",
        ),
    ],
)
def test_unusable_annotations_are_named(on_boxes, tmp_path, changes, message):
    write_annotations(tmp_path / "set", "val", annotations() | changes)
    assert_refused(message, **on_boxes)


def assert_resumes(folder, settings):
    """Checks that a run with a stop ends like one without; returns the workdir of the latter."""
    run(folder / "whole", **settings)
    run_in_parts(folder / "parts", 2, **settings)
    assert_same_end(folder / "whole", folder / "parts", **settings)
    return folder / "whole"


@pytest.mark.slow
def test_runs_on_masks_resume_bit_for_bit(on_masks, tmp_path_factory):
    workdir = assert_resumes(tmp_path_factory.mktemp("runs"), on_masks)
    assert (workdir / "segments.png").stat().st_size > 0


@pytest.mark.slow
def test_runs_with_several_canvases_resume_bit_for_bit(tmp_path, on_boxes):
    stream, _ = training_batches(prepare(tiny(**on_boxes))[0], 0)
    first, second = (next(stream)["image"].shape for _ in range(2))
    stream.close()
    assert first != second  # the step is recompiled, and then the host sends no constants
    workdir = assert_resumes(tmp_path, on_boxes)
    (row,) = read_results(workdir)["eval"]
    assert (row["count"], row["class_names"]) == (6, ["cat", "dog", "bird"])
    assert "fit(short=40,long=64) of each image" in row["protocol"]
    assert np.isfinite(row["ap"])
    assert (workdir / "detections.png").stat().st_size > 0
