import json
import sys

import pytest

from rope_jax import config as cfg
from rope_jax.analysis import plots, report


def rows(*pairs):
    shared = {"dataset": "digits", "split": "test", "top5": 1.0, "count": 360, "protocol": "as it is"}
    return [shared | {"resolution": list(size), "top1": top1} for size, top1 in pairs]


def workdir(folder, position, results):
    folder.mkdir()
    (folder / "config.json").write_text(cfg.to_json(cfg.resolve({"model": {"position": position}})))
    (folder / "results.json").write_text(json.dumps({"step": 1, "eval": results}))
    return folder


def test_one_table_one_picture(tmp_path, capsys):
    a = workdir(tmp_path / "a", "ape", rows(((8, 8), 0.9), ((8, 12), 0.5)))
    b = workdir(tmp_path / "b", "rope2d", rows(((8, 8), 0.95), ((16, 16), 0.7)))
    c = workdir(tmp_path / "c", "rope2d", rows(((8, 8), 0.25)))
    report.flags.FLAGS([sys.argv[0]])
    report.main(["report", str(a), str(b), str(c)])
    table = (tmp_path / "comparison.txt").read_text()
    assert [line.split() for line in table.splitlines()] == [
        ["position", "8x8", "8x12", "16x16"],
        ["----------", "----", "----", "-----"],
        ["ape", "90.0", "50.0", "-"],
        ["rope2d", "95.0", "-", "70.0"],
        ["rope2d", "(c)", "25.0", "-", "-"],
    ]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "comparison.png" in capsys.readouterr().out


def test_an_unfinished_run_is_named(tmp_path):
    report.flags.FLAGS([sys.argv[0]])
    with pytest.raises(SystemExit, match=r"nothing has no results.json; run rope_jax.main with --workdir="):
        report.main(["report", str(tmp_path / "nothing")])


def test_a_picture_without_matplotlib_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert plots.accuracy_against_resolution({"ape": rows(((8, 8), 0.9))}, tmp_path / "a.png") is None
