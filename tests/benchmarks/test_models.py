import json

import pytest

from benchmarks import models

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_a_short_run_says_what_it_measured(tmp_path, capsys):
    out = tmp_path / "models.json"
    small = ["--models", "deit3_ti16", "--depth", "1", "--image-size", "32", "--batch", "2", "--turns", "2", "--passes", "1"]
    models.main([*small, "--positions", "none", "rope2d", "rpb(size=3)", "--programs", "forward", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["position"], row["program"]) for row in rows] == [("none", "forward"), ("rope2d", "forward")]
    models.main([*small, "--positions", "none", "--programs", "train", "--out", str(out)])
    rows += json.loads(out.read_text())["rows"]
    assert rows[2]["program"] == "train"
    for row in rows:
        assert row["images_per_second"] == pytest.approx(2e3 / row["milliseconds"])
        assert row["low"] <= row["milliseconds"] <= row["high"]
        assert row["temp_bytes"] > 0
    assert rows[0]["tax_percent"] == 0
    printed = capsys.readouterr().out
    assert "deit3_ti16 with rpb(size=3) is left out: " in printed
    assert "| deit3_ti16 | rope2d | forward | rope_jax |" in printed


def test_the_tables_of_the_thesis_stand_beside_ours():
    args = models.parse(["--table", "4.4"])
    assert args.image_size == 224
    assert (len(args.models), args.positions, args.programs) == (13, ["none", "rpb", "axial_rope"], ["forward"])
    row = models.Row("vit_b16", "axial_rope", "forward", "rope_jax", 10.0, 9.0, 11.0, 100.0, 2.0, None)
    assert models.papers(row, "4.4") == "3,519 (FAv2)"
    assert models.table_of([row], "4.4").splitlines()[-1].endswith("| +2.0 | - | 3,519 (FAv2) |")
    for table, names in models.TABLES.items():
        for name in names:
            for position in models.SCHEMES:
                assert models.papers(models.Row(name, position, "forward", "rope_jax", *[1.0] * 4, None, None), table) != "-"
