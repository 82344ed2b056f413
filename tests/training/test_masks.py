"""Runs on folders of images and masks: what is refused before training, and exact resume."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from rope_jax.config import ConfigError
from rope_jax.tasks import classification, segmentation
from rope_jax.training.setup import load_split, prepare
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.trees import tree_hash
from tests.training.recipe import final_state, interrupt_at, replaced, run, tiny

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
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(3):
            classes = rng.integers(0, 3, (3, 4), dtype=np.uint8).repeat(6, 0).repeat(6, 1)
            pixels = np.repeat(80 * classes[..., None], 3, -1)
            Image.fromarray(pixels).save(tmp_path / split / f"{number}.jpg")
            Image.fromarray(classes).save(tmp_path / split / f"{number}.png")
    (tmp_path / "classes.txt").write_text("sky\nsea\nsand\n")
    return tmp_path


def refused(message, **changes):
    with pytest.raises(ConfigError, match=message):
        prepare(tiny(**MASKS | changes))


def test_mistakes_are_named_before_training(folder):
    path = {"data__path": str(folder)}
    refused(r"30x30 .*patch.*--config\.", **path, data__image_size=30)
    refused(
        r"--config.data.source=masks has classes of pixels, but vit_digits without a head",
        **path,
        model__head=None,
    )
    refused(r"crop changes images, but not .* \[--config.data.augment\]", **path,
            data__augment="crop(pad=1)")  # fmt: skip
    Image.fromarray(np.full((18, 24), 7, np.uint8)).save(folder / "val" / "2.png")
    refused(r"val/2.png has the value 7, .* \[--config.data.path\]", **path)
    (folder / "train" / "0.png").unlink()
    refused(r"0.png are no pair: .* \[--config.data\]", **path)


def test_settings_of_another_task_are_refused(folder):
    config = tiny(**MASKS, data__path=str(folder))
    images = load_split(config, "train")
    segmentation.check(config, images)
    digits = load_split(tiny(), "train")
    classification.check(tiny(), digits)
    with pytest.raises(ConfigError, match=r"head=linear needs classes of pixels, but .*source=mas"):
        segmentation.check(config, digits)
    changes = {
        "--config.mix.mixup=0.8 is for classes of whole": replaced(config, "mix", mixup=0.8),
        "label_smoothing=0.1 is for": dataclasses.replace(config, label_smoothing=0.1),
        "--config.loss=binary is for": dataclasses.replace(config, loss="binary"),
        "augment: rand_augment changes": replaced(config, "data", augment="rand_augment"),
        "augment: erase changes images": replaced(config, "data", augment="erase"),
    }
    for message, changed in changes.items():
        with pytest.raises(ConfigError, match=message):
            segmentation.check(changed, images)


@pytest.mark.slow
def test_an_interrupted_run_ends_bit_for_bit_as_an_uninterrupted_one(
    folder, tmp_path_factory, monkeypatch
):
    settings = MASKS | {"data__path": str(folder)}
    whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    run(whole, **settings)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(Interrupted):
            run(parts, **settings)
    run(parts, **settings)
    one, other = (final_state(place, **settings) for place in (whole, parts))
    assert tree_hash(one) == tree_hash(other)
    assert (whole / "segments.png").stat().st_size > 0
