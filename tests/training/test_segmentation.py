"""Runs with a head: trained, interrupted, of several seeds, evaluated, loaded, started from."""

import json
from unittest import mock

import jax
import numpy as np
import pytest

import rope_jax
import rope_jax.runs.run
from rope_jax import data
from rope_jax.commands import evaluate, report
from rope_jax.config import ConfigError
from rope_jax.data.sources import scenes
from rope_jax.tasks import seeds
from rope_jax.training.setup import prepare
from rope_jax.training.trees import tree_hash
from tests.config.test_recipes import resolved
from tests.training.recipe import (
    final_state,
    logits,
    losses,
    run,
    run_in_two_parts,
    started,
    tiny,
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


def rows_of(workdir):
    return json.loads((workdir / "results.json").read_text())["eval"]


def test_the_loaded_model_scores_what_the_run_reported(finished):
    """Mean IoU by its definition, from the classes of all pixels of the test scenes."""
    workdir, settings = finished
    model, config = rope_jax.load_checkpoint(str(workdir))
    assert (model.head_notation, model.class_names[1]) == (settings["model__head"], "0")
    rows = rows_of(workdir)
    assert [row["resolution"] for row in rows] == [[16, 16], [12, 20]]
    assert (workdir / "accuracy.png").stat().st_size > 0
    row = rows[1]
    images = data.load("scenes", split="test", image_size=(12, 20))
    x = (images.images / np.float32(255) - config.data.mean) / config.data.std
    found = logits(model, x.astype(np.float32)).argmax(-1)
    iou = []
    for number in range(11):
        predicted, there = found == number, images.labels == number
        union = (predicted | there).sum()
        iou.append((predicted & there).sum() / union if union else None)
    assert row["iou"] == pytest.approx(iou, abs=1e-12)
    assert row["miou"] == pytest.approx(np.mean([x for x in iou if x is not None]), abs=1e-12)
    assert row["accuracy"] == pytest.approx((found == images.labels).mean(), abs=1e-12)
    assert row["count"] == 12


def test_interrupted_is_uninterrupted_bit_for_bit(tmp_path, finished):
    workdir, settings = finished
    run_in_two_parts(tmp_path, 2, **settings)
    states = [final_state(folder, **settings) for folder in (tmp_path, workdir)]
    four_maps = settings["model__head"].startswith(("upernet", "mask2former"))
    assert ("stats" in states[0]) == four_maps  # of the batch norm between a ViT and such heads
    assert tree_hash(states[0]) == tree_hash(states[1])
    assert rows_of(tmp_path) == rows_of(workdir)
    assert losses(tmp_path) == losses(workdir)


@pytest.mark.parametrize("classes", [10, 12])
def test_a_run_has_as_many_classes_as_the_images(classes):
    with pytest.raises(ConfigError, match=f"{classes}, but scenes has 11 .* of pixels: use 11, or"):
        prepare(tiny(**HEADS["linear"] | {"model__num_classes": classes}))


@pytest.mark.slow
def test_a_run_starts_from_a_classifier_or_from_the_backbone_of_another_head(tmp_path, capsys):
    plain = {"model__options": UPERNET["model__options"], "model__position": "rope_mixed"}
    run(tmp_path, epochs=0.1, eval__resolutions=(), **plain)  # digits of 8 x 8 pixels
    trained = rope_jax.load_checkpoint(str(tmp_path))[0]
    changes = UPERNET | {"model__num_classes": 11, "data__image_size": (16, 16)}
    model = started(tmp_path, **changes)
    kernel = trained.blocks.attn.qkv.kernel[...]
    np.testing.assert_array_equal(model.backbone.blocks.attn.qkv.kernel[...], kernel)
    found = capsys.readouterr().out
    assert "weights of a classifier: new neck, head, not used head.bias, head.kernel, norm" in found
    saved = tmp_path / "upernet"
    rope_jax.save_pretrained(model, saved)
    with pytest.raises(ConfigError, match="with the head 'upernet', and this model is a classifi"):
        started(saved, **plain)
    other = started(saved, **changes | {"model__head": "linear"})
    np.testing.assert_array_equal(other.backbone.blocks.attn.qkv.kernel[...], kernel)
    assert "weights of a model with the head 'upernet': new norm, head" in capsys.readouterr().out


@pytest.mark.slow
def test_several_seeds_are_each_as_if_alone_and_share_a_report(tmp_path, capsys):
    # Adam would turn the rounding of gradients near 0 into whole steps.
    common = UPERNET | {"data__on_device": True, "optim__name": "sgd", "optim__learning_rate": 0.1}
    both, alone = common | {"seeds": 2}, common | {"seed": 1}
    run(tmp_path / "both", **both)
    run(tmp_path / "alone", **alone)
    state = final_state(tmp_path / "both", **both)
    second = seeds.split(state["params"], tiny(**both).seeds)[1]
    other = final_state(tmp_path / "alone", **alone)["params"]
    assert jax.tree.structure(second) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(second), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6)
    assert [row["seed"] for row in rows_of(tmp_path / "both")] == [0, 1, 0, 1]
    report.main([str(tmp_path / "both"), "--out", str(tmp_path / "report")])
    assert "mean IoU (%)" in capsys.readouterr().out
    assert "Mean IoU in percent" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.slow
def test_the_recipe_of_scenes_takes_mask2former(tmp_path, monkeypatch):
    """Trained, scored at another size with a picture, and seen through overlapping windows."""
    monkeypatch.setitem(scenes.COUNTS, "test", 4)
    head = (
        "mask2former(width=32,pixel_depth=1,pixel_hidden=32,hidden=32,queries=20,loss_points=100,"
        "depth=3)"
    )
    changes = {"batch_size": 8, "steps": 2, "eval__batch_size": 4, "data__on_device": False}
    config = resolved("scenes", f"head={head}", **changes, eval__resolutions=((64, 48),))
    rope_jax.runs.run.train(config, tmp_path)
    assert [row["resolution"] for row in rows_of(tmp_path)] == [[64, 64], [64, 48]]
    assert (tmp_path / "segments.png").stat().st_size > 0
    evaluate.main([str(tmp_path), "--resolutions=48", "--window=32", "--stride=16", "--flip"])
    (row,) = json.loads((tmp_path / "evaluations.json").read_text())["rows"]
    assert (tmp_path / "predictions_48x48.png").stat().st_size > 0

    model, _ = rope_jax.load_checkpoint(str(tmp_path))
    images = data.load("scenes", split="test", image_size=48)
    x = (images.images / np.float32(255) - 0.5) / np.float32(0.5)
    sums, count = np.zeros((4, 48, 48, 11)), np.zeros((48, 48, 1))
    for i, j in np.ndindex(2, 2):
        at = np.s_[:, 16 * i : 16 * i + 32, 16 * j : 16 * j + 32]
        count[at[1:]] += 2
        sums[at] += logits(model, x[at])
        sums[at] += logits(model, x[at][:, :, ::-1])[:, :, ::-1]
    right = (sums / count).argmax(-1) == images.labels
    assert row["accuracy"] == pytest.approx(right.mean(), abs=1e-3)
