"""Plug-ins: the documentation's scheme in every command, and names that cannot be imported."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
from PIL import Image

import rope_jax
import rope_jax.runs.run
from rope_jax.analysis.runs import read_runs
from rope_jax.commands import reproduce
from rope_jax.config import resolve, to_json
from rope_jax.data import batches, load
from rope_jax.data.images.augment import AUGMENTATIONS
from rope_jax.evaluate import write_results
from rope_jax.models.registry import MODELS, find_model, register
from rope_jax.names import plugins
from rope_jax.positions.scheme import SCHEMES
from rope_jax.training.folder import Run
from tests.images.streams import take
from tests.training.recipe import tiny

# MLIR's dialects can be registered once, so not within `clean`, which forgets imports.
for name in ("triton", "mosaic_gpu"):
    importlib.import_module(f"jax.experimental.pallas.{name}")
ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "my_schemes.py"
TINY = "--config.model.options=depth=1,width=16,heads=2"
SHORT = ("--config.epochs=1.0", "--config.checkpoint_every=4", "--config.eval.resolutions=(6,)")


@pytest.fixture
def clean(monkeypatch):
    """Restores registries and the list of plug-ins."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugins.load_installed.cache_clear()
    with contextlib.ExitStack() as stack:
        for names in (SCHEMES, MODELS, AUGMENTATIONS, sys.modules):
            stack.enter_context(mock.patch.dict(names))
        yield
    plugins.load_installed.cache_clear()


def test_the_page_shows_the_tested_file_and_its_option(clean, monkeypatch):
    page = (ROOT / "docs" / "own_scheme.md").read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in page
    (notation,) = re.findall(r"`(rope_log\(.*?\))`", page)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    plugins.load(["my_schemes"])
    plain, changed = (
        rope_jax.create_model("vit_digits", position=name, depth=1).position
        for name in ("rope_log", notation)
    )
    assert (plain.base, changed.base) == (100, 50)
    assert plain.freqs().sum() < changed.freqs().sum()


def test_commands_of_reproduce_name_the_plug_in(clean, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    words = ["heo/figure_4", "--scale=full", "--plan", f"--workdir={tmp_path}"]
    reproduce.main([*words, "--plugins=my_schemes", "--schemes=rope_log"])
    *commands, _ = capsys.readouterr().out.splitlines()
    assert any("position=rope_log" in line for line in commands)
    assert all("--plugins=my_schemes" in line for line in commands)


def succeed(module, *arguments, folder):
    """The output of a command that must succeed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the example and a run of it, trained with --plugins."""
    folder = tmp_path_factory.mktemp("mine")
    shutil.copy(EXAMPLE, folder)
    train = ("rope_jax.main", "--config=digits:position=rope_log", "--workdir=run", TINY, *SHORT)
    succeed(*train, "--plugins=my_schemes", folder=folder)
    return folder, train


@pytest.mark.process
def test_runs_record_plug_ins_and_resume_without_flags(trained):
    folder, train = trained
    assert json.loads((folder / "run" / "config.json").read_text())["plugins"] == ["my_schemes"]
    steps = sorted((folder / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(steps[-1])
    out = succeed(*train, folder=folder)
    assert f"found step {steps[0].name} of" in out
    assert steps[-1].exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("rope_jax.evaluate", "run", "--resolutions=10"), "10x10"),
        (("rope_jax.analysis.report", "run", "--out=report"), "rope_log"),
        (("rope_jax.analysis", "attention", "run"), "results are in run"),
        (("rope_jax.export_model", "run", "--out=model.bin"), "vit_digits with rope_log"),
        (("rope_jax.positions", "--plugins=my_schemes"), "log(1 + x) f or log(1 + y) f"),
    ],
    ids=["evaluate", "report", "analysis", "export", "positions"],
)
def test_commands_load_the_plug_ins_of_a_run(trained, arguments, out):
    assert out in succeed(*arguments, folder=trained[0])


def test_checkpoints_load_the_module_of_their_scheme(clean, tmp_path, monkeypatch):
    from tests.small_run import save_run

    (tmp_path / "mine.py").write_text(EXAMPLE.read_text().replace("rope_log", "rope_log_2"))
    monkeypatch.chdir(tmp_path)
    plugins.load(["mine"])
    save_run(tmp_path / "run", 3, position="rope_log_2", plugins=plugins.list_loaded())
    options = {"depth": 1, "width": 16, "heads": 2}
    original = rope_jax.create_model("vit_digits", position="rope_log_2", **options)
    rope_jax.save_pretrained(original, tmp_path / "saved")
    del SCHEMES["rope_log_2"], sys.modules["mine"], plugins._loaded["mine"]
    # A file of weights never imports anything.
    message = r"unknown positional scheme 'rope_log_2'.* was saved with the plug-in mine: import it"
    with pytest.raises(ValueError, match=message):
        rope_jax.create_model(tmp_path / "saved")
    model, config = rope_jax.load_checkpoint(str(tmp_path / "run"))
    assert (model.notation, config.plugins) == ("rope_log_2", ("mine",))
    assert rope_jax.create_model(str(tmp_path / "saved")).notation == "rope_log_2"


