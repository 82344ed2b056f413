"""Runs on folders of images and masks: refusals before training, and exact resume."""

import numpy as np
import pytest
from PIL import Image

from rope_jax.config import ConfigError
from rope_jax.training.setup import prepare
from tests.config.test_recipe_steps import masks
from tests.training.recipe import assert_same_end, run, run_in_parts, tiny

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


@pytest.fixture
def folder(tmp_path):
    return masks(tmp_path)


def assert_refused(message, **changes):
    with pytest.raises(ConfigError, match=message):
        prepare(tiny(**MASKS | changes))


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
        ({"data__augment": "rand_augment"}, "augment: rand_augment changes"),
        ({"data__augment": "erase"}, "augment: erase changes images"),
        (
            {"data__source": "digits", "data__path": None},
            "head=linear needs classes of pixels, but .*source=digits",
        ),
        ({"mix__mixup": 0.8}, "--config.mix.mixup=0.8 is for classes of whole"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 is for"),
        ({"loss": "binary"}, "--config.loss=binary is for classes of whole"),
    ],
)
def test_invalid_settings_are_named_before_training(folder, changes, message):
    assert_refused(message, **{"data__path": str(folder)} | changes)


def test_unpaired_files_and_other_classes_are_named(folder):
    Image.fromarray(np.full((72, 96), 7, np.uint8)).save(folder / "test" / "2.png")
    assert_refused(r"test/2.png has the value 7, .* \[--config.data.path\]", data__path=str(folder))
    (folder / "train" / "0.png").unlink()
    assert_refused(r"0.png do not match: .* \[--config.data\]", data__path=str(folder))


@pytest.mark.slow
def test_interrupted_runs_resume_bit_for_bit(folder, tmp_path_factory):
    settings = MASKS | {"data__path": str(folder)}
    uninterrupted, interrupted = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    run(uninterrupted, **settings)
    run_in_parts(interrupted, 2, **settings)
    assert_same_end(uninterrupted, interrupted, **settings)
    assert (uninterrupted / "segments.png").stat().st_size > 0
