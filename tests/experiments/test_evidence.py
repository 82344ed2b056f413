"""The experiment `evidence`: its runs, claims and verdicts."""

import dataclasses
import importlib.util
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

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
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
    ("better", "worse", "equal", "verdict"),
    [
        ((0.80, 0.81, 0.82), (0.70, 0.71, 0.72), False, "shown"),
        ((0.70, 0.71, 0.72), (0.80, 0.81, 0.82), False, "the opposite"),
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), False, "not shown"),
        ((0.80, 0.70, 0.90), (0.79, 0.80, 0.70), True, "no difference seen"),
        ((0.80, 0.81, 0.82), (0.70, 0.71, 0.72), True, "a difference"),
    ],
)
def test_a_claim_is_judged_by_the_interval_of_its_difference(better, worse, equal, verdict):
    claim = Claim("somewhere", ("vit", "a"), ("vit", "b"), equal=equal)
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


@pytest.mark.parametrize("part", evidence.PARTS)
def test_claims_are_about_runs_that_are_made_and_sides_that_are_evaluated(part):
    about, found = evidence.PARTS[part], list(_claims.claims(part))
    assert found
    for claim in found:
        assert {claim.better, claim.worse} <= set(about.models)
    spec = importlib.util.spec_from_file_location(about.recipe, FOLDER / f"{about.recipe}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    for backbone in {backbone for backbone, _ in about.models}:
        config = recipe.get_config(",".join([f"{about.backbone}={backbone}", *about.arguments]))
        trained, asked = (
            config.data.image_size,
            {claim.resolution for claim in found if claim.better[0] == backbone} - {None},
        )
        assert asked in (set(), set(config.eval.resolutions))  # all or none: not those that suit
        assert all((side < trained) == (side in about.smaller) for side in asked)


def test_what_the_papers_say_is_all_there():
    said = {
        (claim.source, claim.better[1], claim.worse[1], claim.resolution, claim.equal)
        for claim in _claims.claims("vit")
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
        ("Heo et al., figure 4", "rope_mixed", "ape", 32, False),
        ("Heo et al., figure 4", "rope_mixed", "rope2d", None, False),
        ("Heo et al., figure 6 and table 5", "rope_mixed+ape", "rope_mixed", 12, False),
        ("Heo et al., figure 6 and table 5", "rope_mixed", "rope_mixed+ape", 32, False),
        ("LaPE, inner embeddings of DeiT-Ti", "lape(sincos2d)", "sincos2d", None, False),
    }
    assert {claim.better[0] for claim in _claims.claims("backbones")} == {
        "swin",
        "nat",
        "dinat",
        "cct",
        "cat",
    }
    assert {(claim.worse[0], claim.source) for claim in _claims.claims("cat")} == {
        ("cat_vit", "CAT, table 1"),
        ("cat_no_imprint", "CAT, table 4"),
    }
    assert {
        claim.better[0] for claim in _claims.claims("cifar10") if claim.source.startswith("LaPE")
    } == set(CIFAR)
    assert ("Heo et al., figure 5", "rpb") in {
        (x.source, x.worse[1]) for x in _claims.claims("tiny_imagenet") if x.better[0] == "swin"
    }


def test_the_command_of_a_run():
    part = evidence.PARTS["cifar10"]
    run = part.runs([121, 122])[0]
    command = part.command(run, pathlib.Path("x.npz"), pathlib.Path("runs"))
    assert command[1:] == [
        "-m",
        "rope_jax.main",
        "--config=configs/cct.py:path=x.npz,variant=vit_lite_7_4,position=ape,seed=121",
        "--workdir=runs/cifar10-vit_lite_7_4-ape-121-122",
        "--config.data.on_device=True",
        "--config.seeds=2",
    ]
    part = evidence.PARTS["cat"]
    assert part.folder(part.runs([0])[0]) == "cat-default-0-epochs=10"
    assert part.command(part.runs([4])[0], pathlib.Path("x.npz"), pathlib.Path("w"))[3:] == [
        "--config=configs/evidence.py:path=x.npz,backbone=cat,seed=4,epochs=10",
        "--workdir=w/cat-default-4-epochs=10",
    ]


def test_every_run_has_a_workdir_of_its_own():
    """Also where parts, seeds or flags differ: what is in a workdir is taken up."""
    folders = [
        part.folder(run, flags)
        for part in evidence.PARTS.values()
        for flags in ((), ("--config.epochs=0.1",), ("--config.init_from=a/b",))
        for run in part.runs([0])
        if part.name != "fashion_mnist"
        or part is evidence.PARTS["vit"]  # the same runs, but for the epochs
    ]
    assert len(set(folders)) == len(folders)
    assert not [folder for folder in folders if "/" in folder]
    part = evidence.PARTS["vit"]
    command = part.command(
        part.runs([0])[0], pathlib.Path("x.npz"), pathlib.Path("w"), ["--config.epochs=0.1"]
    )
    assert command[-2:] == ["--workdir=w/vit-none-0-epochs=0.1", "--config.epochs=0.1"]


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
    commands = dict.fromkeys("abc", sleeping(tmp_path))
    assert evidence.train(commands, [None], 0.01, lambda: None) == []
    assert len(started) == 1
    assert (tmp_path / "stopped").exists()
    assert started[0].returncode == 0


@pytest.mark.process
def test_a_run_that_fails_is_told_of_and_ends_no_other():
    done = []
    commands = {
        str(status): [sys.executable, "-c", f"raise SystemExit({status})"] for status in (3, 0)
    }
    cores = sorted(os.sched_getaffinity(0))
    assert evidence.train(commands, cores[:1], 1, lambda: done.append(0)) == [
        "3 ended with status 3"
    ]
    assert len(done) == 2


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


def images_file(path):
    rng = np.random.default_rng(0)
    split = lambda name, count: {
        f"{name}_images": rng.integers(0, 256, (count, 64, 64, 3), np.uint8),
        f"{name}_labels": np.arange(count) % 2,
    }
    np.savez(path, **split("train", 8), **split("test", 4))
    return path


def test_what_is_in_the_file_of_an_earlier_call_is_not_trained_again(tmp_path, monkeypatch, capsys):
    """Also when the workdir is gone, as on a machine that is lent."""
    monkeypatch.setattr(
        evidence,
        "PARTS",
        {
            "vit": dataclasses.replace(
                evidence.PARTS["vit"], models=[("vit", "ape"), ("vit", "none")]
            )
        },
    )
    trained = []

    def train(commands, cores, minutes, done):
        trained.append(sorted(commands))
        for name in commands:
            if name.endswith("0"):
                (tmp_path / "w" / name).mkdir(parents=True)
                row = {"resolution": [20, 20], "top1": 0.25, "count": 8}
                (tmp_path / "w" / name / "results.json").write_text(json.dumps({"eval": [row]}))
                done()
        return []

    monkeypatch.setattr(evidence, "train", train)
    (tmp_path / "w").mkdir()
    images_file(tmp_path / "w" / "fashion_mnist.npz")
    out = tmp_path / "x.json"
    command = [
        "vit",
        "--data",
        str(tmp_path),
        "--workdir",
        str(tmp_path / "w"),
        "--seeds",
        "0",
        "1",
        "--out",
        str(out),
    ]
    main(command)
    assert trained == [["vit-ape-0", "vit-ape-1", "vit-none-0", "vit-none-1"]]
    result = json.loads(out.read_text())
    assert [(run["position"], run["seed"]) for run in result["runs"]] == [("ape", 0), ("none", 0)]
    assert not result["complete"]
    shutil.rmtree(tmp_path / "w" / "vit-ape-0")
    main(command)
    assert trained[1] == ["vit-ape-1", "vit-none-1"]
    assert json.loads(out.read_text())["runs"] == result["runs"]
    assert "2 of 4 runs are finished; run the same command again" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"x.json holds runs of part vit with flags \[\] on .*: use another file"
    ):
        main([*command, "--", "--config.epochs=1"])
    with pytest.raises(SystemExit, match=r"x.json holds runs .* on .*: use another file"):
        main([*command, "--data", str(tmp_path / "others")])
    # Runs with other flags are not taken for these, though they lie in the same folder.
    main([*command[:-1], str(tmp_path / "short.json"), "--", "--config.epochs=1"])
    assert trained[2] == [
        f"vit-{position}-{seed}-epochs=1" for position in ("ape", "none") for seed in (0, 1)
    ]
    assert json.loads((tmp_path / "short.json").read_text())["runs"] == []
    out.write_text(json.dumps({"benchmark": "digits"}))
    with pytest.raises(SystemExit, match=r"x.json holds a result of digits: use another file"):
        main(command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["cifar10", "--seeds", "1", "3"],
            "--seeds 1 3: part cifar10 trains all seeds in one run, so they must be consecutive",
        ),
        (["vit", "--backbones", "swin"], "--backbones swin: part vit has vit"),
        (["vit"], "--data .*x.npz does not exist"),
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
