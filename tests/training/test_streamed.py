"""Training on image files: resumption, evaluation, images that cannot be used."""

import importlib.util
import json
import re
import shutil
import unittest.mock

import numpy as np
import pytest
from PIL import Image

import rope_jax
from rope_jax import data, evaluate
from rope_jax.commands import evaluate as evaluate_command
from rope_jax.config import ConfigError
from rope_jax.data.packing import prepare as pack
from rope_jax.data.sources.folder import Folder
from rope_jax.system.cores import cores
from rope_jax.tasks.evaluator import Evaluator
from rope_jax.training import report
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.metrics import read_metrics
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.trees import tree_hash
from tests.training.recipe import assert_refused, final_state, run, run_in_parts, tiny


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Pictures in three classes, 80 for training and 20 held out."""
    place, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for k in range(100):
        folder = place / ("test" if k % 5 == 0 else "train") / f"class{k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8))
        picture = noise.resize((60 + k, 50), Image.Resampling.BICUBIC)
        picture.save(folder / f"{k:03}.jpg")
    return place


def folder_settings(place):
    return {
        "data__source": "folder",
        "data__path": str(place),
        "data__image_size": 12,
        "data__augment": "resized_crop(scale_min=0.3)+flip",
        "eval__frame": "centre(crop=0.875)",
        "eval__resolutions": (16,),
        "batch_size": 32,
        "epochs": 2.5,
    }


def test_workers_without_grain_are_refused(photographs, monkeypatch):
    find = importlib.util.find_spec
    without = lambda name, *package: None if name == "grain" else find(name, *package)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert_refused("workers=2 needs grain: pip", **folder_settings(photographs), data__workers=2)


@pytest.mark.parametrize(("workers", "each"), [(0, 0), (2, 1), (7, 2)])
def test_several_sizes_divide_workers_and_list_files_once(photographs, monkeypatch, workers, each):
    changes = {"data__more_sizes": (8, 16), "data__workers": workers}
    run, _ = prepare(tiny(**folder_settings(photographs) | changes))
    for name in ("load", "batches", "SeveralSizes"):
        monkeypatch.setattr(data, name, unittest.mock.Mock())
    training_batches(run, 0)
    calls = data.batches.call_args_list
    assert [call.kwargs["workers"] for call in calls] == [each] * 3
    assert [call.args[0].size for call in calls] == [(12, 12), (8, 8), (16, 16)]
    data.load.assert_not_called()


def test_runs_on_files_resume_bit_for_bit_and_record_protocols(
    photographs, tmp_path, monkeypatch, capsys
):
    changes = folder_settings(photographs) | {"eval__frames": ("centre(crop=1.0)",)}
    with monkeypatch.context() as patch:
        patch.setattr(report, "SLOW_DATA", -1.0)  # advice at the first line only
        run(tmp_path / "whole", **changes)
    advice = rf"wait for images, which no worker processes .*--config.data.workers={cores()} "
    assert len(re.findall(advice, capsys.readouterr().out)) == 1
    assert len(read_metrics(tmp_path / "whole" / "metrics.jsonl")) == 6  # 2.5 epochs of 80 images
    rows = evaluate.read_results(tmp_path / "whole")["eval"]
    assert [row["resolution"] for row in rows] == [[12, 12], [16, 16]] * 2
    crops = [row["protocol"].partition(" of each image")[0] for row in rows]
    assert crops == ["centre(crop=0.875)"] * 2 + ["centre(crop=1.0)"] * 2
    assert all(row["count"] == 20 for row in rows)
    changes |= {"eval__resolutions": (), "eval__frames": ()}
    run_in_parts(tmp_path / "cut", 4, **changes)
    states = [final_state(tmp_path / name, **changes) for name in ("cut", "whole")]
    assert tree_hash(states[0]) == tree_hash(states[1])


def test_changed_pixels_are_refused_on_resume(photographs, tmp_path):
    place, workdir = shutil.copytree(photographs, tmp_path / "images"), tmp_path / "run"
    changes = folder_settings(place) | {"eval__resolutions": ()}
    setup, model = prepare(tiny(**changes))
    state, metadata = initial_state(setup, model), setup.about()
    earlier = {name: text.partition(", content")[0] for name, text in metadata["data"].items()}
    assert earlier != metadata["data"]
    for step, fingerprint in enumerate((earlier, metadata["data"])):
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            checkpoints.save(step, state, about=metadata | {"data": fingerprint})
        assert final_state(workdir, **changes) is not None
    shutil.rmtree(place / "train")
    shutil.copytree(photographs / "train", place / "train")
    assert final_state(workdir, **changes) is not None  # on copies
    for file in place.glob("train/*/*.jpg"):
        file.write_bytes((place / "test" / "class0" / "000.jpg").read_bytes())
    with pytest.raises(ConfigError, match=r"the images of the train split.*override=images"):
        final_state(workdir, **changes)


def test_results_on_other_images_are_not_reused(photographs, tmp_path, monkeypatch):
    place, workdir = shutil.copytree(photographs, tmp_path / "images"), tmp_path / "run"
    config = run(workdir, **folder_settings(place) | {"eval__resolutions": (), "epochs": 0.4})
    results = lambda: evaluate.read_results(workdir)["eval"]
    evaluations = lambda: evaluate.read_evaluations(workdir / "evaluations.json")
    evaluate_command.main([str(workdir)])
    before = results(), evaluations()
    for file in place.glob("test/*/*.jpg"):
        file.write_bytes((place / "train" / "class0" / "003.jpg").read_bytes())
    evaluate_command.main([str(workdir)])
    rope_jax.runs.run.train(config, workdir, resume_override=["images"])
    (old_result,), (old_evaluation,), (result,), (evaluation,) = *before, results(), evaluations()
    assert evaluation["asked"] == old_evaluation["asked"]
    assert evaluation["data"] == result["data"] != old_result["data"] == old_evaluation["data"]
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "score", None)  # equal images are not evaluated again
        evaluate_command.main([str(workdir)])
        rope_jax.runs.run.train(config, workdir, resume_override=["images"])


def test_bad_files_are_errors_or_skipped(photographs, tmp_path):
    place = shutil.copytree(photographs, tmp_path / "images")
    (place / "train" / "class0" / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    changes = folder_settings(place) | {"eval__resolutions": ()}
    with pytest.raises(data.BadImages, match=r"class0/bad.jpg\) cannot be used"):
        run(tmp_path / "error", **changes)
    run(tmp_path / "skip", data__bad_images="skip", **changes)
    assert read_metrics(tmp_path / "skip" / "metrics.jsonl")[-1]["skipped_images"] == 1


def test_packed_splits_must_agree_and_state_their_protocol(photographs, tmp_path):
    for split in ("train", "test"):
        pack(Folder(str(photographs), split), tmp_path, side=14)
    changes = folder_settings(photographs) | {"data__source": "packed", "data__path": str(tmp_path)}
    prepared, _ = prepare(tiny(**changes))
    (protocol,) = evaluate.protocols(prepared)
    assert "and with antialiasing; images packed beforehand: short side at most 14 (b" in protocol
    metadata = json.loads((tmp_path / "test" / "about.json").read_text())
    for names, words in (
        (["class0", "cat", "class2"], "label 1 is 'class1' .* 'cat' .*3 and 3 "),
        (["class0", "class1", "class2", "class3"], "label 3 is None .* 'class3' .*3 and 4 "),
    ):
        (tmp_path / "test" / "about.json").write_text(json.dumps(metadata | {"class_names": names}))
        assert_refused(words + r".*\[--config.data.path\]", **changes)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"data__repeats": 3}, "data.repeats"),
        ({"eval__frame": "flip"}, "config.data"),
        ({"data__augment": "flip+resized_crop"}, "data.augment"),
        ({"data__image_size": None}, "config.data"),
    ],
)
def test_impossible_settings_name_their_flag(photographs, change, flag):
    assert_refused(flag, **folder_settings(photographs) | change)
