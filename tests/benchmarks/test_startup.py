import json
import time

import jax
import pytest

from benchmarks import startup
from benchmarks._runner import call

SMALL = ["--model=vit_digits", "--depth=1", "--batch=2", "--image-size=8", "--turns=1"]
MODEL = startup.Model("vit_digits", 1, 2, 8, "float32")


def row(scan, compile_s, step_ms):
    times = {"compile_s": compile_s, "step_ms": step_ms}
    return {"depth": 12, "scan": scan, "temp_bytes": 1} | times


ROWS = [row(False, 30.0, 100.0), row(True, 6.0, 102.0)]


@pytest.mark.slow
def test_both_forms_are_compiled_and_train_alike():
    rows = startup.compare(MODEL, turns=1)
    assert [(row["depth"], row["scan"]) for row in rows] == [(1, False), (1, True)]
    assert all(row["compile_s"] > 0 and row["step_ms"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.process
def test_first_steps_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(startup, "compare", lambda of, turns: ROWS)
    out, kept = tmp_path / "startup.json", jax.config.jax_enable_compilation_cache
    try:
        call("startup", startup.run, [*SMALL, "--starts=1", f"--out={out}"], "x")
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
    result = json.loads(out.read_text())
    assert [row["compile_s"] for row in result["rows"]] == [30.0, 6.0]
    assert result["settings"]["model"] == "vit_digits"
    (cold,), (warm,) = result["first_step_s"]["cold"], result["first_step_s"]["warm"]
    assert min(cold, warm) > 1  # processes that import jax
    assert result["goals"] == {}  # of a CPU
    printed = capsys.readouterr().out
    assert "The scan compiles 5.00 times as fast" in printed
    assert f"| empty | {cold:.1f} ({cold:.1f}, {cold:.1f}) | 1 |" in printed


def test_goals_are_ratios_of_medians():
    seconds = {"cold": [80.0, 60.0, 70.0], "warm": [7.0, 9.0, 8.0]}
    assert startup.goals(ROWS, seconds) == {
        "S1": {"value": 5.0, "slower_percent": pytest.approx(2.0)},
        "S2": {"value": 8.75},
    }
    assert startup.goals(ROWS, {}).keys() == {"S1"}
    settings = {"model": "deit3_b16", "batch": 64, "image_size": 224, "dtype": "bfloat16"}
    text = startup.table({"settings": settings, "rows": ROWS, "first_step_s": seconds})
    assert "The scan compiles 5.00 times as fast; its steps take 1.02 times as long." in text
    assert "| filled | 8.0 (7.0, 9.0) | 3 |\n\nEmpty / filled: 8.75.\n" in text
    assert text.endswith("\n`deit3_b16`, batch 64, 224 px, bfloat16.\n")


def test_pairs_are_added_until_the_deadline(monkeypatch):
    def first_step(folder, cache, of, limit_s):
        if limit_s <= 0:
            raise RuntimeError("killed")
        return 1.0 if cache.exists() or cache.mkdir() else 3.0

    monkeypatch.setattr(startup, "first_step", first_step)
    one = startup.first_steps(MODEL, {}, time.monotonic() + 60)
    assert one == {"cold": [3.0], "warm": [1.0]}
    two = startup.first_steps(MODEL, one, time.monotonic() + 60)
    assert two == {"cold": [3.0, 3.0], "warm": [1.0, 1.0]}
    assert startup.first_steps(MODEL, two, time.monotonic()) == two


@pytest.mark.process
def test_a_run_that_ends_early_says_why(tmp_path):
    startup.make_images(tmp_path, 2, 8)
    unknown = startup.Model("vit_digit", 1, 2, 8, "float32")
    message = r"ended before its first step, with status 2:\n.*vit_digit"
    with pytest.raises(RuntimeError, match=message):
        startup.first_step(tmp_path, tmp_path / "cache", unknown, 60.0)
