"""The experiment `scenes`: its runs, differences and verdicts."""

import json
import math

import numpy as np
import pytest

from benchmarks._runner import call
from docs.scenes import scenes as table
from experiments import scenes
from experiments.scenes import Difference, differences, scores
from rope_jax.evaluate import resolutions
from tests.config.test_recipes import resolved

SIZES = ((64, 64), (48, 48), (96, 96), (128, 128), (64, 128))


def runs(position, values):
    """A run per seed; `values` are mIoU in percent by seed and size."""
    return [
        {
            "position": position,
            "seed": seed,
            "eval": [
                {"resolution": list(size), "miou": value / 100, "accuracy": 0.9, "count": 200}
                for size, value in zip(SIZES, own, strict=True)
            ],
        }
        for seed, own in enumerate(values)
    ]


BASE = runs("ape", [(50, 40, 45, 30, 40), (52, 42, 44, 32, 41), (48, 44, 46, 34, 42)])


def test_differences_are_those_of_each_seed():
    gains = np.array([(1, -2, 4, 8, 3), (2, 0, 5, 9, 4), (3, 2, 6, 10, 5)])
    found = BASE + runs("rope2d", [np.add(list(scores(BASE, "ape")[s].values()), g)
                                   for s, g in enumerate(gains)])  # fmt: skip
    *sizes, more = differences(found, "rope2d")
    assert [one.size for one in sizes] == list(SIZES)
    assert [round(one.mean, 6) for one in sizes] == [2, 0, 5, 9, 4]
    assert [one.verdict for one in sizes] == ["not shown", "not shown", "above", "above", "above"]
    half = 4.302653 / math.sqrt(3)  # t of 2 degrees of freedom, standard deviation 1
    assert sizes[0].half_width == pytest.approx(half, rel=1e-6)
    # (4+8+3)/3 - 1, (5+9+4)/3 - 2, (6+10+5)/3 - 3: sizes above that of training alone.
    assert (more.size, more.seeds, more.verdict) == (None, 3, "above")
    assert more.mean == pytest.approx(4)
    assert more.half_width == pytest.approx(0, abs=1e-9)
    assert Difference("none", None, -3.0, 1.0, 3).verdict == "below"


def test_a_comparison_needs_two_seeds_of_both():
    assert differences(BASE, "ape") == []
    assert differences(BASE + runs("none", [(1, 1, 1, 1, 1)]), "none") == []


def test_sizes_are_those_of_the_recipe():
    config = resolved("scenes", "", data__image_size=64)
    assert tuple(resolutions(config)) == SIZES


def test_finished_runs_are_collected_and_not_repeated(tmp_path, monkeypatch, capsys):
    started = []

    def train(commands, cores, minutes, done):
        started.append(list(commands))
        for name, (command,) in commands.items():
            assert command[-1] == "--config.epochs=0.5"
            workdir = tmp_path / name
            assert f"--workdir={workdir}" in command
            position, seed = name.split("-")[:2]
            assert f"--config=configs/scenes.py:position={position},seed={seed}" in command
            if "none" not in name:
                workdir.mkdir()
                (one,) = runs(position, [(50 + len(name), 40, 45, 30, 40 + int(seed))])
                (workdir / "results.json").write_text(json.dumps({"step": 1, "eval": one["eval"]}))
        return []

    monkeypatch.setattr(scenes, "train", train)
    out = tmp_path / "out.json"
    asked = ["--out", str(out), "--workdir", str(tmp_path), "--seeds", "0", "1"]
    asked += ["--schemes", "none", "ape", "rope_mixed", "--", "--config.epochs=0.5"]
    for _ in range(2):
        call("scenes", scenes.run, asked, "python -m experiments scenes")
    first, second = started
    assert len(first) == 6
    assert second == [name for name in first if name.startswith("none")]
    result = json.loads(out.read_text())
    assert not result["complete"]
    assert len(result["runs"]) == 4
    told = capsys.readouterr().out
    assert "rope_mixed and ape, 64x64 px: +7.0 ± 0.0 points of mIoU, above" in told
    assert "4 of 6 runs are finished; run the same command again to continue" in told


def test_the_table_has_means_and_intervals():
    gain = runs("rope2d", [(60, 50, 55, 40, 50), (62, 52, 54, 42, 51), (58, 54, 56, 44, 52)])
    result = {
        "benchmark": "scenes", "date": "2026-01-01", "file": "x.json", "complete": True,
        "machine": {"device": "cpu", "platform": "cpu"}, "versions": {"jax": "1"}, "cores": 2,
        "settings": {"flags": [], "schemes": ["ape", "rope2d"], "seeds": [0, 1, 2]},
        "runs": BASE + gain,
    }  # fmt: skip
    text = table([result])
    assert "| `ape` | 50.0 ± 5.0 | 42.0 ± 5.0 | 45.0 ± 2.5 | 32.0 ± 5.0 | 41.0 ± 2.5 |" in text
    assert "| `rope2d` | +10.0 ± 0.0, above |" in text
    assert text.count("+0.0 ± 0.0, not shown |") == 1
    assert "python -m experiments scenes" in table([])
