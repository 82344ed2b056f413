"""The experiment `extend`: its sizes, rows, differences and table."""

import json
import math

import pytest

import rope_jax
from benchmarks._runner import call
from docs.extend import extend as table
from experiments import extend
from tests.small_run import save_run


def test_sizes_are_next_to_the_multiples_that_a_model_takes():
    model = rope_jax.create_model("vit_digits", depth=1, image_size=(8, 12))
    wanted = {0.5: (4, 6), 0.7: (6, 8), 1.0: (8, 12), 3.0: (24, 36)}
    assert extend.sizes(model, list(wanted)) == wanted


def test_models_without_a_rotation_have_their_own_rule_only():
    models = {name: rope_jax.create_model("vit_digits", position=name, depth=1)
              for name in ("ape", "rope2d", "ape+rope2d")}  # fmt: skip
    rules = ["none", "ntk"]
    assert extend.rules_of(models["ape"], 2.0, rules) == ["none"]
    for name in ("rope2d", "ape+rope2d"):
        assert extend.rules_of(models[name], 2.0, rules) == rules
        assert extend.rules_of(models[name], 1.0, rules) == ["none"]


def test_rows_are_evaluated_once_and_continue(tmp_path, monkeypatch, capsys):
    save_run(tmp_path, 3, position="rope2d")
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0, "seeds": 1}))
    asked = []

    def score(model, config, images, size, rule):
        asked.append((model.notation, size, rule))
        return 0.5 if rule == "none" else 0.75

    monkeypatch.setattr(extend, "score", score)
    out = tmp_path / "out.json"
    command = [str(tmp_path), "--out", str(out), "--rules", "none", "ntk", "--scales", "1", "2"]
    call("extend", extend.run, [*command, "--minutes", "0"], "python -m experiments extend")
    assert asked == [("rope2d", (8, 8), "none")]
    assert "run the same command again to continue" in capsys.readouterr().out
    call("extend", extend.run, command, "python -m experiments extend")
    assert asked[1:] == [("rope2d", (16, 16), "none"), ("rope2d", (16, 16), "ntk")]
    rows = json.loads(out.read_text())["rows"]
    found = [(row["step"], row["scale"], row["score"]) for row in rows]
    assert found == [(3, 1.0, 0.5), (3, 2.0, 0.5), (3, 2.0, 0.75)]


def rows(rule, scale, scores):
    about = {"model": "vit", "position": "rope2d", "rule": rule, "scale": scale}
    return [about | {"run": f"r{n}", "seed": 0, "score": x / 100} for n, x in enumerate(scores)]


ROWS = [
    *rows("none", 1.0, (90, 91, 92)),
    *rows("none", 2.0, (60, 62, 64)),
    *rows("ntk", 2.0, (65, 66, 67)),
    *rows("yarn", 2.0, (50, 70, 64)),
]


def test_differences_are_those_of_each_run():
    assert extend.differences(ROWS, "vit", "rope2d", "ntk", 2.0) == pytest.approx([5, 4, 3])
    assert extend.differences(ROWS, "vit", "rope2d", "none", 2.0) == pytest.approx([60, 62, 64])
    assert extend.differences(ROWS, "vit", "rope2d", "ntk", 1.0) == []
    assert extend.helping(ROWS, "vit", "rope2d") == {2.0: ["ntk"]}
    assert extend.helping(ROWS[:8], "vit", "rope2d") == {}  # two of "ntk": 4.5 ± 6.4


def test_the_table():
    result = {
        "benchmark": "extend", "date": "2026-01-01", "file": "x.json", "rows": ROWS,
        "machine": {"device": "cpu", "platform": "cpu"}, "versions": {"jax": "1"}, "settings": {},
    }  # fmt: skip
    text = table([result])
    half = 4.302653 / math.sqrt(3)
    assert f"| `vit` | `rope2d` | `none` | 91.0 ± {half:.1f} | 62.0 ± {2 * half:.1f} |" in text
    assert f"| `vit` | `rope2d` | `ntk` | - | +4.0 ± {half:.1f} |" in text
    assert "- `vit` with `rope2d`: at 2 times the size, `ntk`." in text
    assert "python -m experiments extend" in table([])
