import functools
import json

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
from rope_jax.data.sources.evaluation_sets import synsets
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks import TASKS
from rope_jax.tasks.classification import check_folders
from rope_jax.weights import Preprocessing, save_pretrained
from rope_jax_kernels.tuning import choices
from tests.refusals import expect_refusal
from tests.small_run import save_run

SMALL = {"depth": 1, "width": 24, "heads": 2, "patch_size": 4}


class Reader(nnx.Module):
    """Predicts class 12, then the grey value of the image and its neighbours."""

    def __init__(self, classes):
        self.classes, self.class_names = classes, None

    def __call__(self, images):
        value = jnp.round(images.mean((1, 2, 3)) * 255)
        logits = -jnp.abs(jnp.arange(self.classes) - value[:, None])
        return logits.at[:, 12].set(99)


def grey_files(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / name)


def score(model, source):
    task, options = TASKS["classification"], {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    evaluator = evaluate.Evaluator(
        lambda _, images: model(images), (), task, batch_size=2, mesh=make_mesh(), **options
    )
    images = data.Streamed(source, (4, 4), Preprocessing(crop=1.0).crop_notation)
    row, _ = task.evaluate(evaluator, model, images, 0, {"crop": 1.0, "interpolation": "bicubic"})
    return row


def test_only_the_classes_of_the_set_compete(tmp_path):
    """11 and 13 are in ImageNet-A, 12 is not; the nearer of equals comes first."""
    for label, value in ((6, 6), (11, 12)):
        grey_files(tmp_path / synsets()[label], {"x.png": value})
    source = EvaluationSet("a", tmp_path)
    row = score(Reader(1000), source)
    assert (row["top1"], row["top5"]) == (1.0, 1.0)
    everything = score(Reader(1000), EvaluationSet("imagenet", tmp_path))
    assert (everything["top1"], everything["top5"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="the model has 10 classes, but imagenet_a has 1000"):
        score(Reader(10), source)


def test_folders_have_the_numbers_of_the_models_classes(tmp_path):
    for name in "ac":
        grey_files(tmp_path / name, {"x.png": 1})
    images = EvaluationSet("folder", tmp_path).stream((8, 8))
    model = nnx.Module()
    for model.class_names in (None, ("tench", "shark"), ("a", "c", "d"), ("a",)):
        check_folders(model, images)
    model.class_names = ("a", "b", "c")
    with pytest.raises(ConfigError, match=r"'c' of .* class 1, which is 'b' .* add an empty one"):
        check_folders(model, images)
    (tmp_path / "b").mkdir()
    check_folders(model, EvaluationSet("folder", tmp_path).stream((8, 8)))


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the command on weights and images of three classes."""
    model = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, **SMALL)
    save_pretrained(model, tmp_path / "w.safetensors", source="timm")
    for k in range(3):
        grey_files(tmp_path / "set" / f"class{k}", {"a.png": 50 * k, "b.png": 60 * k})
    options = ",".join(f"{key}={value}" for key, value in SMALL.items())
    flags = [
        "--model=deit_ti16", f"--options={options}", f"--weights={tmp_path / 'w.safetensors'}",
        "--num_classes=3", "--image_size=8", "--dataset=folder", f"--images={tmp_path / 'set'}",
        f"--out={tmp_path / 'rows.json'}",
    ]  # fmt: skip

    def run(*more):
        command_module.main([*flags, *more])
        return json.loads((tmp_path / "rows.json").read_text())["rows"], capsys.readouterr().out

    return run


def test_the_command_measures_every_row_once(command, monkeypatch):
    (row,), out = command("--resolutions=8x12")
    assert (row["resolution"], row["count"]) == ([8, 12], 6)
    assert row["protocol"].startswith("centre(crop=")
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
    row = {"dataset": "digits", "resolution": [8, 8], "count": 1, "top1": 1.0, "top5": 1.0}

    def score(*_):
        used.append(choices._IN_FORCE.value.everywhere)
        return [row]

    monkeypatch.setattr(evaluate.Evaluator, "score", score)
    for workdir in (f"{tmp_path}/", str(tmp_path)):  # the same row
        command_module.main([workdir])
    assert used == ["xla"]


def test_other_weights_and_older_rows_are_measured_again(command, tmp_path):
    (row,), _ = command()
    old = row | {"top1": -1.0, "protocol": "short side resized to 8 pixels"}
    old["asked"] = {key: value for key, value in row["asked"].items() if key != "resizing"}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [old]}))
    rows, _ = command()
    assert [entry["top1"] for entry in rows] == [-1.0, row["top1"]]
    other = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, seed=1, **SMALL)
    save_pretrained(other, tmp_path / "w.safetensors", source="timm")
    rows, _ = command()
    assert len({entry["asked"]["sha256"] for entry in rows[1:]}) == len(rows[1:]) == 2
    rows, _ = command("--image_size=16", "--resolutions=8")  # from which schemes extend
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--resolutions=9", r"9x9 is not divisible by the patch size 4: .*\[--resolutions\]"),
        ("--scale_windows", "--scale_windows needs a model whose windows can follow"),
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
    assert model.patterns(0, (64, 64))[0].size == (7, 7)  # the model itself stays
