"""The experiment `extend`: its sizes, rules, rows, differences and table."""

import dataclasses
import json
import math

import pytest
from flax import nnx

import rope_jax
from benchmarks._runner import call
from docs.extend import extend as table
from experiments import extend
from rope_jax.config import Config
from rope_jax.positions.extension import Extension, extend_rotations
from rope_jax.training.setup import load_split
from tests.docs.test_tables import evidence_result
from tests.small_run import save_run


def create(position):
    return rope_jax.create_model("vit_digits", position=position, depth=1, width=16, heads=2)


def test_sizes_are_next_to_the_multiples_that_a_model_takes():
    model = rope_jax.create_model("vit_digits", depth=1, image_size=(8, 12))
    assert extend.sizes(model, [0.5, 0.7, 1.0, 1.05, 3.0]) == [(4, 6), (6, 8), (8, 12), (24, 36)]


def test_rules_are_for_rotations_and_for_other_sizes_than_that_of_training():
    models = {name: create(name) for name in ("ape", "rope2d", "ape+rope2d")}
    rules = ["none", "ntk"]
    assert extend.rules_of(models["ape"], (16, 16), rules) == ["none"]
    for name in ("rope2d", "ape+rope2d"):
        assert extend.rules_of(models[name], (16, 16), rules) == rules
        assert extend.rules_of(models[name], (8, 16), rules) == rules
        assert extend.rules_of(models[name], (8, 8), rules) == ["none"]


@pytest.mark.parametrize("position", ["rope2d", "rope2d(extend=yarn,log_scale=True,beta=4)"])
def test_a_rule_replaces_that_of_the_scheme(position):
    """Also its options, so that "none" is none whatever the scheme was trained with."""
    for rule, wanted in [
        ("none", Extension()),
        ("yarn", Extension(extend="yarn")),
        ("ntk(log_scale=True)", Extension(extend="ntk", log_scale=True)),
    ]:
        (scheme,) = extend_rotations(create(position), extend.whole(rule), False)
        assert scheme.extension == wanted


def test_the_first_images_are_scored(monkeypatch):
    images = extend.first_images(Config(), (8, 8), 30)
    whole = load_split(Config(), "test", (8, 8))
    assert len(images.images) == 30
    assert (images.labels == whole.labels[:30]).all()
    model = create("rope2d(extend=interpolate)")
    seen = []
    original = extend.at_resolution

    def at_resolution(*arguments, **options):
        seen.append(original(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(extend, "at_resolution", at_resolution)
    row = extend.score(model, Config(), images, (8, 8), "ntk")
    assert row["count"] == 30
    assert 0 <= row["score"] <= 1
    (scheme,) = (m for _, m in nnx.iter_modules(seen[0]) if hasattr(m, "extension"))
    assert scheme.extension.extend == "ntk"
    monkeypatch.setattr(extend, "load_split", lambda *_: NotInMemory())
    with pytest.raises(SystemExit, match="--images 2: x is not in memory; leave it out"):
        extend.first_images(Config(), (8, 8), 2)


@dataclasses.dataclass
class NotInMemory:
    in_memory: bool = False
    name: str = "x"


def test_rows_are_evaluated_once_and_continue(tmp_path, monkeypatch, capsys):
    save_run(tmp_path, 3, position="rope2d")
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0, "seeds": 1}))
    asked = []

    def score(model, config, images, size, rule):
        asked.append((model.notation, len(images.labels), size, rule))
        return {"score": 0.5 if rule == "none" else 0.75, "count": len(images.labels)}

    monkeypatch.setattr(extend, "score", score)
    out = tmp_path / "out.json"
    more = ["--rules", "none", "ntk", "--scales", "1", "2", "--images", "40"]
    command = [str(tmp_path), "--out", str(out), *more]
    call("extend", extend.run, [*command, "--minutes", "0"], "python -m experiments extend")
    assert asked == [("rope2d", 40, (8, 8), "none")]
    assert "run the same command again to continue" in capsys.readouterr().out
    assert not json.loads(out.read_text())["complete"]
    call("extend", extend.run, command, "python -m experiments extend")
    assert asked[1:] == [("rope2d", 40, (16, 16), "none"), ("rope2d", 40, (16, 16), "ntk")]
    result = json.loads(out.read_text())
    assert result["complete"]
    found = [(row["step"], row["resolution"], row["score"]) for row in result["rows"]]
    assert found == [(3, [8, 8], 0.5), (3, [16, 16], 0.5), (3, [16, 16], 0.75)]
    with pytest.raises(SystemExit, match="holds rows of --images 40, not 50: use another file"):
        call("extend", extend.run, [*command, "--images", "50"], "python -m experiments extend")


def rows(rule, side, scores):
    about = {"model": "vit", "position": "rope2d", "rule": rule, "resolution": [side, side]}
    about["count"] = 2000
    return [about | {"run": f"r{n}", "seed": n, "score": x / 100} for n, x in enumerate(scores)]


ROWS = [
    *rows("none", 28, (90, 91, 92)),
    *rows("none", 56, (60, 62, 64)),
    *rows("ntk", 56, (65, 66, 67)),
    *rows("yarn", 56, (50, 70, 64)),
]


def test_differences_are_those_of_each_run():
    of = lambda rule, side: extend.differences(ROWS, "vit", "rope2d", rule, (side, side))
    assert of("ntk", 56) == pytest.approx([5, 4, 3])
    assert of("none", 56) == pytest.approx([60, 62, 64])
    assert of("ntk", 28) == []
    assert extend.helping(ROWS, "vit", "rope2d") == {(56, 56): ["ntk"]}
    assert extend.helping(ROWS[:8], "vit", "rope2d") == {}  # two of "ntk": 4.5 ± 6.4


def test_the_table():
    """From the rows that runs of `evidence` have."""
    keys = ("rule", "resolution", "score", "count")
    kept = lambda seed: [{key: row[key] for key in keys} for row in ROWS if row["seed"] == seed]
    about = {"backbone": "vit", "position": "rope2d", "eval": [{"resolution": [28, 28]}]}
    runs = [about | {"seed": seed, "rules": kept(seed)} for seed in range(3)]
    unfinished = runs[0] | {"position": "rope_mixed"}
    result = evidence_result("fashion", runs=[about | {"seed": 0}, unfinished, *runs])
    result["settings"]["seeds"] = [0, 1, 2]
    text = table([result])
    assert "rope_mixed" not in text
    half = 4.302653 / math.sqrt(3)
    assert f"| `vit` | `rope2d` | `none` | 91.0 ± {half:.1f} | 62.0 ± {2 * half:.1f} |" in text
    assert f"| `vit` | `rope2d` | `ntk` | - | +4.0 ± {half:.1f} |" in text
    assert "- `vit` with `rope2d`: at 56x56 px, `ntk`." in text
    assert "of models trained at 28x28 px" in text
    assert "over 3 seeds, on the first 2,000 test images of Fashion-MNIST" in text
    for results in ([], [evidence_result("fashion")]):
        assert "python -m experiments evidence fashion" in table(results)
