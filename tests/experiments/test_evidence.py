"""The experiment `evidence`: its runs, claims and verdicts."""

import dataclasses
import io
import json
import math
import os
import pathlib
import shutil
import sys
import time

import numpy as np
import pytest
from PIL import Image

from benchmarks._runner import call
from experiments import _claims, _parts, evidence
from experiments._claims import Claim
from rope_jax import data
from rope_jax.config import load_recipe

CIFAR = ("vit_lite_7_4", "cvt_7_4", "cct_7_3x1")


def runs(position, values):
    rows = lambda value: [
        {"resolution": [20, 20], "top1": value, "count": 100},
        {"resolution": [12, 12], "top1": value / 2, "count": 100},
    ]
    return [
        {"backbone": "vit", "position": position, "seed": seed, "eval": rows(value)}
        for seed, value in enumerate(values)
    ]


def main(argv):
    call("evidence", evidence.run, argv, "python -m experiments evidence")


def test_interval_is_students():
    mean, half = _claims.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(
        4.302653 / math.sqrt(3), rel=1e-6
    )  # t of 2 degrees of freedom, standard deviation 1
    assert math.isnan(_claims.interval([1.0])[1])


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
def test_a_claim_is_judged_by_the_interval_of_its_difference(better, worse, margin, verdict):
    claim = Claim("somewhere", ("vit", "a"), ("vit", "b"), margin=margin)
    judged = _claims.judge(claim, runs("a", better) + runs("b", worse))
    assert judged.verdict == verdict
    assert judged.difference == pytest.approx(100 * np.mean(np.subtract(better, worse)))


def test_differences_are_taken_seed_by_seed_at_the_resolution_of_the_claim():
    found = runs("a", (0.2, 0.6)) + runs("b", (0.1, 0.5, 0.9))
    judged = _claims.judge(Claim("somewhere", ("vit", "a"), ("vit", "b"), 12), found)
    assert judged.seeds == 2
    assert judged.difference == pytest.approx(5.0)
    assert judged.half_width == pytest.approx(0, abs=1e-9)
    assert _claims.judge(Claim("somewhere", ("vit", "a"), ("vit", "c")), found) is None
    assert _claims.judge(Claim("somewhere", ("vit", "a"), ("vit", "b")), found, least=3) is None


def test_a_verdict_of_one_seed_has_no_interval():
    judged = _claims.judge(
        Claim("somewhere", ("vit", "a"), ("vit", "b")),
        runs("a", (0.82,)) + runs("b", (0.80,)),
        least=1,
    )
    assert str(judged) == "+2.0 with one seed, not shown"
    judged = _claims.judge(
        Claim("somewhere", ("vit", "a"), ("vit", "b")),
        runs("a", (0.81, 0.83)) + runs("b", (0.80, 0.80)),
    )
    assert str(judged) == "+2.0 ± 12.7, not shown"


@pytest.mark.parametrize("part", evidence.PARTS)
def test_claims_are_about_runs_that_are_made_and_sides_that_are_evaluated(part):
    about, found = evidence.PARTS[part], list(_claims.claims(part))
    assert found
    for claim in found:
        assert {claim.better, claim.worse} <= set(about.models)
    for backbone in {backbone for backbone, _ in about.models}:
        config = load_recipe(f"{about.recipe}:{about.backbone}={backbone}")
        trained = config.data.image_size
        asked = {claim.resolution for claim in found if claim.better[0] == backbone} - {None}
        assert asked in (set(), set(config.eval.resolutions))  # all or none: not those that suit
        assert all((side < trained) == (side in about.smaller) for side in asked)