def test_installed_packages_and_the_environment_name_plug_ins(clean, tmp_path, monkeypatch, capsys):
    text = EXAMPLE.read_text()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(text.replace("rope_log", f"rope_{name}"))
    info = tmp_path / "schemes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: schemes\nVersion: 1.0\n")
    points = "[rope_jax.plugins]\nmine = one\nother = nowhere.schemes:anything\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setenv("ROPE_JAX_PLUGINS", "two, missing")
    assert rope_jax.list_positions("rope_[ot]*") == ["rope_one", "rope_two"]
    assert plugins.list_loaded() == ("two", "one")
    # Of an installed package a run needs what it uses; what the environment names, always.
    assert plugins.find_needed("rope2d+ape") == ("two",)
    assert plugins.find_needed("vit_digits lape(rope_one)+ape") == ("two", "one")
    first, second = capsys.readouterr().err.splitlines()
    assert "WARNING: plug-in 'missing' (ROPE_JAX_PLUGINS) cannot be imported" in first
    assert "'nowhere.schemes' (entry point other of schemes) cannot" in second
    rope_jax.create_model("vit_digits", position="rope_one", depth=1, width=16, heads=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("my_schemes.py", None, "'my_schemes'; write my_schemes for a file my_schemes.py"),
        ("../mine", None, "cannot be imported"),
        ("mine", "import nothing_of_this_name", r"cannot be imported: ModuleNotFoundError: .*noth"),
        ("mine", "1 / 0", r"plug-in 'mine' \(--plugins\) cannot be imported: ZeroDivisionError"),
        ("mine", "x =", r"cannot be imported: SyntaxError: .* \(mine.py, line 1\)"),
        ("mine", "\nimport sys\nsys.exit(0)", r"SystemExit: 0 \(/.*/mine.py, line 3\)"),
        (
            "mine",
            EXAMPLE.read_text().replace("rope_log", "rope2d"),
            "a positional scheme named 'rope2d' exists already",
        ),
    ],
)
def test_failed_imports_are_reported(clean, tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        plugins.load([name])
    assert plugins.list_loaded() == ()


def test_models_are_registered_once(clean):
    entry = find_model("vit_digits")
    register("my_vit", entry.family, entry.options, position="rope2d", num_classes=3, depth=1)
    assert rope_jax.create_model("my_vit", image_size=16).num_classes == 3
    with pytest.raises(ValueError, match="a model named 'vit_digits' exists already"):
        register("vit_digits", entry.family, entry.options, position="ape")


@pytest.mark.process
def test_data_workers_know_plug_in_augmentations(clean, tmp_path, monkeypatch):
    pytest.importorskip("grain", reason="needs grain (the extra `data`)")
    (tmp_path / "dark.py").write_text(
        "from rope_jax.data.images.augment import AUGMENTATIONS, LOADER, Entry\n"
        "def dark(images, draws):\n    return images // 2\n"
        "AUGMENTATIONS.register('dark', Entry(LOADER, dark))\n"
    )
    (tmp_path / "train" / "grey").mkdir(parents=True)
    Image.new("RGB", (8, 8), (90, 90, 90)).save(tmp_path / "train" / "grey" / "1.png")
    monkeypatch.chdir(tmp_path)
    plugins.load(["dark"])
    images = load("folder", str(tmp_path), "train", (8, 8))
    options = {"batch_size": 1, "seed": 0, "augment": "dark"}
    with batches(images, workers=1, **options) as stream:
        (batch,) = take(1, stream)
    assert (batch["image"] == 45).all()


def test_reports_load_the_plug_ins_of_their_runs(clean, tmp_path, monkeypatch):
    (tmp_path / "model_of_mine.py").write_text(
        "from rope_jax.models.registry import find_model, register\n"
        "entry = find_model('vit_digits')\n"
        "register('vit_of_mine', entry.family, entry.options, position='rope2d')\n"
    )
    monkeypatch.chdir(tmp_path)
    config = resolve({"model": {"name": "vit_of_mine"}, "plugins": ["model_of_mine"]})
    pathlib.Path("config.json").write_text(to_json(config))
    row = {"dataset": "digits", "split": "test", "resolution": [8, 8], "count": 360}
    write_results(tmp_path, 1, [row | {"top1": 0.9, "top5": 1.0, "protocol": "as it is"}])
    (run,) = read_runs(tmp_path)
    assert (run.config.model.position, plugins.list_loaded()) == ("rope2d", ("model_of_mine",))
    pathlib.Path("config.json").write_text(to_json(dataclasses.replace(config, plugins=("none",))))
    with pytest.raises(ValueError, match=r"plug-in 'none' \(of the run .*PYTHONPATH"):
        read_runs(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"plugins": "abc"}', "null"])
def test_damaged_configs_name_no_plug_ins(clean, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with Run.open(tmp_path, "train") as opened:
        assert opened.with_plugins(tiny()).plugins == ()
