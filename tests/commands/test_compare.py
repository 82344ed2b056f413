"""The command `rope_jax compare`."""

import json
import re
import types

import numpy as np
import pytest

from rope_jax.commands import compare
from rope_jax.config import ConfigError
from rope_jax.data.sources import scenes
from tests.faults.attacks.files import write_images

TINY = ["--config.model.options=depth=1,width=16,heads=1", "--config.epochs=0.5"]


def pictures(folder):
    write_images(folder, np.random.default_rng(0))
    return folder


def plan(*arguments):
    return compare.plan(compare._parse(list(arguments)))


def first_config(planned):
    return next(iter(planned.values()))


def test_the_models_scheme_is_trained_if_the_recipe_names_none(tmp_path):
    folder = pictures(tmp_path / "images")
    small = "--config.model.options=depth=1,width=24,heads=1"
    arguments = [f"--path={folder}", "--model=cat_5", "--options=imprint=none|tanh", "--seeds=1"]
    planned = plan(*arguments, small)
    assert [path.name for path in planned] == ["cat_rope-imprint=none", "cat_rope-imprint=tanh"]
    assert {config.model.position for config in planned.values()} == {"cat_rope"}


def test_segmentation_heads_take_the_classes_of_the_images(monkeypatch):
    monkeypatch.setattr(scenes, "COUNTS", {"train": 8, "test": 8})
    planned = plan("--config=scenes", "--positions=none,ape", "--seeds=1")
    assert [config.model.position for config in planned.values()] == ["none", "ape"]
    assert first_config(planned).model.num_classes is None  # as in the config of `rope_jax train`


def test_streamed_images_are_trained_seed_by_seed(tmp_path):
    folder = pictures(tmp_path / "images")
    common = ["--positions=ape,none", "--seeds=2", f"--out={tmp_path}"]
    common += ["--config.model.options=depth=1,width=24,heads=1"]
    planned = plan(f"--path={folder}", "--model=deit3_s16", "--resolutions=96,64x128", *common)
    assert [workdir.name for workdir in planned] == ["ape", "none", "ape-1", "none-1"]
    assert [config.seed for config in planned.values()] == [0, 0, 1, 1]
    config = first_config(planned)
    assert (config.model.name, config.data.path) == ("deit3_s16", str(folder))
    assert config.eval.resolutions == ((96, 96), (64, 128))
    assert first_config(plan(f"--path={folder}", *common)).eval.resolutions == (
        160,
        288,
        320,
    )
    recipe = ["--config=deit3:variant=ti", "--config.optim.b1=0.8"]
    config = first_config(plan(f"--path={folder}", *recipe, *common))
    assert (config.data.path, config.optim.b1) == (str(folder), 0.8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--path is missing"),
        (["--config=digits", "--positions=ape"], "has nothing to compare: name two or more"),
        (["--config=digits", "--options=depth=1|1"], r"depth=1\|1 has nothing to compare"),
        (["--config=digits", "--options=depht=1|2"], "vit_digits has no option 'depht'"),
        (["--config=digits", "--options=depth"], "option 'depth' is not of the form key=value"),
        (["--config=digits", "--options=depth=1|"], r"'depth=' is not .* \[--options\]"),
        (["--config=digits", "--options=position=ape|none"], "position is a setting of its own"),
        (["--config=digit"], "--config=digit is not a recipe; did you mean 'digits'"),
        (["--config=digits", "--model=vit_digit"], "unknown model 'vit_digit'"),
        (["--config=digits", "--resolutions=8y"], "--resolutions"),
        (["--path=nowhere.npz"], "nowhere.npz"),
        (["--path=no,where"], "no,where"),
        (
            ["--config=digits", "--positions=ape,rope_mixd"],
            "scheme 'rope_mixd'; the nearest are 'rope_mixed'",
        ),
        (
            ["--config=digits", "--config.seeds=2"],
            "--config.seeds is not a setting of a comparison",
        ),
        (
            ["--config=digits", "--config.model.position=ape"],
            "leave out --config.model.position",
        ),
        (
            ["--config=digits", "--config.plugins=('nothing',)"],
            r"plug-in 'nothing' \(of the recipe",
        ),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)


