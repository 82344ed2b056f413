import json

import jax
import pytest

from benchmarks import scan, startup


def test_compilation_and_first_steps_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # in the processes
    rows = [scan.Row(1, False, 4.0, 10.0, 1), scan.Row(1, True, 2.0, 11.0, 1)]
    asked = {}
    monkeypatch.setattr(scan, "compare", lambda name, depth, **settings: asked.update(settings, depth=depth) or rows)  # has its own test
    out, kept = tmp_path / "startup.json", jax.config.jax_enable_compilation_cache
    try:
        startup.main(
            ["--model=vit_digits", "--depth=1", "--batch=2", "--image-size=8", "--turns=1", "--starts=1", f"--out={out}"],
        )
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
    assert asked == {"depth": 1, "batch": 2, "image_size": 8, "turns": 1, "dtype": "float32"}
    result = json.loads(out.read_text())
    assert [row["compile_s"] for row in result["rows"]] == [4.0, 2.0]
    (cold,), (warm,) = result["first_step_s"]["cold"], result["first_step_s"]["warm"]
    assert cold > 1  # a process that imports jax
    assert warm > 1
    assert result["goals"] == {}  # of a CPU
    printed = capsys.readouterr().out
    assert "The scan compiles 2.00 times as fast" in printed
    assert f"| empty | {cold:.1f} ({cold:.1f}, {cold:.1f}) | 1 |" in printed


def test_goals_are_ratios_of_medians():
    row = {"depth": 12, "temp_bytes": 1}
    rows = [row | {"scan": False, "compile_s": 30.0, "step_ms": 100.0}, row | {"scan": True, "compile_s": 6.0, "step_ms": 102.0}]
    result = {"rows": rows, "first_step_s": {"cold": [80.0, 60.0, 70.0], "warm": [7.0, 9.0, 8.0]}}
    found = startup.goals(result)
    assert found == {"S1": {"value": 5.0, "slower_percent": pytest.approx(2.0)}, "S2": {"value": 8.75}}
    settings = {"model": "deit3_b16", "batch": 64, "image_size": 224, "dtype": "bfloat16"}
    text = startup.table(result | {"settings": settings})
    assert "The scan compiles 5.00 times as fast; its steps take 1.02 times as long." in text
    assert "| warm | 8.0 (7.0, 9.0) | 3 |\n\nEmpty / warm: 8.75.\n\n`deit3_b16`, batch 64, 224 px, bfloat16.\n" in text
    assert startup.goals({"rows": rows, "first_step_s": {}}).keys() == {"S1"}


def test_a_run_that_ends_early_says_why(tmp_path):
    args = startup.parse(["--model", "vit_digit"])
    startup.make_images(tmp_path, 2, 8)
    with pytest.raises(RuntimeError, match=r"ended before its first step, with status 2:\n.*vit_digit"):
        startup.first_step(tmp_path, tmp_path / "cache", args)
