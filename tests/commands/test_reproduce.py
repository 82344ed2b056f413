"""The command `rope_jax reproduce`: results, pages, plans, and wrong input."""

import json
import re

import pytest

import rope_jax
from rope_jax.commands import reproduce
from rope_jax.evaluate.results import write_results
from rope_jax.papers import published

SMOKE = "--scale=smoke"
ABLATIONS = "cat/table_4"


def run(folder, *words):
    reproduce.main([*words, f"--workdir={folder}"])
    return json.loads((folder / "results.json").read_text())


def refused(folder, *words):
    with pytest.raises(SystemExit) as error:
        reproduce.main([*words, f"--workdir={folder}"])
    assert error.value.code == 2


@pytest.fixture(scope="module")
def ablation(tmp_path_factory):
    """One run of CAT, in its table."""
    folder = tmp_path_factory.mktemp("reproduce")
    return folder, run(folder, ABLATIONS, SMOKE, "--only=imprint=none")


def test_cells_have_published_numbers_ours_and_their_runs(ablation):
    folder, results = ablation
    assert (results["scale"], results["version"]) == ("smoke", rope_jax.__version__)
    table = results["artifacts"][ABLATIONS]
    assert {"title", "quantity", "cells", "claims", "files"} <= table.keys()
    cells = {cell["key"]["quantity"]: cell for cell in table["cells"]}
    assert (cells["top1"]["published"], cells["train_top1"]["published"]) == (38.3, 63.8)
    for cell in cells.values():
        assert cell["key"]["options"] == "imprint=none"
        assert 0 <= cell["ours"]["mean"] <= 100
        assert cell["ours"]["seeds"] == [0]
        (name,) = cell["ours"]["runs"]
        assert (folder / "smoke" / name / "results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "heo/figure_1",
        "heo/figure_2",
        "lape/figure_II",
        "lape/equation_2",
        "thesis/table_A.2",
        "thesis/table_B.1",
    ],
)
def test_tables_and_figures_are_filled_at_smoke_scale(tmp_path, name):
    """A sample of `rope_jax reproduce all --scale=smoke`."""
    artifact = run(tmp_path, name, SMOKE)["artifacts"][name]
    empty = {cell["note"] for cell in artifact["cells"] if cell["ours"] is None}
    assert all("timed on a GPU" in note for note in empty)
    assert all((tmp_path / file).exists() for file in artifact["files"])
    assert artifact["files"] or "table" in name
    assert {claim["verdict"] for claim in artifact["claims"]} <= {"not tested"}  # one seed


def test_finished_runs_are_not_repeated(ablation, monkeypatch):
    folder, results = ablation
    monkeypatch.setattr(reproduce.run, "train", lambda *_: pytest.fail("trained again"))
    assert run(folder, ABLATIONS, SMOKE, "--only=imprint=none") == results


def test_own_runs_are_shown_instead(ablation, tmp_path):
    folder, _ = ablation
    (workdir,) = (folder / "smoke").iterdir()
    results = run(tmp_path, "heo/figure_4", f"--runs={workdir}")
    (cell,) = results["artifacts"]["heo/figure_4"]["cells"]
    assert results["scale"] == "runs"
    assert cell["key"]["model"] == "cat_5"
    assert cell["key"]["resolution"] == [32, 32]


def test_figures_and_settings_without_runs(tmp_path):
    names = ("cat/figure_decay", "thesis/figure_3.1", "thesis/figure_C.1", "thesis/table_E.1")
    artifacts = run(tmp_path, *names, SMOKE, "--schemes=rope_mixed")["artifacts"]
    assert list(artifacts) == [
        "thesis/figure_3.1",
        "thesis/figure_C.1",
        "thesis/table_E.1",
        names[0],
    ]
    for name in names[:3]:
        (file,) = artifacts[name]["files"]
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    shown = {cell["key"]["position"] for cell in artifacts["thesis/figure_3.1"]["cells"]}
    assert "rope_mixed" in shown
    assert "rope_mixed" in {cell["key"]["reading"] for cell in artifacts[names[2]]["cells"]}
    recipe = artifacts["thesis/table_E.1"]["cells"]
    assert [cell["published"] for cell in recipe] == [str(c.value) for c in published(names[3])]
    assert all(cell["note"] == "" for cell in recipe)  # the recipe has the printed settings
    page = (tmp_path / "thesis.html").read_text()
    (anchor,) = re.findall(r'href="thesis.html#(table-e-1)"', (tmp_path / "index.html").read_text())
    assert f'id="{anchor}"' in page


def test_plans_are_the_commands_of_the_runs(tmp_path, capsys):
    reproduce.main(["heo/table_3", "--scale=full", "--plan", "--only=deit3_b16", "--data=coco=/"])
    *commands, total = capsys.readouterr().out.splitlines()
    assert sum("--config=deit3:variant=b,position=" in line for line in commands) == 5
    assert sum("stage=finetune" in line for line in commands) == 5
    assert sum("--config=upernet:variant=b" in line for line in commands) == 5
    assert all(line.startswith("rope_jax ") and "  # stage " in line for line in commands)
    assert re.match(r"# 20 commands, [\d.,]+ hours", total)  # five evaluations at several scales


def test_the_list_has_every_table_and_figure(tmp_path, capsys):
    reproduce.main([f"--workdir={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 40


def test_wrong_input_is_one_line(ablation, tmp_path, capsys):
    folder, _ = ablation
    refused(tmp_path, "heo/figure_44", SMOKE)
    refused(tmp_path, "heo/figure_4", SMOKE, "--only=rope_mixe")
    refused(tmp_path, "heo/figure_4", "--scale=full")
    refused(tmp_path, "heo/figure_4", "--data=missing.npz")
    workdirs = []
    for name in ("a", "b"):
        workdir = tmp_path / name
        workdir.mkdir()
        source = next((folder / "smoke").iterdir())
        (workdir / "config.json").write_bytes((source / "config.json").read_bytes())
        row = {"resolution": [8, 8], "top1": 0.5, "dataset": name, "protocol": "", "split": "test"}
        write_results(workdir, 1, [row])
        workdirs.append(str(workdir))
    refused(tmp_path, "heo/figure_4", f"--runs={','.join(workdirs)}")
    (tmp_path / "results.json").write_text('{"version": "0.0.1", "artifacts": {}}')
    refused(tmp_path, "cat/table_2", SMOKE)
    words = ("heo/figure_4", "rope_mixed", "--data", "missing.npz", "a and b", "0.0.1")
    lines = capsys.readouterr().err.splitlines()
    for line, word in zip(lines, words, strict=True):
        assert word in line
