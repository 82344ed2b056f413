"""The benchmark `evidence`: rows of runs, accuracies, verdicts."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import evidence
from benchmarks._runner import call
from rope_jax.analysis.runs import RunResults
from rope_jax.config import resolve
from rope_jax.papers.claims import above, as_good
from tests.small_run import save_run

SIDES = (16, 24, 32, 40, 48, 64)
INTERPOLATED = {"extend": "interpolate", "log_scale": False}


def rows(position, *accuracies, first_seed=0):
    """Runs of the same accuracy (%) at all sizes, and attention that grows with it."""
    return [
        {
            "position": position,
            "seed": seed,
            "eval": [{"resolution": [s, s], "top1": x / 100, "count": 1000} for s in SIDES],
            "attention": {
                str(side): {"distance": [0, x, 2 * x, 0], "entropy": [0, 1, 1, 0]}
                for side in evidence.SIDES
            },
        }
        for seed, x in enumerate(accuracies, first_seed)
    ]


def test_claims_are_judged_by_all_seeds_and_again_by_later_ones():
    base = rows("ape", 50, 51, 52, 53, 54)
    claims = {
        "a paper": (
            *above("wide", "ape", at=(32,)),
            *above("narrow", "ape", at=(16, 24)),
            *above("absent", "ape", at=(32,)),
            *above("unfinished", "ape", at=(32,)),
            as_good("slightly_worse", "ape", at=(32,)),
        )
    }
    runs = [
        *base,
        *rows("wide", 60, 61, 62, 63, 64.5),
        *rows("narrow", 51, 52, 54, 55, 58),
        *rows("unfinished", 60, 61, 62.5),
        *rows("slightly_worse", 49.6, 50.8, 51.8, 52.8, 54),
    ]
    table = evidence.tabulate_verdicts(runs, claims)
    assert [row[3] for row in table["rows"]] == [
        "+10.1 ± 0.3, shown",
        "+2.0 ± 1.5, shown<br>to be tested again",
        "not tested",
        "+10.2 ± 0.7, 3 of 5 seeds",
        "-0.2 ± 0.2, shown<br>to be tested again",
    ]
    narrow = table["rows"][1]
    assert narrow[:3] == ["`narrow` above `ape`", "a paper", "16, 24"]
    assert narrow[4] == "16 px: +2.0 ± 1.5, shown<br>24 px: +2.0 ± 1.5, shown"
    assert not evidence.is_complete([table])
    one = {"a paper": claims["a paper"][1:2]}
    again = rows("ape", 50, 51, 52, 53, 54, first_seed=5)
    for count, text in ((4, "to be tested again"), (5, "seeds 5 to 9: -10.0 ± 0.0, refuted")):
        more = rows("narrow", *(40, 41, 42, 43, 44)[:count], first_seed=5)
        table = evidence.tabulate_verdicts([*runs, *again, *more], one)
        assert table["rows"][0][3] == f"+2.0 ± 1.5, shown<br>{text}"
        by_size = [line.partition("; ")[2] for line in table["rows"][0][4].split("<br>")]
        assert by_size == ([text, text] if count == 5 else ["", ""])
        assert evidence.is_complete([table]) == (count == 5)
    clear = [*runs, *again, *rows("wide", 60, 61, 62, 63, 64, first_seed=5)]
    table = evidence.tabulate_verdicts(clear, claims)
    assert table["rows"][0][3] == "+10.1 ± 0.3, shown<br>seeds 5 to 9: +10.0 ± 0.0, shown"


def test_attention_is_compared_by_size_number_and_block():
    runs = [*rows("ape", 50, 51, 52, 53, 54), *rows("rope2d", 52, 53, 54, 55, 56)]
    table = evidence.tabulate_attention(runs)["rows"]
    assert table[0][:3] == ["`rope2d` above `ape`", "mean distance (tokens)", "2"]
    assert table[0][3:] == ["+2.00 ± 0.00, shown"] * 3
    assert table[1][3:] == ["+4.00 ± 0.00, shown"] * 3  # block 3
    assert table[2][3:] == ["+0.00 ± 0.00, not shown"] * 3
    assert table[4][3:] == ["not tested"] * 3


def test_accuracies_have_the_most_accurate_scheme_first():
    table = evidence.tabulate_accuracies(
        [*rows("ape", 50), *rows("rope2d", 52, 54), *rows("ape", 90, first_seed=5)]
    )
    assert [row[:3] for row in table["rows"]] == [
        ["`rope2d`", "2", "53.0 ± 12.7"],
        ["`ape`", "1", "50.0"],
    ]


def test_runs_are_interpolated_once_all_sizes_are():
    score = lambda side, **more: {"resolution": [side, side], "top1": 0.5, "count": 1000} | more
    asked = INTERPOLATED | {"step": 5}
    wrong = [{"extend": "ntk"}, {"log_scale": True}, {"step": 4}, {"images": "elsewhere"}]
    further = [
        *(score(side, top1=0.1, asked=asked | change) for change in wrong for side in SIDES),
        *(score(side, top1=0.6, asked=asked) for side in SIDES if side != 32),
    ]
    trained = [score(32), *(score(side) for side in SIDES if side != 32)]
    run = RunResults(pathlib.Path("run"), resolve({}), 5, trained, further, ())
    scores = evidence.interpolated_scores(run)
    assert [row["resolution"] for row in scores] == [row["resolution"] for row in trained]
    assert [row["top1"] for row in scores] == [0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
    assert evidence.interpolated_scores(dataclasses.replace(run, others=further[:-1])) == []


def test_runs_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "SIDES", (8, 12))
    monkeypatch.setattr(evidence, "BLOCKS", (1,))
    folder, other, out = tmp_path / "run", tmp_path / "other", tmp_path / "out.json"
    score = {"top1": 0.5, "count": 40, "protocol": "whole image"}
    scores = [score | {"resolution": [side, side]} for side in (32, 16, 24, 40, 48, 64)]
    for run, position, changes in ((folder, "rope2d", {}), (other, "ape", {"epochs": 7})):
        save_run(run, 3, position=position, seed=4)
        config = {"seed": 4, "model": {"position": position}} | changes
        (run / "config.json").write_text(json.dumps(config))
        (run / "results.json").write_text(json.dumps({"step": 3, "eval": scores}))
    collect = lambda *runs: call(
        "evidence", evidence.run, [*map(str, runs), "--out", str(out)], "evidence"
    )
    collect(folder)
    (row,) = json.loads(out.read_text())["runs"]
    assert (row["position"], row["seed"]) == ("rope2d", 4)
    assert [{**x, "protocol": "whole image"} for x in row["eval"]] == scores
    assert {*row["attention"]} == {"8", "12"}
    assert row["attention"]["12"]["entropy"][0] > row["attention"]["8"]["entropy"][0] > 0
    monkeypatch.setattr(evidence, "read_attention", lambda run: pytest.fail("it is in the file"))
    (tmp_path / "unfinished").mkdir()
    collect(folder, tmp_path / "unfinished", out)
    assert json.loads(out.read_text())["runs"] == [row]
    further = [row | {"top1": 0.6, "asked": INTERPOLATED | {"step": 3}} for row in scores[1:]]
    (folder / "evaluations.json").write_text(json.dumps({"rows": further}))
    for _ in range(2):
        collect(folder)
        before, interpolated = json.loads(out.read_text())["runs"]
        assert before == row
        assert interpolated["position"] == "rope2d(extend=interpolate)"
    with pytest.raises(SystemExit, match="trained with another recipe"):
        collect(other)
