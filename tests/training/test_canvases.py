"""Runs on images with boxes that differ in size: refusals before training, and resuming."""

import numpy as np
import pytest

from rope_jax.config import ConfigError
from rope_jax.evaluate import read_results
from rope_jax.training.setup import prepare, training_batches
from tests.images.coco_set import annotations, write_annotations, write_coco
from tests.training.recipe import assert_same_end, run, run_in_parts, tiny

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


@pytest.fixture
def folder(tmp_path):
    return write_coco(tmp_path / "set")


NO_FIT = r"centre is not for the evaluation of .* use fit.*"


def assert_refused(folder, message, **changes):
    with pytest.raises(ConfigError, match=message):
        prepare(tiny(**COCO | {"data__path": str(folder)} | changes))


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
def test_invalid_settings_are_named_before_training(folder, changes, message):
    assert_refused(folder, message, **changes)


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
def test_unusable_annotations_are_named(folder, changes, message):
    write_annotations(folder, "val", annotations() | changes)
    assert_refused(folder, message)


@pytest.mark.slow
def test_runs_with_several_canvases_resume_exactly(tmp_path, folder):
    changes = COCO | {"data__path": str(folder)}
    setup, _ = prepare(tiny(**changes))
    stream, _ = training_batches(setup, 0)
    sizes = [next(stream)["image"].shape[1:3] for _ in range(4)]
    stream.close()
    assert sizes[0] != sizes[1]  # the step is recompiled, and then the host sends no constants
    run(tmp_path / "whole", **changes)
    run_in_parts(tmp_path / "halves", 2, **changes)
    assert_same_end(tmp_path / "whole", tmp_path / "halves", **changes)
    (row,) = read_results(tmp_path / "whole")["eval"]
    assert (row["count"], row["class_names"]) == (6, ["cat", "dog", "bird"])
    assert "fit(short=40,long=64) of each image" in row["protocol"]
    assert np.isfinite(row["ap"])
    assert (tmp_path / "whole" / "detections.png").stat().st_size > 0
