"""The experiment `evidence`: its runs, claims, verdicts and tables."""

import dataclasses
import io
import json
import math
import os
import pathlib
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks._runner import call
from experiments import _claims, _parts, evidence
from experiments._claims import Claim
from rope_jax import data
from rope_jax.config import load_recipe

BETTER = Claim("somewhere", ("vit", "a"), ("vit", "b"))


def runs(position, values):
    """A run per seed, with its accuracy at 20 pixels and half of that at 12."""
    rows = lambda value: [
        {"resolution": [20, 20], "top1": value, "count": 100},
        {"resolution": [12, 12], "top1": value / 2, "count": 100},
    ]
    return [
        {"backbone": "vit", "position": position, "seed": seed, "eval": rows(value)}
        for seed, value in enumerate(values)
    ]


def main(argv):
    call("evidence", evidence.run, list(map(str, argv)), "python -m experiments evidence")


@pytest.mark.parametrize(
    ("better", "worse", "margin", "verdict"),
    [
        ((0.80, 0.81, 0.82), (0.70, 0.71, 0.72), 0.0, "shown"),
        ((0.70, 0.71, 0.72), (0.80, 0.81, 0.82), 0.0, "refuted"),
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), 0.0, "not shown"),
        ((0.804, 0.812, 0.823), (0.808, 0.816, 0.827), 0.0, "refuted"),
        ((0.804, 0.812, 0.823), (0.808, 0.816, 0.827), 0.5, "shown"),  # -0.4 points
        ((0.804, 0.812, 0.823), (0.810, 0.818, 0.829), 0.5, "refuted"),  # -0.6 points
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), 0.5, "not shown"),
    ],
)
def test_claims_are_judged_by_intervals(better, worse, margin, verdict):
    claim = dataclasses.replace(BETTER, margin=margin)
    judged = _claims.judge(claim, runs("a", better) + runs("b", worse), 3)
    assert judged.verdict == verdict
    assert judged.difference == pytest.approx(100 * np.mean(np.subtract(better, worse)))


def test_differences_are_paired_at_the_claims_resolution():
    all_runs = runs("a", (0.2, 0.6)) + runs("b", (0.1, 0.5, 0.9))
    assert str(_claims.judge(dataclasses.replace(BETTER, resolution=12), all_runs, 2)) == (
        "+5.0 ± 0.0, shown"
    )
    assert _claims.judge(BETTER, all_runs, 3) is None


@pytest.mark.parametrize("part", evidence.PARTS)
def test_claims_concern_planned_runs_and_resolutions(part):
    experiment, claims = evidence.PARTS[part], list(_claims.claims(part))
    assert claims
    for claim in claims:
        assert {claim.better, claim.worse} <= set(experiment.models)
    for backbone in {backbone for backbone, _ in experiment.models}:
        config = load_recipe(f"{experiment.recipe}:{experiment.backbone}={backbone}")
        sides = {claim.resolution for claim in claims if claim.better[0] == backbone} - {None}
        assert sides in (set(), set(config.eval.resolutions))  # all or none, to prevent selection
        assert all(
            (side < config.data.image_size) == (side in experiment.smaller) for side in sides
        )


@pytest.mark.parametrize(
    ("part", "backbone", "source", "better", "worse", "side", "margin"),
    [
        ("fashion", "vit", "thesis, table 4.1", "rpb", "none", None, 0),
        ("fashion", "vit", "thesis, table 4.1", "axial_rope(k_rope=2)", "rpb", None, 0),
        ("fashion", "swin", "thesis, table 4.1", "axial_rope", "rpb", None, 0),
        ("fashion", "vit", _claims._PART, "axial_rope(k_rope=8)", "axial_rope(k_rope=1)", None, 1),
        ("tiny_imagenet", "vit", _claims._SHARE, "axial_rope(shared=True)", "axial_rope(k_rope=2)",
         None, 1),
        ("fashion", "vit", "Heo et al., figure 4", "rope_mixed", "ape", 48, 0),
        ("fashion", "vit", "Heo et al., figure 4", "rope_mixed", "rope2d", None, 0),
        ("tiny_imagenet", "swin", "Heo et al., figure 5", "rope_mixed", "rpb", 80, 0),
        ("fashion", "vit", "Heo et al., figure 6 and table 5", "rope_mixed+ape", "rope_mixed", 16,
         0),
        ("fashion", "vit", "Heo et al., figure 6 and table 5", "rope_mixed", "rope_mixed+ape", 32,
         0),
        ("fashion", "vit", "LaPE, inner embeddings of DeiT-Ti", "lape(sincos2d)", "sincos2d", None,
         0),
        ("cifar10", "cct_7_3x1", "LaPE, CIFAR-10", "lape(ape)", "ape", None, 0),
    ],
)  # fmt: skip
def test_claims_of_the_papers_are_included(part, backbone, source, better, worse, side, margin):
    models = (backbone, better), (backbone, worse)
    assert Claim(source, *models, side, margin and _claims.MARGIN) in set(_claims.claims(part))