def test_what_the_papers_say_is_all_there():
    said = {
        (claim.source, claim.better[1], claim.worse[1], claim.resolution, claim.margin > 0)
        for name in ("fashion", "tiny_imagenet")
        for claim in _claims.claims(name)
        if claim.better[0] == "vit"
    }
    axial, fractions = "axial_rope(k_rope=2)", "thesis, table 4.3: a part of the channels is enough"
    assert said >= {
        ("thesis, table 4.1", "rpb", "none", None, False),
        ("thesis, table 4.1", axial, "rpb", None, False),
        (fractions, "axial_rope(k_rope=8)", "axial_rope(k_rope=1)", None, True),
        (
            "thesis, tables 4.2 and 4.3: heads may share angles",
            "axial_rope(shared=True)",
            axial,
            None,
            True,
        ),
        ("Heo et al., figure 4", "rope_mixed", "ape", 48, False),
        ("Heo et al., figure 4", "rope_mixed", "rope2d", None, False),
        ("Heo et al., figure 6 and table 5", "rope_mixed+ape", "rope_mixed", 16, False),
        ("Heo et al., figure 6 and table 5", "rope_mixed", "rope_mixed+ape", 32, False),
        ("LaPE, inner embeddings of DeiT-Ti", "lape(sincos2d)", "sincos2d", None, False),
    }
    fashion = list(_claims.claims("fashion"))
    assert {(x.worse[0], x.source) for x in fashion if x.better[0] == "cat"} == {
        ("cat_vit", "CAT, table 1"),
        ("cat_no_imprint", "CAT, table 4"),
    }
    assert {(x.better[1], x.worse[1]) for x in fashion if x.better[0] == "swin"} == {
        ("rpb", "none"),
        ("axial_rope", "rpb"),
    }
    assert {claim.source for part in evidence.PARTS for claim in _claims.claims(part)} <= set(
        _claims.SEEN
    )
    assert {
        claim.better[0] for claim in _claims.claims("cifar10") if claim.source.startswith("LaPE")
    } == set(CIFAR)
    assert ("Heo et al., figure 5", "rpb") in {
        (x.source, x.worse[1]) for x in _claims.claims("tiny_imagenet") if x.better[0] == "swin"
    }


def test_the_commands_of_a_run(tmp_path):
    part = evidence.PARTS["cifar10"]
    run = part.runs([121, 122])[0]
    ((_, *command),) = part.commands(run, pathlib.Path("x.npz"), pathlib.Path("runs"))
    assert command == [
        "-m",
        "rope_jax.main",
        "--config=cct:path=x.npz,variant=vit_lite_7_4,position=ape,seed=121",
        "--workdir=runs/cifar10-vit_lite_7_4-ape-121-122",
        "--config.data.on_device=True",
        "--config.seeds=2",
    ]
    part = evidence.PARTS["fashion"]
    run = evidence.Run("vit", "rope2d", (3,))
    train, extend = part.commands(run, tmp_path, pathlib.Path("w"), ["--config.epochs=0.1"])
    folder = "w/fashion-vit-rope2d-3-epochs=0.1"
    assert train[2:] == [
        "rope_jax.main",
        f"--config=fashion_mnist:path={tmp_path},backbone=vit,position=rope2d,seed=3",
        f"--workdir={folder}",
        "--config.epochs=0.1",
    ]
    assert extend[2:] == [
        "experiments",
        "extend",
        folder,
        f"--out={folder}/extend.json",
        "--images=2000",
    ]
    assert len(part.commands(run._replace(position="ape"), tmp_path, tmp_path)) == 1
    (crops,) = evidence.PARTS["fashion_crops"].commands(run, tmp_path, tmp_path)
    assert ",augment=resized_crop(scale_min=0.25)" in crops[3]


def test_questions_are_answered_one_after_the_other():
    """All seeds of a group of models come before the next group."""
    part = evidence.PARTS["fashion"]
    started = [(run.backbone, run.position, run.seeds) for run in part.runs(part.seeds)]
    first = ["none", "rpb", "axial_rope(k_rope=2)"]
    assert started[:15] == [("vit", position, (seed,)) for seed in range(5) for position in first]
    assert len(set(started)) == len(started) == 5 * len(part.models)
    assert set(part.extended) <= set(part.models)
    together = evidence.PARTS["cifar10"]
    assert [run.seeds for run in together.runs([1, 2])] == [(1, 2)] * len(together.models)