def test_a_path_may_be_any_text_but_must_hold_images(tmp_path):
    folder = pictures(tmp_path / "my, images=1")
    common = ["--model=vit_digits", "--positions=ape,none", "--seeds=1", *TINY]
    for recipe in ([], ["--config=own_images"]):
        data = first_config(plan(f"--path={folder}", *recipe, *common)).data
        assert (data.source, data.path) == ("folder", str(folder))
    for name, *recipe in (["images.zip"], ["images.npz"], ["images.npz", "--config=digits"]):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=re.escape(name)):
            plan(f"--path={tmp_path / name}", *recipe, *common)


def test_images_stay_on_the_device_if_they_fit(monkeypatch):
    arguments = ("--config=digits", "--positions=ape,none", "--seeds=2", TINY[0])
    on_host = plan(*arguments, "--config.data.on_device=False")
    assert [(config.seed, config.data.on_device) for config in on_host.values()] == [
        (seed, False) for seed in (0, 0, 1, 1)
    ]
    several_sizes = plan("--config=digits:resolutions=8+12", *arguments[1:])
    assert not any(config.data.on_device for config in several_sizes.values())
    memory = 1437 * 8 * 8 * 3  # of the training images
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": memory})
    monkeypatch.setattr(compare.jax, "local_devices", lambda: [device])
    assert len(plan(*arguments)) == 4
    memory *= 2
    assert [config.seeds for config in plan(*arguments).values()] == [2, 2]


@pytest.mark.slow
def test_comparisons_are_trained_once_and_end_with_tables(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--config=digits", "--positions=ape,rope2d", "--seeds=2", f"--out={out}", *TINY]
    compare.main(arguments)
    table = (out / "comparison.txt").read_text()
    assert table in capsys.readouterr().out
    rows = json.loads((out / "ape-seeds2" / "results.json").read_text())["eval"]
    assert {row["seed"] for row in rows} == {0, 1}
    assert "difference from ape in percentage points [95 % interval]" in table
    for name in ("report.html", "comparison.png", "differences.png"):
        assert (out / name).stat().st_size > 1000
    compare.main(arguments)
    assert capsys.readouterr().out.count(": training is complete") == 2
    assert (out / "comparison.txt").read_text() == table


@pytest.mark.parametrize(
    ("arguments", "names", "seeds"),
    [
        (
            ["--positions=ape,rope2d(base=50)+ape"],
            ["ape-seeds3", "rope2d(base=50)+ape-seeds3"],
            3,
        ),
        (["--positions=none,ape,ape", "--seeds=1"], ["none", "ape"], 1),
        (
            ["--options=width=32|16,heads=1", "--seeds=1"],
            ["rope_mixed-width=32,heads=1", "rope_mixed-width=16,heads=1"],
            1,
        ),
        (
            ["--options=heads=1|2,attention=global", "--positions=ape,none"],
            [
                f"{x},attention=global-seeds3"
                for x in ("ape-heads=1", "ape-heads=2", "none-heads=1", "none-heads=2")
            ],
            3,
        ),
        (
            ["--options=heads=1|2", "--config.model.position=ape", "--seeds=2"],
            ["ape-heads=1-seeds2", "ape-heads=2-seeds2"],
            2,
        ),
    ],
)
def test_rows_are_schemes_and_options(arguments, names, seeds):
    """Several seeds of images in memory are one run; the recipe's scheme is the default.

    The folders of one seed match earlier versions of `make compare`, so their runs are found.
    """
    first = seeds - 1
    planned = plan(f"--config=digits:seed={first}", *arguments)
    assert list(map(str, planned)) == [f"runs/compare/{name}" for name in names]
    settings = {(config.seed, config.seeds, config.data.on_device) for config in planned.values()}
    assert settings == {(first, seeds, seeds > 1)}


def test_options_replace_those_of_the_recipe():
    common = ["--config=digits", "--config.model.options=depth=1,width=16"]
    planned = plan(*common, "--options=width=32|16,heads=1")
    options = ["depth=1,width=32,heads=1", "depth=1,width=16,heads=1"]
    assert [config.model.options for config in planned.values()] == options
