"""A run with the head dino: interrupted and resumed, it ends as without."""

import json

import pytest

from rope_jax.data.sources import scenes
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.trees import tree_hash
from tests.training.recipe import final_state, interrupt_at, run

SETTINGS = {
    "data__source": "scenes",
    "data__image_size": 32,
    "data__augment": "flip",
    "data__max_boxes": 6,
    "model__position": "rope_mixed",
    "model__options": "patch_size=8,depth=1,width=16,heads=1",
    "model__head": "dino(width=16,levels=1,groups=2,heads=2,points=1,encoder_depth=1,"
    "decoder_depth=1,hidden=16,queries=8,denoising=4,detections=10)",
    "batch_size": 4,
    "steps": 4,
    "optim__backbone_rate": 0.1,
    "ema_decay": 0.9,
    "checkpoint_every": 100,
    "eval__batch_size": 4,
    "eval__resolutions": (),
}


@pytest.mark.slow
def test_interrupted_is_uninterrupted_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "COUNTS", {"train": 12, "test": 6})
    run(tmp_path / "whole", **SETTINGS)
    with monkeypatch.context() as patched:
        interrupt_at(patched, 2)
        with pytest.raises(Interrupted):
            run(tmp_path / "halves", **SETTINGS)
    run(tmp_path / "halves", **SETTINGS)
    whole, halves = (final_state(tmp_path / name, **SETTINGS) for name in ("whole", "halves"))
    assert int(halves["step"]) == 4
    assert tree_hash(halves) == tree_hash(whole)
    rows = [json.loads((tmp_path / x / "results.json").read_text()) for x in ("whole", "halves")]
    assert rows[0]["eval"] == rows[1]["eval"]