def test_the_design_of_a_backbone_is_what_decides_its_results():
    design = evidence.PARTS["fashion"].design("vit")
    assert design["data.source"] == "idx"
    assert design["eval.resolutions"] == [16, 20, 24, 32, 40, 48]
    assert not {"seed", "model.position", "data.path", "log_every"} & set(design)
    assert design != evidence.PARTS["fashion"].design("swin")
    crops = evidence.PARTS["fashion_crops"].design("vit")
    assert crops == design | {"data.augment": "resized_crop(scale_min=0.25)"}


def test_every_run_has_a_workdir_of_its_own():
    """Also where parts, seeds or flags differ: what is in a workdir is taken up."""
    folders = [
        part.folder(run, flags)
        for part in evidence.PARTS.values()
        for flags in ((), ("--config.epochs=0.1",), ("--config.init_from=a/b",))
        for run in part.runs([0])
    ]
    assert len(set(folders)) == len(folders)
    assert not [folder for folder in folders if "/" in folder]


def sleeping(tmp_path):
    script = f"""
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path({str(tmp_path / "stopped")!r}).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(tmp_path / "started")!r}).touch()
time.sleep(60)
"""
    return [sys.executable, "-c", script]


@pytest.mark.process
def test_runs_are_stopped_when_the_time_is_up_and_nothing_new_starts(monkeypatch, tmp_path):
    original, started = evidence.start, []

    def start(command, core):
        started.append(original(command, core))
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        return started[-1]

    monkeypatch.setattr(evidence, "start", start)
    commands = {name: [sleeping(tmp_path)] for name in "abc"}
    assert evidence.train(commands, [None], 0.01, lambda: None) == []
    assert len(started) == 1
    assert (tmp_path / "stopped").exists()
    assert started[0].returncode == 0


@pytest.mark.process
def test_a_run_that_fails_is_told_of_and_ends_no_other(tmp_path):
    done = []
    ending = lambda status: [sys.executable, "-c", f"raise SystemExit({status})"]
    after = [sys.executable, "-c", f"open({str(tmp_path / 'after')!r}, 'x')"]
    commands = {"3": [ending(3), ending(1)], "0": [ending(0), after]}
    cores = sorted(os.sched_getaffinity(0))
    assert evidence.train(commands, cores[:1], 1, lambda: done.append(0)) == [
        "3 ended with status 3"
    ]
    assert len(done) == 2
    assert (tmp_path / "after").exists()


@pytest.mark.process
def test_a_run_has_the_core_that_is_named(tmp_path):
    core = max(os.sched_getaffinity(0))
    script = f"""
import os, pathlib, time
time.sleep(0.5)
pathlib.Path({str(tmp_path / "x")!r}).write_text(str(os.sched_getaffinity(0)))
"""
    assert evidence.start([sys.executable, "-c", script], core).wait() == 0
    assert (tmp_path / "x").read_text() == str({core})


