"""The experiment `scenes`: its runs, differences and verdicts."""

import json
import math

import numpy as np
import pytest

from benchmarks._runner import call
from experiments import scenes
from experiments.scenes import differences, scores, tables, verdict
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
    np.testing.assert_allclose(sizes, gains.T)
    # (4+8+3)/3 - 1, (5+9+4)/3 - 2, (6+10+5)/3 - 3: sizes above that of training alone.
    assert more == pytest.approx([4, 4, 4])
    means, gains = tables(found, ["none", "ape", "rope2d"])
    assert means["columns"] == ["position", *("{}x{} px".format(*size) for size in SIZES)]
    ape = ["`ape`", "50.0 ± 5.0", "42.0 ± 5.0", "45.0 ± 2.5", "32.0 ± 5.0", "41.0 ± 2.5"]
    assert (means["rows"][0], len(means["rows"])) == (ape, 2)
    half = 4.302653 / math.sqrt(3)  # t of 2 degrees of freedom, standard deviation 1
    (row,) = gains["rows"]
    assert row[:2] == ["`rope2d`", f"+2.0 ± {half:.1f}, not shown"]
    assert row[-1] == "+4.0 ± 0.0, above"
    assert verdict([-3, -3.1]) == "-3.0 ± 0.6, below"
    assert verdict([5.0]) == "+5.0, not shown"


def test_sizes_are_those_of_the_recipe():
    config = resolved("scenes", "", data__image_size=64)
    assert tuple(resolutions(config)) == SIZES


def test_finished_runs_are_collected_and_not_repeated(tmp_path, monkeypatch, capsys):
    started = []

    def train(commands, cores, minutes, done):
        started.append(list(commands))
        for name, (command,) in commands.items():
            workdir = tmp_path / name
            position, seed = name.split("-")[:2]
            recipe = f"--config=configs/scenes.py:position={position},seed={seed}"
            assert command[3:] == [recipe, f"--workdir={workdir}", "--config.epochs=0.5"]
            if "none" not in name:
                workdir.mkdir()
                (one,) = runs(position, [(50 + len(name), 40, 45, 30, 40 + int(seed))])
                (workdir / "results.json").write_text(json.dumps({"eval": one["eval"]}))
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
    assert "| `rope_mixed` | +7.0 ± 0.0, above |" in told
    assert "4 of 6 runs are finished; run the same command again to continue" in told
