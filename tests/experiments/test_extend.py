"""The experiment `extend`: its sizes, rules, rows and table."""

import json
import math

import pytest
from flax import nnx

import rope_jax
from benchmarks._runner import call
from experiments import extend
from rope_jax.config import Config
from rope_jax.evaluate import accuracy
from rope_jax.positions.extension import Extension, extend_rotations
from rope_jax.training.setup import load_split
from tests.small_run import save_run


def create(position):
    return rope_jax.create_model("vit_digits", position=position, depth=1, width=16, heads=2)


def test_sizes_are_nearest_multiples_that_fit_the_model():
    model = rope_jax.create_model("vit_digits", depth=1, image_size=(8, 12))
    assert extend.sizes(model, [0.5, 0.7, 1.0, 1.05, 3.0]) == [(4, 6), (6, 8), (8, 12), (24, 36)]


@pytest.mark.parametrize("position", ["rope2d", "rope2d(extend=yarn,log_scale=True,beta=4)"])
def test_rules_replace_those_of_the_scheme(position):
    """Options are replaced too, so that "none" is none whatever the scheme was trained with."""
    for rule, expected in [
        ("none", Extension()),
        ("yarn", Extension(extend="yarn")),
        ("ntk(log_scale=True)", Extension(extend="ntk", log_scale=True)),
    ]:
        (scheme,) = extend_rotations(create(position), extend.spell_out(rule), False)
        assert scheme.extension == expected


def test_first_images_are_scored_with_the_rule(monkeypatch):
    images = extend.first_images(load_split(Config(), "test", (8, 8)), 30)
    assert len(images.images) == 30
    assert (images.labels == load_split(Config(), "test", (8, 8)).labels[:30]).all()
    models, original = [], accuracy.at_resolution

    def at_resolution(*arguments, **options):
        models.append(original(*arguments, **options))
        return models[-1]

    monkeypatch.setattr(accuracy, "at_resolution", at_resolution)
    model = create("rope2d(extend=interpolate)")
    row = extend.score(model, Config(), images, "ntk")
    assert row["count"] == 30
    assert 0 <= row["score"] <= 1
    (scheme,) = (m for _, m in nnx.iter_modules(models[0]) if hasattr(m, "extension"))
    assert scheme.extension.extend == "ntk"


def test_rows_are_evaluated_once_and_continue(tmp_path, monkeypatch, capsys):
    """At the training resolution all rules are equal."""
    save_run(tmp_path, 3, position="rope2d")
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0, "seeds": 1}))
    calls, out = [], tmp_path / "out.json"

    def score(model, config, images, rule):
        calls.append((model.notation, len(images.labels), images.size, rule))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"score": 0.5 if rule == "none" else 0.75, "count": len(images.labels)}

    monkeypatch.setattr(extend, "score", score)
    more = ["--rules", "none", "ntk", "--scales", "1", "2", "--images", "40"]
    run = lambda: call("extend", extend.run, [str(tmp_path), "--out", str(out), *more], "extend")
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not json.loads(out.read_text())["complete"]
    run()
    base, other = ("rope2d", 40, (16, 16), "none"), ("rope2d", 40, (16, 16), "ntk")
    assert calls == [("rope2d", 40, (8, 8), "none"), base, base, other]
    result = json.loads(out.read_text())
    assert result["complete"]
    rows = [(row["step"], row["resolution"], row["score"]) for row in result["rows"]]
    assert rows == [(3, [8, 8], 0.5), (3, [16, 16], 0.5), (3, [16, 16], 0.75)]
    assert "| `vit_digits` | `rope2d` | `ntk` |  | +25.0 |" in capsys.readouterr().out


def rows(rule, side, scores):
    row = {"model": "vit", "position": "rope2d", "rule": rule, "resolution": [side, side]}
    row["count"] = 2000
    return [row | {"run": f"r{n}", "seed": n, "score": x / 100} for n, x in enumerate(scores)]


def test_the_table_has_differences_of_runs():
    """They are bold if their interval is above zero: two runs of "ntk" would be 4.5 ± 6.4."""
    all_rows = [
        *rows("none", 28, (90, 91, 92)),
        *rows("none", 56, (60, 62, 64)),
        *rows("ntk", 56, (65, 66, 67)),
        *rows("yarn", 56, (50, 70, 64)),
    ]
    half = 4.302653 / math.sqrt(3)  # t of 2 degrees of freedom, standard deviation 1
    assert extend.rules_table(all_rows)["rows"] == [
        ["`vit`", "`rope2d`", "`none`", f"91.0 ± {half:.1f}", f"62.0 ± {2 * half:.1f}"],
        ["`vit`", "`rope2d`", "`ntk`", "", f"**+4.0 ± {half:.1f}**"],
        ["`vit`", "`rope2d`", "`yarn`", "", "-0.7 ± 22.4"],
    ]
    assert extend.rules_table(all_rows[:8])["rows"][1][4] == "+4.5 ± 6.4"