def test_seeds_of_one_run_are_told_apart(tmp_path):
    of = lambda side, top1, **more: {
        "resolution": [side, side],
        "top1": top1,
        "top5": 1.0,
        "count": 9,
        **more,
    }
    rows = [of(32, 0.5, seed=5), of(32, 0.6, seed=6), of(24, 0.3, seed=5), of(24, 0.4, seed=6)]
    (tmp_path / "results.json").write_text(json.dumps({"eval": rows}))
    found = evidence.collect(evidence.Run("vit", "ape", (5, 6)), tmp_path)
    assert [(one["seed"], [row["top1"] for row in one["eval"]]) for one in found] == [
        (5, [0.5, 0.3]),
        (6, [0.6, 0.4]),
    ]
    (tmp_path / "results.json").write_text(json.dumps({"eval": [of(32, 0.5)]}))
    assert evidence.collect(evidence.Run("vit", "ape", (7,)), tmp_path)[0]["seed"] == 7
    assert evidence.collect(evidence.Run("vit", "ape", (7,)), tmp_path / "nothing") == []
    run = evidence.Run("vit", "ape", (7,))
    row = {"rule": "ntk", "resolution": [64, 64], "score": 0.5, "count": 9}
    assert evidence.collect(run, tmp_path, extended=True) == []  # not evaluated yet
    for complete in (False, True):
        rules = {"complete": complete, "rows": [row | {"seed": 7, "run": "x"}]}
        (tmp_path / "extend.json").write_text(json.dumps(rules))
        found = evidence.collect(run, tmp_path, extended=True)
        assert [one["rules"] for one in found] == ([[row]] if complete else [])


def images_file(path):
    rng = np.random.default_rng(0)
    split = lambda name, count: {
        f"{name}_images": rng.integers(0, 256, (count, 64, 64, 3), np.uint8),
        f"{name}_labels": np.arange(count) % 2,
    }
    np.savez(path, **split("train", 8), **split("test", 4))
    return path


@pytest.fixture
def small_part(tmp_path, monkeypatch):
    """A part of two models whose runs with seed 0 end, and the names of runs that were started."""
    part = evidence.PARTS["fashion"]
    part = dataclasses.replace(part, groups=[[("vit", "ape"), ("vit", "none")]], extended=())
    monkeypatch.setattr(evidence, "PARTS", {"fashion": part})
    started = []

    def train(runs, cores, minutes, done):
        started.append(list(runs))
        for name in runs:
            if "-0" in name:
                (tmp_path / "w" / name).mkdir(parents=True, exist_ok=True)
                row = {"resolution": [28, 28], "top1": 0.25, "count": 8}
                (tmp_path / "w" / name / "results.json").write_text(json.dumps({"eval": [row]}))
                done()
        return []

    monkeypatch.setattr(evidence, "train", train)
    return part, started


def small_command(tmp_path, *more):
    seeds = ["--seeds", "0", "1", "--workdir", str(tmp_path / "w")]
    return ["fashion", "--data", str(tmp_path), "--out", str(tmp_path / "x.json"), *seeds, *more]


def test_what_is_in_the_file_of_an_earlier_call_is_not_trained_again(tmp_path, small_part, capsys):
    """Also when no workdir is there, as on another machine."""
    _, started = small_part
    main(small_command(tmp_path))
    names = [f"fashion-vit-{position}-{seed}" for seed in (0, 1) for position in ("ape", "none")]
    assert started == [names]
    result = json.loads((tmp_path / "x.json").read_text())
    assert [(run["position"], run["seed"]) for run in result["runs"]] == [("ape", 0), ("none", 0)]
    assert not result["complete"]
    shutil.rmtree(tmp_path / "w")
    main(small_command(tmp_path))
    assert started[1] == names[2:]
    assert json.loads((tmp_path / "x.json").read_text())["runs"] == result["runs"]
    assert "2 of 4 runs are finished; run the same command again" in capsys.readouterr().out
    # Runs with other flags are not taken for these, though they lie in the same folder.
    other = [*small_command(tmp_path), "--out", str(tmp_path / "short.json")]
    main([*other, "--", "--config.epochs=1"])
    assert started[2] == [f"{name}-epochs=1" for name in names]


