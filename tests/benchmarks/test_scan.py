import json

import pytest

from benchmarks import scan

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_both_forms_are_measured_at_each_depth(tmp_path, capsys):
    out = tmp_path / "scan.json"
    scan.main(["--model", "vit_digits", "--depths", "1", "2", "--batch", "2", "--image-size", "8", "--turns", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["depth"], row["scan"]) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
    assert all(row["compile_s"] > 0 and row["step_ms"] > 0 for row in rows)
    assert capsys.readouterr().out.count("a scan") == 2
