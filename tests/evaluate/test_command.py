import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import evaluate
from rope_jax.config import ConfigError
from rope_jax.data import EvaluationSet
from rope_jax.data.sources.evaluation_sets import real_labels, synsets
from rope_jax.evaluate import command as command_module
from rope_jax.evaluate import kinds
from rope_jax.models.pretrained import Preprocessing, save_pretrained
from rope_jax.sharding import make_mesh
from rope_jax_kernels import choices
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


def score(model, found, size=(4, 4)):
    return evaluate.evaluate_files(model, found, size, AS_THEY_ARE, make_mesh(), batch_size=2)


def test_any_right_label_counts(tmp_path):
    real = real_labels()
    assert real[2] == (230, 231)
    files = {
        "ILSVRC2012_val_00000003.png": 231,
        "ILSVRC2012_val_00000004.png": 200,
        "ILSVRC2012_val_00000001.png": 5,
    }
    grey_files(tmp_path, files)  # the right one of two, a wrong one, one without labels
    row = score(Reader(1000), EvaluationSet("real", tmp_path))
    assert (row["count"], row["top1"], row["top5"]) == (2, 0.5, 0.5)
    assert "reassessed" in row["protocol"]


def test_only_the_classes_of_the_set_compete(tmp_path):
    synset = synsets()
    grey_files(tmp_path / synset[6], {"x.png": 6})
    grey_files(
        tmp_path / synset[11], {"x.png": 12}
    )  # 11 and 13 are in ImageNet-A, 12 is not; the nearer of equals comes first
    found = EvaluationSet("a", tmp_path)
    assert 12 not in found.competing
    row = score(Reader(1000, favourite=12), found)  # what is not in the set cannot win
    assert (row["top1"], row["top5"]) == (1.0, 1.0)
    everything = score(Reader(1000, favourite=12), EvaluationSet("imagenet", tmp_path))
    assert (everything["top1"], everything["top5"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="the model has 10 classes, but imagenet_a has 1000"):
        score(Reader(10), found)


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the command on weights and images of three classes."""
    model = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, **SMALL)
    save_pretrained(model, tmp_path / "w.safetensors", source="timm")
    for number in range(3):
        grey_files(
            tmp_path / "set" / f"class{number}", {"a.png": 50 * number, "b.png": 60 * number}
        )
    options = ",".join(f"{key}={value}" for key, value in SMALL.items())
    own = [
        "--model=deit_ti16",
        f"--weights={tmp_path / 'w.safetensors'}",
        "--num_classes=3",
        "--image_size=8",
        f"--options={options}",
    ]
    rest = ["--dataset=folder", f"--images={tmp_path / 'set'}", f"--out={tmp_path / 'rows.json'}"]

    def run(*more):
        evaluate.main([*own, *rest, *more])
        return json.loads((tmp_path / "rows.json").read_text())["rows"], capsys.readouterr().out

    return run


def test_the_command_measures_every_row_once(command, monkeypatch):
    (row,), out = command("--resolutions=8x12")
    assert row["resolution"] == [8, 12]
    assert row["count"] == 6
    assert row["asked"]["weights"].endswith("w.safetensors")
    assert row["protocol"].startswith(
        "whole image resized to at least 8 x 13 pixels (bicubic, antialiased), centre cropped"
    )
    assert "8x12" in out

    measured = []
    once = kinds.evaluate_files

    def interrupted(model, found, size, *rest, **options):
        if measured:
            raise KeyboardInterrupt
        measured.append(size)
        return once(model, found, size, *rest, **options)

    monkeypatch.setattr(kinds, "evaluate_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command("--resolutions=8x12,8,12")
    rows, _ = command("--resolutions=8,8x12")  # nothing is left to measure
    assert measured == [(8, 8)]
    assert [row["resolution"] for row in rows] == [[8, 12], [8, 8]]


def test_a_run_is_evaluated_with_its_kernels(tmp_path, monkeypatch, capsys):
    save_run(tmp_path, 2, kernels="xla")
    used = []

    def own_split(*_):
        used.append(choices._IN_FORCE.value.everywhere)
        row = {"dataset": "digits", "split": "test", "resolution": [8, 8], "count": 1}
        return row | {"top1": 1.0, "top5": 1.0, "protocol": "whole image"}

    monkeypatch.setattr(kinds.OfImages, "_own_split", own_split)
    evaluate.main([str(tmp_path)])
    assert used == ["xla"]
    assert choices._IN_FORCE.value is None
    assert "whole image" in capsys.readouterr().out


def test_other_weights_and_rows_of_earlier_versions_are_measured_anew(command, tmp_path):
    for _ in range(2):
        (row,), _ = command()
    assert row["protocol"].startswith("whole image resized to a short side of 8 pixels (bicubic")
    old = row | {"top1": -1.0, "protocol": "short side resized to 8 pixels"}
    old["asked"] = {key: value for key, value in row["asked"].items() if key != "resizing"}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [old]}))
    rows, _ = command()
    assert [found["top1"] for found in rows] == [-1.0, row["top1"]]
    other = rope_jax.create_model("deit_ti16", num_classes=3, image_size=8, seed=1, **SMALL)
    save_pretrained(other, tmp_path / "w.safetensors", source="timm")
    rows, _ = command()
    assert len({found["asked"]["sha256"] for found in rows[1:]}) == len(rows[1:]) == 2


def test_of_several_processes_the_first_writes(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command_module, "share", lambda: (1, 2))
    with pytest.raises(FileNotFoundError, match=r"rows\.json"):
        command("--batch_size=2")
    monkeypatch.undo()
    rows, _ = command()
    assert len(rows) == 1


def test_settings_of_a_run_are_not_advised_as_flags(tmp_path):
    save_run(tmp_path, 1, data={"image_size": 8, "source": "npz", "path": "moved.npz"})
    with pytest.raises(SystemExit) as caught:
        evaluate.main([str(tmp_path)])
    assert str(caught.value).endswith("does not exist [data of the run's config]")


def test_mistakes_are_told_in_one_line(command):
    for arguments, message in (
        (["--resolutions=9"], r"9x9 is not divisible by the patch size 4: .*\[--resolutions\]"),
        (
            ["--scale_windows"],
            "--scale_windows needs a model with window attention, and ViT has none",
        ),
        (["somewhere"], "name either the WORKDIR of a run or a --model"),
    ):
        with pytest.raises(SystemExit, match=message):
            command(*arguments)


def test_tables_of_offsets_shrink_as_asked():
    make = lambda position: rope_jax.create_model(
        "vit_s16", position=position, depth=1, width=24, heads=2, image_size=64, num_classes=2
    )
    model, wanted = make("rpb"), make("rpb(shrink=crop)")
    wanted.resize((32, 48))
    offsets = lambda model: model.position.offsets[...]
    resized, cropped = (
        evaluate.at_resolution(model, (32, 48), rpb_shrink=rule) for rule in (None, "crop")
    )
    assert jnp.array_equal(offsets(cropped), offsets(wanted))
    assert offsets(resized).shape == offsets(cropped).shape == (1, 2, 3, 5)
    assert not jnp.allclose(offsets(resized), offsets(cropped), atol=1e-3)
    assert model.position.shrink == "bicubic"  # the model itself stays
    with pytest.raises(ConfigError, match="--rpb_shrink=crop is for models with the scheme rpb"):
        evaluate.at_resolution(make("none"), (32, 48), rpb_shrink="crop")
    with pytest.raises(ConfigError, match=r"33x48 .*\[--config.eval.resolutions\]"):
        evaluate.at_resolution(model, (33, 48), flags="--config.eval.")


def test_windows_grow_with_the_image():
    model = rope_jax.create_model(
        "swin_t", depths=(1,), heads=(2,), width=8, image_size=224, num_classes=2
    )
    scaled = evaluate.at_resolution(model, (256, 256), scale_windows=True)
    assert scaled.patterns(0, (64, 64))[0].size == (8, 8)
    assert scaled.stages[0].position.terms((64, 64)).layer(0).bias.shape == (2, 15 * 15)
    assert model.patterns(0, (64, 64))[0].size == (7, 7)  # the model itself stays
    assert jax.tree.structure(nnx.state(scaled)) == jax.tree.structure(nnx.state(model))
    kept = evaluate.at_resolution(model, (64, 64))
    biases = [m.stages[0].position.terms((16, 16)).layer(0).bias for m in (kept, model)]
    assert jnp.array_equal(*biases)
    assert kept.patterns(0, (16, 16)) == model.patterns(0, (16, 16))
