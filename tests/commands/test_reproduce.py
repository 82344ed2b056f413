"""The command `rope_jax reproduce`: results, pages, plans, and wrong input."""

import io
import json
import re
import shutil
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from PIL import Image

import rope_jax
from rope_jax.commands import reproduce
from rope_jax.evaluate.results import write_results
from rope_jax.papers import published
from rope_jax.papers.declared import ARTIFACTS
from rope_jax.papers.images import unpack
from rope_jax.papers.lab import Job, Lab
from rope_jax.papers.plan import estimate
from rope_jax.training.signals import Interrupted
from tests.refusals import expect_refusal

SMOKE = "--scale=smoke"
ABLATIONS = "cat/table_4"


def run(folder, *words):
    reproduce.main([*words, f"--workdir={folder}"])
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def ablation(tmp_path_factory):
    """One run of CAT, in its table."""
    folder = tmp_path_factory.mktemp("reproduce")
    return folder, run(folder, ABLATIONS, SMOKE, "--only=imprint=none")


def test_cells_have_published_numbers_ours_and_their_runs(ablation):
    folder, results = ablation
    assert (results["scale"], results["version"]) == ("smoke", rope_jax.__version__)
    cells = {cell["key"]["quantity"]: cell for cell in results["artifacts"][ABLATIONS]["cells"]}
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


def test_cells_and_claims_of_rows_that_are_not_made_stay(tmp_path):
    cell = lambda position, mean: {"key": {"position": position}, "ours": mean}
    claim = lambda words, verdict: {"claim": words, "verdict": verdict}
    entry = lambda *rows: {"cells": [cell(*x) for x in rows], "claims": [claim(*x) for x in rows]}
    for lab, made in (
        (Lab("small", tmp_path), entry(("ape", 1), ("rope2d", 2))),
        (Lab("small", tmp_path, only=("rope2d",)), entry(("rope2d", 3))),
    ):
        reproduce._add_result("heo/figure_6", made, lab)
    stored = json.loads((tmp_path / "results.json").read_text())["artifacts"]["heo/figure_6"]
    assert stored == entry(("ape", 1), ("rope2d", 3))
    lab = Lab("small", tmp_path, only=("rope2d",), epochs=1.0)  # other runs: nothing stays
    reproduce._add_result("heo/figure_6", entry(("rope2d", 4)), lab)
    stored = json.loads((tmp_path / "results.json").read_text())["artifacts"]["heo/figure_6"]
    assert stored == entry(("rope2d", 4))


def test_own_runs_are_shown_instead(ablation, tmp_path, capsys):
    folder, _ = ablation
    (workdir,) = (folder / "smoke").iterdir()
    results = run(tmp_path, "heo/figure_4", f"--runs={workdir}", "--json")
    assert json.loads(capsys.readouterr().out) == results  # and nothing else
    (cell,) = results["artifacts"]["heo/figure_4"]["cells"]
    assert results["scale"] == "runs"
    assert (cell["key"]["model"], cell["key"]["resolution"]) == ("cat_5", [32, 32])


def test_figures_and_settings_without_runs(tmp_path):
    names = ["thesis/figure_3.1", "thesis/figure_C.1", "thesis/table_E.1", "cat/figure_decay"]
    schemes = "--schemes=rope_mixed,axial_rope(k_rope=64)"  # no head here has as many channels
    artifacts = run(tmp_path, *names[::-1], SMOKE, schemes)["artifacts"]
    assert list(artifacts) == names
    for name in (names[0], names[1], names[3]):
        (file,) = artifacts[name]["files"]
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    assert "rope_mixed" in {cell["key"]["position"] for cell in artifacts[names[0]]["cells"]}
    assert "rope_mixed" in {cell["key"]["reading"] for cell in artifacts[names[1]]["cells"]}
    recipe = artifacts[names[2]]["cells"]
    assert [cell["published"] for cell in recipe] == [str(c.value) for c in published(names[2])]
    assert all(cell["note"] == "" for cell in recipe)  # the recipe has the printed settings
    (anchor,) = re.findall(r'href="thesis.html#(table-e-1)"', (tmp_path / "index.html").read_text())
    assert f'id="{anchor}"' in (tmp_path / "thesis.html").read_text()


def test_plans_are_the_commands_of_the_runs(tmp_path, capsys):
    reproduce.main(["heo/table_3", "--scale=full", "--plan", "--only=deit3_b16", "--data=coco=/"])
    *commands, total = capsys.readouterr().out.splitlines()
    assert sum("--config=deit3:variant=b,position=" in line for line in commands) == 5
    assert sum("stage=finetune" in line for line in commands) == 5
    assert sum("--config=upernet:variant=b" in line for line in commands) == 5
    assert all(line.startswith("rope_jax ") and "  # stage " in line for line in commands)
    assert re.match(r"# 20 commands, [\d.,]+ hours", total)  # five evaluations at several scales


