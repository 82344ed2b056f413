import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import data, evaluate
from rope_jax.commands import evaluate as command_module
from rope_jax.config import ConfigError
from rope_jax.data import EvaluationSet
from rope_jax.data.sources.evaluation_sets import real_labels, synsets
from rope_jax.evaluate import evaluation as evaluation_module
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks import TASKS
from rope_jax.weights import Preprocessing, save_pretrained
from rope_jax_kernels.tuning import choices
from tests.refusals import expect_refusal
from tests.small_run import save_run

SMALL = {"depth": 1, "width": 24, "heads": 2, "patch_size": 4}
AS_THEY_ARE = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), crop=1.0)


class Reader(nnx.Module):
    """Predicts the class that is the grey value of the image, then its neighbours."""

    def __init__(self, classes, favourite=None):
        self.classes, self.favourite = classes, favourite

    def __call__(self, images):
        value = jnp.round(images.mean((1, 2, 3)) * 255)
        logits = -jnp.abs(jnp.arange(self.classes) - value[:, None])
        return logits if self.favourite is None else logits.at[:, self.favourite].set(99)


def grey_files(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / name)


def score(model, source, size=(4, 4)):
    task, settings = TASKS["classification"], vars(AS_THEY_ARE)
    options = {
        "mean": settings["mean"],
        "std": settings["std"],
        "batch_size": 2,
        "mesh": make_mesh(),
    }
    evaluator = evaluate.Evaluator(lambda _, images: model(images), (), task, **options)
    images = data.Streamed(source, size, AS_THEY_ARE.crop_notation)
    request = {"crop": settings["crop"], "interpolation": settings["interpolation"]}
    row, _ = task.evaluate(evaluator, model, images, 0, request)
    return row


def test_any_valid_label_counts(tmp_path):
    assert real_labels()[2] == (230, 231)
    values = {3: 231, 4: 200, 1: 5}  # one of two valid labels, a wrong label, no label
    name = "ILSVRC2012_val_{:08}.png".format
    grey_files(tmp_path, {name(number): value for number, value in values.items()})
    row = score(Reader(1000), EvaluationSet("real", tmp_path))
    assert (row["count"], row["top1"], row["top5"]) == (2, 0.5, 0.5)
    assert "reassessed" in row["note"]


