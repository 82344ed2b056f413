"""`configs/finetune.py`: official weights on a folder of images, by one command."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import rope_jax
from rope_jax.weights import export_state_dict
from tests.images.test_pairs import save

SMALL = {"width": 48, "heads": 3, "depth": 2}
CLASSES = ("blue", "green", "red")
ROOT = pathlib.Path(__file__).parents[2]


def photographs(folder, count):
    """Noisy pictures of 50 x 70 pixels in which one channel is the brightest."""
    rng = np.random.default_rng(0)
    for split, name, k in itertools.product(("train", "val"), CLASSES, range(count)):
        pixels = rng.integers(0, 120, (50, 70, 3), dtype=np.uint8)
        pixels[..., 2 - CLASSES.index(name)] += 100
        save(folder / split / name / f"{k}.png", pixels)
    return folder


@pytest.mark.process
def test_one_command_fine_tunes_official_weights(tmp_path):
    trained = rope_jax.create_model(
        "deit3_ti16", position="rope_mixed+ape", num_classes=7, image_size=64, seed=3, **SMALL
    )
    weights = export_state_dict(trained, source="timm")  # without a description of the model
    safetensors.numpy.save_file(weights, tmp_path / "official.safetensors")
    images, workdir = photographs(tmp_path / "photographs", 12), tmp_path / "run"
    arguments = (
        f"model=deit3_ti16,position=rope_mixed+ape,weights={tmp_path}/official.safetensors,"
        f"path={images},resolution=96,batch_size=12,epochs=30,rate=0.08,layer_decay=0.1"
    )
    command = [
        *(sys.executable, "-m", "rope_jax.main", f"--config=configs/finetune.py:{arguments}"),
        *(f"--workdir={workdir}", "--config.model.options=width=48,heads=3,depth=2"),
        "--config.dtype=float32",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "head: new, 3 classes\n" in done.stdout
    assert json.loads((workdir / "results.json").read_text())["eval"][0]["top1"] > 0.9

    model, config = rope_jax.load_checkpoint(str(workdir))
    assert (model.class_names, model.num_classes) == (CLASSES, 3)
    assert (config.optim.layer_decay, model.preprocessing.crop) == (0.1, 0.9)
