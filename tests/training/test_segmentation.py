"""Runs with a head: training, interruption, several seeds, evaluation, loading, `init_from`."""

from unittest import mock

import numpy as np
import pytest

import rope_jax
import rope_jax.runs.run
from rope_jax import data
from rope_jax.config import ConfigError
from rope_jax.data.sources import scenes
from rope_jax.evaluate import read_results
from tests.tasks.iou import assert_scores
from tests.training.recipe import (
    assert_same_end,
    final_state,
    logits,
    run,
    run_in_parts,
    start_from,
)

SCENES = {
    "data__source": "scenes",
    "data__image_size": 16,
    "data__augment": "flip",
    "model__position": "rope_mixed",
    "batch_size": 8,
    "steps": 4,
    "optim__warmup_epochs": 0.0,
    "optim__schedule": "poly",
    "checkpoint_every": 100,
    "eval__batch_size": 8,
    "eval__resolutions": ((12, 20),),
}
HEADS = {
    "segmenter": SCENES
    | {
        "model__head": "segmenter(head_dim=8,depth=1)",
        "model__options": "depth=1,width=16,heads=1,drop_path=0.2",
    },
    "upernet": SCENES
    | {
        "model__head": "upernet(width=8,auxiliary_width=8)",
        "model__options": "depth=4,width=16,heads=1,drop_path=0.2,scan_layers=True",
        "ema_decay": 0.9,
    },
    "mask2former": SCENES
    | {
        "model__head": "mask2former(width=8,heads=2,groups=2,pixel_depth=1,pixel_hidden=8,depth=3,"
        "hidden=8,queries=12,loss_points=32)",
        "model__options": "depth=4,width=16,heads=1,drop_path=0.2",
        "optim__backbone_rate": 0.1,
        "optim__exempt": "norms",
    },
    "linear": SCENES | {"model__head": "linear", "model__options": "depth=1,width=16,heads=1"},
}
UPERNET = HEADS["upernet"]


@pytest.fixture(autouse=True, scope="module")
def few_scenes():
    with mock.patch.dict(scenes.COUNTS, train=24, test=12):
        yield


@pytest.fixture(
    scope="module",
    params=[
        "linear",
        pytest.param("segmenter", marks=pytest.mark.slow),
        pytest.param("upernet", marks=pytest.mark.slow),
        pytest.param("mask2former", marks=pytest.mark.slow),
    ],
)
def finished(request, tmp_path_factory):
    """A workdir and the settings of its run."""
    workdir, settings = tmp_path_factory.mktemp(request.param), HEADS[request.param]
    run(workdir, **settings)
    return workdir, settings


def test_the_loaded_model_has_the_scores_of_the_run(finished):
    """Mean IoU by its definition, from the classes of all pixels of the test scenes."""
    workdir, settings = finished
    model, config = rope_jax.load_checkpoint(str(workdir))
    assert (model.head_notation, model.class_names[1]) == (settings["model__head"], "0")
    rows = read_results(workdir)["eval"]
    assert [row["resolution"] for row in rows] == [[16, 16], [12, 20]]
    assert all((workdir / name).stat().st_size for name in ("accuracy.png", "segments.png"))
    row = rows[1]
    images = data.load("scenes", split="test", image_size=(12, 20))
    x = (images.images / np.float32(255) - config.data.mean) / config.data.std
    classes = logits(model, x.astype(np.float32)).argmax(-1)
    assert_scores(row, classes, images.labels, 11)
    assert row["count"] == 12


@pytest.mark.slow
def test_interrupted_runs_resume_bit_for_bit(tmp_path, finished):
    workdir, settings = finished
    run_in_parts(tmp_path, 2, **settings)
    assert_same_end(tmp_path, workdir, **settings)
    four_maps = settings["model__head"].startswith(("upernet", "mask2former"))
    # The statistics of the batch norm between a ViT and such heads.
    assert ("stats" in final_state(tmp_path, **settings)) == four_maps


@pytest.mark.slow
def test_runs_start_from_a_classifier_or_another_backbone(tmp_path, capsys):
    plain = {"model__options": UPERNET["model__options"], "model__position": "rope_mixed"}
    run(tmp_path, epochs=0.1, eval__resolutions=(), **plain)  # digits of 8 x 8 pixels
    trained = rope_jax.load_checkpoint(str(tmp_path))[0]
    changes = UPERNET | {"model__num_classes": 11, "data__image_size": (16, 16)}
    model = start_from(tmp_path, **changes)
    kernel = trained.blocks.attn.qkv.kernel[...]
    np.testing.assert_array_equal(model.backbone.blocks.attn.qkv.kernel[...], kernel)
    output = capsys.readouterr().out
    assert (
        "weights of a classifier: new neck, head, not used head.bias, head.kernel, norm" in output
    )
    saved = tmp_path / "upernet"
    rope_jax.save_pretrained(model, saved)
    with pytest.raises(ConfigError, match="with the head 'upernet', and this model is a classifi"):
        start_from(saved, **plain)
    other = start_from(saved, **changes | {"model__head": "linear"})
    np.testing.assert_array_equal(other.backbone.blocks.attn.qkv.kernel[...], kernel)
    assert "weights of a model with the head 'upernet': new norm, head" in capsys.readouterr().out