def test_the_list_has_every_table_and_figure(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"step": 1, "eval": []}')  # of another command
    reproduce.main([f"--workdir={tmp_path}"])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 40


def test_a_run_that_is_killed_or_stopped_ends_the_command(tmp_path, monkeypatch, capsys):
    class Pool(futures.Executor):
        def submit(self, function, job):
            future = futures.Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(futures, "ProcessPoolExecutor", lambda *_: Pool())
    monkeypatch.setattr(reproduce, "cores", lambda: 2)
    with pytest.raises(SystemExit):
        run(tmp_path, ABLATIONS, SMOKE)
    assert "not complete: the process of a run was killed" in capsys.readouterr().out

    def stopped(job):
        raise Interrupted("SIGINT")

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(reproduce, "_run", stopped)
    monkeypatch.setattr(reproduce.os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        reproduce._run_or_end(Job((), tmp_path))


def test_packed_files_of_one_name_are_told_apart(tmp_path):
    unpacked = []
    for value in (0, 255):
        content = io.BytesIO()
        Image.new("RGB", (4, 4), (value, 0, 0)).save(content, "png")
        body = np.frombuffer(content.getvalue() * 2, np.uint8)
        (folder := tmp_path / str(value)).mkdir()
        packed = {"offsets": np.arange(3) * len(content.getvalue()), "header": body[:0]}
        np.savez(folder / "set.npz", body=body, labels=[3, 5], split=[0, 1], **packed)
        lab = unpack(Lab("small", tmp_path, data={"images": str(folder / "set.npz")}))
        assert unpack(lab) == lab
        unpacked.append((lab.images, np.load(lab.data["images"])["train_images"].max()))
    assert unpacked == [("set", 0), ("set", 255)]
    listed = Lab("small", tmp_path, data={"images": str(tmp_path / "0" / "set.npz")})
    job, *_ = listed.jobs(ARTIFACTS["heo/figure_4"].runs(listed))
    assert 0 < estimate(job, "small").hours < 0.1  # of two images, for the list


def test_wrong_input_is_one_line(ablation, tmp_path, capsys):
    (source,) = (ablation[0] / "smoke").iterdir()
    for name in "ab":
        shutil.copytree(source, tmp_path / name)
        row = {"resolution": [8, 8], "top1": 0.5, "dataset": name, "protocol": "", "split": "test"}
        write_results(tmp_path / name, 1, [row])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text('{"version": "0.0.1", "artifacts": {}}')
    (tmp_path / "garbage.npz").write_bytes(b"garbage")
    np.savez(tmp_path / "other.npz", train_images=[1])
    for words, message in (
        (["heo/figure_44", SMOKE], "heo/figure_4"),
        (["heo/figure_4", SMOKE, "--only=rope_mixe"], "rope_mixed"),
        (["heo/figure_4", "--scale=full"], "--data"),
        (["heo/figure_4", "--data=missing.npz"], r"missing\.npz"),
        (["heo/figure_4", f"--runs={tmp_path / 'a'},{tmp_path / 'b'}"], "a and b"),
        (["cat/table_2", SMOKE, f"--workdir={tmp_path / 'old'}"], r"0\.0\.1"),
        (["thesis/figure_3.1", "--schemes=lape(axail_rope)"], "axial_rope"),
        (["cat/figure_decay", f"--data={tmp_path / 'garbage.npz'}"], "is not an .npz file"),
        (["cat/figure_decay", f"--data={tmp_path / 'other.npz'}"], "it must hold train_images"),
        (
            ["heo/figure_4", SMOKE, f"--data={tmp_path}"],
            "--data cannot be combined with",
        ),
        (
            ["heo/figure_4", f"--data=imagenet={tmp_path}"],
            "not read --data=imagenet=: use",
        ),
        (["heo/figure_4", SMOKE, "--epochs=2"], "--epochs applies only to runs of --scale=small"),
        (
            ["heo/figure_4", f"--runs={tmp_path / 'a'}", "--limit=2"],
            "--limit applies only to runs of --scale=released",
        ),
        (["heo/figure_4", "--runs="], "names no workdir"),
        (
            ["heo", "--scale=released", f"--data={tmp_path}", "--seeds=2"],
            "--seeds cannot be combined with --scale=released",
        ),
    ):
        with expect_refusal(capsys, message):
            reproduce.main([f"--workdir={tmp_path}", *words])