def test_the_commands_of_a_run():
    images, workdir = pathlib.Path("x.npz"), pathlib.Path("runs")
    part = evidence.PARTS["cifar10"]
    ((_, *command),) = part.commands(part.runs([121, 122])[0], images, workdir)
    assert command == [
        "-m",
        "rope_jax.main",
        "--config=cct:path=x.npz,variant=vit_lite_7_4,position=ape,seed=121",
        "--workdir=runs/cifar10-vit_lite_7_4-ape-121-122",
        "--config.data.on_device=True",
        "--config.seeds=2",
    ]
    part, run = evidence.PARTS["fashion"], evidence.Run("vit", "rope2d", (3,))
    train, extend = part.commands(run, images, workdir, ["--config.epochs=0.1"])
    folder = "runs/fashion-vit-rope2d-3-epochs=0.1"
    assert train[-2:] == [f"--workdir={folder}", "--config.epochs=0.1"]
    assert extend[2:4] == ["experiments", "extend"]
    assert extend[4:] == [folder, f"--out={folder}/extend.json", "--images=2000"]


def test_the_design_has_all_settings_that_affect_results():
    design = evidence.PARTS["fashion"].design("vit")
    assert not {"seed", "model.position", "data.path", "log_every"} & set(design)
    crops = evidence.PARTS["fashion_crops"].design("vit")
    assert crops == design | {"data.augment": "resized_crop(scale_min=0.25)"}


def test_every_run_has_a_separate_workdir():
    """Parts, seeds and flags are part of it, as existing workdirs are resumed."""
    folders = [
        part.folder(run, flags)
        for part in evidence.PARTS.values()
        for flags in ((), ("--config.epochs=0.1",), ("--config.init_from=a/b",))
        for run in part.runs([0])
    ]
    assert len(set(folders)) == len(folders)
    assert not [folder for folder in folders if "/" in folder]
    together = evidence.PARTS["cifar10"]
    assert [run.seeds for run in together.runs([1, 2])] == [(1, 2)] * len(together.models)


def program(text):
    return [sys.executable, "-c", text]


@pytest.mark.process
def test_runs_stop_at_the_time_limit(tmp_path):
    text = f"""
import pathlib, signal, sys, time
folder = pathlib.Path({str(tmp_path)!r})
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "stopped").touch()))
(folder / "started").touch(exist_ok=False)
time.sleep(60)
"""
    commands = {name: [program(text), program(text)] for name in "abc"}
    assert evidence.train(commands, [None], 0.05, lambda: None) == []
    assert (tmp_path / "stopped").exists()


@pytest.mark.process
def test_failed_runs_are_reported_and_others_continue(tmp_path):
    done, core = [], max(os.sched_getaffinity(0))
    text = "import os, pathlib, time; time.sleep(0.5); "
    text += f"pathlib.Path({str(tmp_path / 'x')!r}).write_text(str(os.sched_getaffinity(0)))"
    ending = lambda status: program(f"raise SystemExit({status})")
    commands = {"3": [ending(3), ending(1)], "0": [ending(0), program(text)]}
    failed = evidence.train(commands, [core], math.inf, lambda: done.append(0))
    assert failed == ["3 ended with status 3"]
    assert len(done) == 2
    assert (tmp_path / "x").read_text() == str({core})  # the second command, on its core