def test_seeds_can_be_added(tmp_path, small_part, capsys):
    """No claim has a verdict before it has them all."""
    _, started = small_part
    main(small_command(tmp_path, "--seeds", "0"))
    main(small_command(tmp_path, "--seeds", "0", "1", "2"))
    assert started[1] == [f"fashion-vit-{x}-{seed}" for seed in (1, 2) for x in ("ape", "none")]
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["settings"]["seeds"] == [0, 1, 2]
    assert "2 of 6 runs are finished" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_summary_has_claims_of_all_seeds(seeds, capsys):
    found = [run | {"seed": seed} for seed in range(2) for run in runs("rpb", [0.8 + seed / 10])]
    found += [run | {"seed": seed} for seed in range(2) for run in runs("none", [0.7 + seed / 10])]
    evidence.print_summary("fashion", [], found, seeds)
    assert ("shown" in capsys.readouterr().out) == (seeds == 2)


def test_runs_of_other_settings_are_not_taken_for_these(tmp_path, small_part, monkeypatch):
    _, started = small_part
    main(small_command(tmp_path))
    refused = lambda name: pytest.raises(SystemExit, match=f"x.json holds runs with {name} .*: use")
    with refused("flags"):
        main(small_command(tmp_path, "--", "--config.epochs=1"))
    (tmp_path / "others").mkdir()
    with refused("data"):
        main(small_command(tmp_path, "--data", str(tmp_path / "others")))
    with pytest.raises(
        SystemExit, match=r"x.json holds runs with seeds \[0, 1\]: use another file"
    ):
        main(small_command(tmp_path, "--seeds", "1", "2"))
    monkeypatch.setattr(_parts.Part, "design", lambda *_: {"epochs": 9})
    with refused("designs"):
        main(small_command(tmp_path))
    (tmp_path / "x.json").write_text(json.dumps({"benchmark": "digits"}))
    with pytest.raises(SystemExit, match=r"x.json holds a result of digits: use another file"):
        main(small_command(tmp_path))
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["cifar10", "--seeds", "1", "3"],
            "--seeds 1 3: part cifar10 trains all seeds in one run, so they must be consecutive",
        ),
        (["fashion", "--backbones", "x"], "--backbones x: part fashion has vit, cat, .*, swin"),
        (["fashion"], "--data .*x.npz does not exist"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        main([*arguments, "--data", str(tmp_path / "x.npz"), "--workdir", str(tmp_path)])


def test_images_lie_packed_or_as_pixels(tmp_path):
    file = images_file(tmp_path / "pixels.npz")
    assert _parts.packed(file, tmp_path / "new.npz") == file
    np.savez(tmp_path / "other.npz", images=np.zeros(1), labels=np.zeros(1))
    with pytest.raises(
        SystemExit,
        match=r"other.npz has neither train_images nor body, header, offsets: pass a file",
    ):
        _parts.packed(tmp_path / "other.npz", tmp_path / "new.npz")
    rng = np.random.default_rng(0)
    encoded = []
    for quality in (75, 75, 90):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(
            stream, "JPEG", quality=quality
        )
        encoded.append(stream.getvalue())
    cut = 160  # what comes first is alike in all files of a quality: their tables
    assert encoded[0][:cut] == encoded[1][:cut]
    offsets = np.cumsum([0, *(len(one) - cut for one in encoded)])
    arrays = {
        "body": np.frombuffer(b"".join(one[cut:] for one in encoded), np.uint8),
        "offsets": offsets,
        "labels": np.array([7, 3, 7]),
        "header": np.frombuffer(encoded[0][:cut] + encoded[2][:cut], np.uint8),
        "header_offsets": np.array([0, cut, 2 * cut]),
        "header_id": np.array([0, 0, 1]),
        "split": np.array([0, 1, 0]),
    }
    np.savez(tmp_path / "packed.npz", **arrays)
    made = _parts.packed(tmp_path / "packed.npz", tmp_path / "new.npz")
    pixels = [np.asarray(Image.open(io.BytesIO(one))) for one in encoded]
    train, test = (data.load("npz", str(made), split) for split in ("train", "test"))
    np.testing.assert_array_equal(train.images, [pixels[0], pixels[2]])
    np.testing.assert_array_equal(test.images, pixels[1:2])
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 1], [0])
