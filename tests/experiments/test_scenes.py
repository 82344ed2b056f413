"""The experiment `scenes`: its runs, differences and verdicts."""

import json
import math
import types

import numpy as np
import pytest

from benchmarks._runner import call
from experiments import scenes
from experiments.scenes import differences, scores, tables, verdict

SIZES = ((64, 64), (48, 48), (96, 96), (128, 128), (64, 128))


def runs(position, values):
    """A run per seed; `values` are mIoU in percent by seed and size."""
    return [
        {
            "position": position,
            "seed": seed,
            "eval": [
                {"resolution": list(size), "miou": value / 100, "accuracy": 0.9, "count": 200}
                for size, value in zip(SIZES, seed_values, strict=True)
            ],
        }
        for seed, seed_values in enumerate(values)
    ]


BASE = runs("ape", [(50, 40, 45, 30, 40), (52, 42, 44, 32, 41), (48, 44, 46, 34, 42)])


def test_differences_are_paired_by_seed():
    gains = np.array([(1, -2, 4, 8, 3), (2, 0, 5, 9, 4), (3, 2, 6, 10, 5)])
    all_runs = BASE + runs("rope2d", [np.add(list(scores(BASE, "ape")[s].values()), g)
                                   for s, g in enumerate(gains)])  # fmt: skip
    *sizes, more = differences(all_runs, "rope2d")
    np.testing.assert_allclose(sizes, gains.T)
    # (4+8+3)/3 - 1, (5+9+4)/3 - 2, (6+10+5)/3 - 3: sizes above that of training alone.
    assert more == pytest.approx([4, 4, 4])
    means, gains = tables(all_runs, ["ape", "rope2d"])
    assert means["columns"] == ["position", *("{}x{} px".format(*size) for size in SIZES)]
    ape = ["`ape`", "50.0 ± 5.0", "42.0 ± 5.0", "45.0 ± 2.5", "32.0 ± 5.0", "41.0 ± 2.5"]
    assert (means["rows"][0], len(means["rows"])) == (ape, 2)
    half = 4.302653 / math.sqrt(3)  # t of 2 degrees of freedom, standard deviation 1
    (row,) = gains["rows"]
    assert row[:2] == ["`rope2d`", f"+2.0 ± {half:.1f}, not shown"]
    assert row[-1] == "+4.0 ± 0.0, above"
    assert verdict([-3.0, -3.1]) == "-3.0 ± 0.6, below"
    assert verdict([5.0]) == "+5.0, not shown"


def test_runs_of_the_comparison_are_collected(tmp_path, monkeypatch, capsys):
    expected = {
        f"{result['position']}-{result['seed']}": result
        for result in [*BASE, *runs("none", [[9] * 5])]
    }

    def main(arguments):
        assert arguments[0] == "--config=scenes"
        more = ["--config.epochs=0.5"]
        assert arguments[2:] == ["--seeds=3", f"--out={tmp_path}", *more]
        for name in expected:
            (tmp_path / name).mkdir()
            (tmp_path / name / "results.json").touch()

    def read_runs(folder):
        result = expected[folder.name]
        model = types.SimpleNamespace(position=result["position"])
        config = types.SimpleNamespace(model=model, seed=result["seed"])
        return [types.SimpleNamespace(config=config, rows=result["eval"])]

    monkeypatch.setattr(scenes.compare, "main", main)
    monkeypatch.setattr(scenes, "read_runs", read_runs)
    arguments = ["--out", str(tmp_path / "x.json"), "--workdir", str(tmp_path), "--schemes", "ape"]
    call("scenes", scenes.run, [*arguments, "none", "--", "--config.epochs=0.5"], "")
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["runs"] == list(expected.values())
    assert "| `none` | -41.0, not shown |" in capsys.readouterr().out