def test_only_the_classes_of_the_set_compete(tmp_path):
    synset = synsets()
    grey_files(tmp_path / synset[6], {"x.png": 6})
    grey_files(
        tmp_path / synset[11], {"x.png": 12}
    )  # 11 and 13 are in ImageNet-A, 12 is not; the nearer of equals comes first
    source = EvaluationSet("a", tmp_path)
    assert 12 not in source.competing
    row = score(Reader(1000, favourite=12), source)  # classes outside of the set cannot win
    assert (row["top1"], row["top5"]) == (1.0, 1.0)
    everything = score(Reader(1000, favourite=12), EvaluationSet("imagenet", tmp_path))
    assert (everything["top1"], everything["top5"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="the model has 10 classes, but imagenet_a has 1000"):
        score(Reader(10), source)


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the command on weights and images of three classes."""
    model = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, **SMALL)
    save_pretrained(model, tmp_path / "w.safetensors", source="timm")
    for number in range(3):
        grey_files(
            tmp_path / "set" / f"class{number}", {"a.png": 50 * number, "b.png": 60 * number}
        )
    flags = {"model": "deit_ti16", "weights": tmp_path / "w.safetensors", "num_classes": 3}
    flags |= {
        "image_size": 8,
        "options": ",".join(f"{key}={value}" for key, value in SMALL.items()),
    }
    flags |= {"dataset": "folder", "images": tmp_path / "set", "out": tmp_path / "rows.json"}

    def run(*more):
        command_module.main([*(f"--{name}={value}" for name, value in flags.items()), *more])
        return json.loads((tmp_path / "rows.json").read_text())["rows"], capsys.readouterr().out

    return run


def test_the_command_measures_every_row_once(command, monkeypatch):
    (row,), out = command("--resolutions=8x12")
    assert (row["resolution"], row["count"]) == ([8, 12], 6)
    assert row["asked"]["weights"].endswith("w.safetensors")
    assert row["protocol"].startswith("whole image resized to at least 8 x 13 pixels (bicubic")
    assert "8x12" in out

    measured = []
    score = evaluate.Evaluator.score

    def score_once(evaluator, images):
        if measured:
            raise KeyboardInterrupt
        measured.append(images.size)
        return score(evaluator, images)

    monkeypatch.setattr(evaluate.Evaluator, "score", score_once)
    with pytest.raises(KeyboardInterrupt):
        command("--resolutions=8x12,8,12")
    rows, _ = command("--resolutions=8,8x12")  # nothing is left to measure
    assert measured == [(8, 8)]
    assert [row["resolution"] for row in rows] == [[8, 12], [8, 8]]


def test_no_rows_are_written_into_an_exchanged_folder(tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    save_run(workdir, 2)

    def score(*_):
        workdir.rename(tmp_path / "elsewhere")
        workdir.mkdir()
        return [{"dataset": "digits", "resolution": [8, 8], "count": 1, "top1": 1.0}]

    monkeypatch.setattr(evaluate.Evaluator, "score", score)
    with expect_refusal(
        capsys, f"{workdir} was moved or exchanged during the evaluation", status=1
    ):
        command_module.main([str(workdir)])
    assert not list(workdir.iterdir())


def test_other_files_and_folders_are_not_overwritten(command, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("notes.txt", "set"):
        with expect_refusal(capsys, rf"{name} is .*\[--out\]"):
            command(f"--out={tmp_path / name}")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "set" / "class1").is_dir()


def test_runs_are_evaluated_with_their_kernels(tmp_path, monkeypatch):
    save_run(tmp_path, 2, kernels="xla")
    used = []

    def score(*_):
        used.append(choices._IN_FORCE.value.everywhere)
        metadata = {"dataset": "digits", "resolution": [8, 8], "count": 1}
        return [metadata | {"top1": 1.0, "top5": 1.0}]

    monkeypatch.setattr(evaluate.Evaluator, "score", score)
    command_module.main([str(tmp_path)])
    assert used == ["xla"]
    assert choices._IN_FORCE.value is None


def test_other_weights_and_older_rows_are_measured_again(command, tmp_path):
    for _ in range(2):
        (row,), _ = command()
    assert row["protocol"].startswith("whole image resized to a short side of 8 pixels (bicubic")
    old = row | {"top1": -1.0, "protocol": "short side resized to 8 pixels"}
    old["asked"] = {key: value for key, value in row["asked"].items() if key != "resizing"}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [old]}))
    rows, _ = command()
    assert [entry["top1"] for entry in rows] == [-1.0, row["top1"]]
    other = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, seed=1, **SMALL)
    save_pretrained(other, tmp_path / "w.safetensors", source="timm")
    rows, _ = command()
    assert len({entry["asked"]["sha256"] for entry in rows[1:]}) == len(rows[1:]) == 2


def test_the_first_of_several_processes_writes(command, tmp_path, monkeypatch):
    for module in (command_module, evaluation_module):
        monkeypatch.setattr(module, "process_shard", lambda: (1, 2))
    with pytest.raises(FileNotFoundError, match=r"rows\.json"):
        command("--batch_size=2")
    monkeypatch.undo()
    rows, _ = command()
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--resolutions=9", r"9x9 is not divisible by the patch size 4: .*\[--resolutions\]"),
        ("--scale_windows", "--scale_windows needs a model with window attention"),
        ("somewhere", "name either the WORKDIR of a run or a --model"),
    ],
)
def test_mistakes_are_one_line(command, argument, message, capsys):
    with expect_refusal(capsys, message):
        command(argument)


def test_tables_of_offsets_shrink_as_requested():
    options = {"depth": 1, "width": 24, "heads": 2, "image_size": 64, "num_classes": 2}
    make = functools.partial(rope_jax.create_model, "vit_s16", **options)
    model, expected = make(position="rpb"), make(position="rpb(shrink=crop)")
    expected.resize((32, 48))
    resized, cropped = (
        evaluate.at_resolution(model, (32, 48), rpb_shrink=rule).position.offsets[...]
        for rule in (None, "crop")
    )
    assert jnp.array_equal(cropped, expected.position.offsets[...])
    assert resized.shape == (1, 2, 3, 5)
    assert not jnp.allclose(resized, cropped, atol=1e-3)
    assert model.position.shrink == "bicubic"  # the model itself stays
    with pytest.raises(ConfigError, match="--rpb_shrink=crop is for models with the scheme rpb"):
        evaluate.at_resolution(make(position="none"), (32, 48), rpb_shrink="crop")


def test_windows_grow_with_the_image():
    model = rope_jax.create_model(
        "swin_t", depths=(1,), heads=(2,), width=8, image_size=224, num_classes=2
    )
    scaled = evaluate.at_resolution(model, (256, 256), scale_windows=True)
    assert scaled.patterns(0, (64, 64))[0].size == (8, 8)
    assert scaled.stages[0].position.terms((64, 64)).layer(0).bias.shape == (2, 15 * 15)
    assert model.patterns(0, (64, 64))[0].size == (7, 7)  # the model itself stays
    assert jax.tree.structure(nnx.state(scaled)) == jax.tree.structure(nnx.state(model))