def test_runs_finish_with_their_evaluation_by_rules(tmp_path):
    """Several seeds in one workdir have separate rows."""
    run, row = evidence.Run("vit", "ape", (7, 8)), {"resolution": [32, 32], "count": 9}
    assert evidence.collect(run, tmp_path) == []
    rows = [row | {"top1": 0.5, "seed": 7}, row | {"top1": 0.6, "seed": 8}]
    (tmp_path / "results.json").write_text(json.dumps({"eval": rows}))
    collected = evidence.collect(run, tmp_path)
    assert [(result["seed"], result["eval"][0]["top1"]) for result in collected] == [
        (7, 0.5),
        (8, 0.6),
    ]
    assert evidence.collect(run, tmp_path, extended=True) == []
    rule = {"rule": "ntk", "resolution": [64, 64], "score": 0.5, "count": 9}
    for complete in (False, True):
        rules = {"complete": complete, "rows": [rule | {"seed": 7, "run": "x"}]}
        (tmp_path / "extend.json").write_text(json.dumps(rules))
        collected = evidence.collect(run, tmp_path, extended=True)
        assert [result["rules"] for result in collected] == ([[rule], []] if complete else [])


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The names of started runs, by call, of a part whose runs with seed 0 finish."""
    part = evidence.PARTS["fashion"]
    part = dataclasses.replace(part, groups=[[("vit", "ape"), ("vit", "none")]], extended=())
    monkeypatch.setattr(evidence, "PARTS", {"fashion": part})
    started = []

    def fake_train(runs, cores, minutes, done):
        started.append(list(runs))
        for name in runs:
            if "-0" in name:
                (tmp_path / "w" / name).mkdir(parents=True, exist_ok=True)
                row = {"resolution": [28, 28], "top1": 0.25, "count": 8}
                (tmp_path / "w" / name / "results.json").write_text(json.dumps({"eval": [row]}))
                done()
        return []

    monkeypatch.setattr(evidence, "train", fake_train)
    return started


def command(tmp_path, *more):
    folders = ["--data", tmp_path, "--out", tmp_path / "x.json", "--workdir", tmp_path / "w"]
    return ["fashion", *folders, "--seeds", 0, 1, *more]


def test_results_of_earlier_calls_are_reused(tmp_path, started, capsys):
    """Also without workdirs, as on another machine; seeds can be added."""
    main(command(tmp_path))
    names = [f"fashion-vit-{position}-{seed}" for seed in (0, 1) for position in ("ape", "none")]
    first = json.loads((tmp_path / "x.json").read_text())
    assert [(run["position"], run["seed"]) for run in first["runs"]] == [("ape", 0), ("none", 0)]
    assert not first["complete"]
    (tmp_path / "w").rename(tmp_path / "away")
    main(command(tmp_path, "--seeds", 0, 1, 2))
    more = [f"fashion-vit-{position}-2" for position in ("ape", "none")]
    assert started == [names, names[2:] + more]
    second = json.loads((tmp_path / "x.json").read_text())
    assert (second["runs"], second["settings"]["seeds"]) == (first["runs"], [0, 1, 2])
    assert "2 of 6 runs are finished; run the same command again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [["--seeds", 1, 2], ["--data", "others"], ["--", "--config.epochs=1"]]
)
def test_runs_with_other_settings_are_refused(change, tmp_path, started, monkeypatch):
    main(command(tmp_path))
    with pytest.raises(SystemExit, match="holds runs with other settings"):
        main(command(tmp_path, *change))
    monkeypatch.setattr(_parts.Part, "design", lambda *_: {"epochs": 9})
    with pytest.raises(SystemExit, match="other settings"):
        main(command(tmp_path))
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10", "--seeds", "1", "3"], "cifar10 needs consecutive"),
        (["fashion", "--backbones", "x"], "x: not one of part fashion"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        main([*arguments, "--data", tmp_path, "--workdir", tmp_path])


def test_tables_are_sorted_and_verdicts_need_all_seeds():
    top1 = {"none": (0.5, 0.6), "rpb": (0.6, 0.7), "ape": (0.54,)}
    all_runs = [run for position, values in top1.items() for run in runs(position, values)]
    accuracies, verdicts = evidence.tables("fashion", all_runs, 2)
    assert accuracies["columns"] == ["backbone", "position", "seeds", "as trained", "12 px"]
    assert accuracies["rows"] == [  # t of one degree of freedom: 12.706
        ["`vit`", "`rpb`", "2", "65.0 ± 63.5 (20 px)", "32.5 ± 31.8"],
        ["`vit`", "`none`", "2", "55.0 ± 63.5 (20 px)", "27.5 ± 31.8"],
        ["`vit`", "`ape`", "1", "54.0 (20 px)", "27.0"],
    ]
    verdict_texts = {row[0]: row[2] for row in verdicts["rows"]}
    assert (
        verdict_texts["`vit` with `rpb` above `vit` with `none`"]
        == "as trained: +10.0 ± 0.0, shown"
    )
    at = (16, 20, 24, 32, 40, 48)
    sizes = [f"{side} px: not finished" for side in at]
    assert verdict_texts["`vit` with `rope2d` above `vit` with `ape`"] == "<br>".join(sizes)
    _, verdicts = evidence.tables("fashion", all_runs, 3)
    assert verdicts["rows"][0][2] == "as trained: not finished"


def test_images_are_packed_or_pixels(tmp_path):
    pixels = {f"{split}_images": np.zeros((2, 8, 8, 3), np.uint8) for split in ("train", "test")}
    np.savez(tmp_path / "pixels.npz", **pixels)
    assert _parts.to_pixels(tmp_path / "pixels.npz", tmp_path / "x") == tmp_path / "pixels.npz"
    rng = np.random.default_rng(0)
    encoded = []
    for quality in (75, 75, 90):
        image = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        image.save(stream := io.BytesIO(), "JPEG", quality=quality)
        encoded.append(stream.getvalue())
    cut = 160  # files of equal quality begin with equal tables
    arrays = {
        "body": np.frombuffer(b"".join(image_bytes[cut:] for image_bytes in encoded), np.uint8),
        "offsets": np.cumsum([0, *(len(image_bytes) - cut for image_bytes in encoded)]),
        "labels": np.array([7, 3, 7]),
        "header": np.frombuffer(encoded[0][:cut] + encoded[2][:cut], np.uint8),
        "header_offsets": np.array([0, cut, 2 * cut]),
        "header_id": np.array([0, 0, 1]),
        "split": np.array([0, 1, 0]),
    }
    np.savez(tmp_path / "packed.npz", **arrays)
    unpacked = _parts.to_pixels(tmp_path / "packed.npz", tmp_path / "new.npz")
    pixels = [np.asarray(Image.open(io.BytesIO(image_bytes))) for image_bytes in encoded]
    train, test = (data.load("npz", str(unpacked), split) for split in ("train", "test"))
    np.testing.assert_array_equal(train.images, [pixels[0], pixels[2]])
    np.testing.assert_array_equal(test.images, pixels[1:2])
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 1], [0])
