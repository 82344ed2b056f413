"""Runs on images with boxes that differ in size: what is refused before training, and resuming."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import evaluate
from rope_jax.config import ConfigError
from rope_jax.data import decode_image
from rope_jax.models.heads.detection import best_detections
from rope_jax.models.heads.head import HEADS, Entry, Head
from rope_jax.models.registry import Options
from rope_jax.training.setup import prepare, training_batches
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.trees import tree_hash
from tests.images.coco_set import annotations, write_annotations, write_coco
from tests.training.recipe import final_state, interrupt_at, run, tiny

CROP = "detr_crop(low=24,high=40,step=8,long=64,before_low=20,before_high=30,before_step=5,"
CROP += "cut_low=16,cut_high=30)"
COCO = {
    "data__source": "coco",
    "data__image_size": 64,
    "data__canvases": ((40, 64), 64),
    "data__max_boxes": 4,
    "data__augment": f"{CROP}+flip",
    "model__head": "guess",
    "model__options": "depth=1,width=16,heads=1,patch_size=8",
    "eval__frame": "fit(short=40,long=64)",
    "eval__resolutions": (),
    "eval__batch_size": 2,
    "batch_size": 2,
    "steps": 4,
    "checkpoint_every": 100,
}


class Guess(Head):
    """A box of every cell of the last map, and no matching: a small program."""

    task = "detection"
    padded = True

    def __init__(self, options, *, channels, num_classes, dtypes, rngs):
        self.options, self.out_features = options, num_classes
        self.guess = nnx.Linear(channels[-1], num_classes + 4, rngs=rngs, **dtypes)

    def __call__(self, maps, *, train=False, key=None, extent=None, image_size=None, targets=None):
        found = self.guess(maps[-1])
        return found.reshape(len(found), -1, found.shape[-1]), extent

    def check_maps(self, sizes, image_size):
        if math.prod(sizes[-1]) < 40:
            raise ValueError("too few cells")

    def result(self, predictions, image_size):
        found, extent = predictions
        return best_detections(found[..., :-4], jax.nn.sigmoid(found[..., -4:]), extent, 5)

    def loss(self, predictions, batch, *, key=None, divisor="all"):
        found, _ = predictions
        centre = (batch["boxes"] * (batch["label"] >= 0)[..., None]).mean(1)
        guess = jax.nn.sigmoid(found[..., -4:]).mean(1)
        return ((guess - centre) ** 2).mean() + (found**2).mean(), jnp.float32(0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(HEADS, "guess", Entry(Guess, Options()))
    return write_coco(tmp_path / "set")


def test_mistakes_are_named_before_training(folder):
    def refused(message, **changes):
        with pytest.raises(ConfigError, match=message):
            prepare(tiny(**COCO | {"data__path": str(folder)} | changes))

    refused(
        r"source=coco has classes of boxes, but vit_digits without a head .*--config.model.head",
        model__head=None,
    )
    refused("head=linear needs classes of pixels, but .*coco has .* boxes", model__head="linear")
    refused(r"has 2 objects .* set it to 2 or more \[--config.data.max_boxes\]", data__max_boxes=1)
    refused(r"64x64 pixels, but .* 40x64: .* \[--config.data.canvases\]",
            data__canvases=((40, 64),))  # fmt: skip
    refused(r"patch.*\[--config.data.canvases\]", data__canvases=(64, 70))
    refused(r"too few cells \[--config.data.canvases\]", data__canvases=((32, 64), 64))
    refused(r"centre is not for the evaluation of .* use fit.*\[--config.data\]",
            eval__frame="centre")  # fmt: skip
    refused(r"centre is not for the evaluation of .* use fit.*\[--config.eval.frames\]",
            eval__frames=("fit(short=20,long=30)", "centre"))  # fmt: skip
    refused(r"may need 72x72 pixels, but .* 40x64, .*\[--config.eval.frames\]",
            eval__frames=("fit(short=40,long=72)",))  # fmt: skip
    refused(r"resized_crop changes images, but not .*\[--config.data.augment\]",
            data__augment="resized_crop")  # fmt: skip
    refused(r"on_device=True .* set is none.*data.on_device\]", data__on_device=True)
    refused(r"eval.resolutions=\(32,\), but the images of set keep their", eval__resolutions=(32,))
    refused("head 'unknown'.*--config.model.head", model__head="unknown")
    content = annotations()
    for number, one in enumerate([[], [x for x in content["annotations"] if x["iscrowd"]]]):
        assert len(one) == 2 * number
        write_annotations(folder, "val", content | {"annotations": one})
        refused(r"no image of set, test split, has an object that .*\[--config.data.path\]")
    content["annotations"][0]["category_id"] = 5
    write_annotations(folder, "val", content)
    refused(r"val2017.json is .*annotation 100 has .*category_id=5, .*\[--config.data\]")
    content["annotations"][0]["category_id"] = 3
    content["categories"].pop()
    write_annotations(folder, "val", content | {"annotations": []})
    refused(r"the splits of set have other classes: .*\[--config.data.path\]")


@pytest.mark.slow
def test_a_run_with_several_canvases_resumes_exactly(tmp_path, folder, monkeypatch, capsys):
    changes = COCO | {"data__path": str(folder)}
    setup, _ = prepare(tiny(**changes))
    stream, _ = training_batches(setup, 0)
    sizes = [next(stream)["image"].shape[1:3] for _ in range(4)]
    stream.close()
    assert sizes[0] != sizes[1]  # the step is compiled again, where the host sends no constants
    run(tmp_path / "whole", **changes)
    with monkeypatch.context() as patched:
        interrupt_at(patched, 2)
        with pytest.raises(Interrupted):
            run(tmp_path / "halves", **changes)
    run(tmp_path / "halves", **changes)
    hashes = {tree_hash(final_state(tmp_path / name, **changes)) for name in ("whole", "halves")}
    assert len(hashes) == 1
    (row,) = json.loads((tmp_path / "whole" / "results.json").read_text())["eval"]
    assert row["count"] == 6
    assert row["class_names"] == ["cat", "dog", "bird"]
    assert "fit(short=40,long=64) of each image" in row["protocol"]
    assert np.isfinite(row["ap"])
    picture = decode_image((tmp_path / "whole" / "detections.png").read_bytes())
    assert picture.shape[1] == 12 + 2 * (480 + 12)
    for flags in ([], ["--resolutions=48x72"]):
        evaluate.main([str(tmp_path / "whole"), "--batch_size=2", *flags])
    again, larger = json.loads((tmp_path / "whole" / "evaluations.json").read_text())["rows"]
    assert {
        name: again[name] for name in ("ap", "ap50", "class_ap", "count")
    }.items() <= row.items()
    assert larger["resolution"] == [48, 72]
    assert "fit(short=48,long=72) of each image" in larger["protocol"]
