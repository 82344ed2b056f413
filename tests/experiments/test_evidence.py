"""The experiment `evidence`: rows of runs, accuracies, verdicts."""

import json

import pytest

from benchmarks._runner import call
from experiments import evidence
from rope_jax.papers.claims import above, as_good
from tests.small_run import save_run

SIDES = (16, 24, 32, 40, 48, 64)


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


def test_verdicts_are_of_the_first_seeds_and_narrow_ones_are_tested_again():
    base = rows("ape", 50, 51, 52)
    claims = {
        "a paper": (
            *above("wide", "ape", at=(32,)),
            *above("narrow", "ape", at=(16, 24)),
            *above("absent", "ape", at=(32,)),
            as_good("slightly_worse", "ape", at=(32,)),
        )
    }
    runs = [
        *base,
        *rows("wide", 60, 61, 62.3),
        *rows("narrow", 52, 54, 54.8),
        *rows("slightly_worse", 49.7, 50.7, 51.8),
    ]
    table = evidence.verdicts(runs, claims)["rows"]
    assert [row[3].split(", ")[-1] for row in table] == [
        "shown",
        "shown<br>to be tested again",
        "not tested",
        "shown<br>to be tested again",
    ]
    assert table[1] == [
        "`narrow` above `ape`",
        "a paper",
        "16, 24",
        "+2.6 ± 1.3, shown<br>to be tested again",
        "16 px: +2.6 ± 1.3, shown<br>24 px: +2.6 ± 1.3, shown",
    ]
    again = [*rows("ape", 50, 51, first_seed=5), *rows("narrow", 40, 41, first_seed=5)]
    table = evidence.verdicts([*runs, *again], claims)["rows"]
    assert table[1][3] == "+2.6 ± 1.3, shown<br>seeds 5 to 9: -10.0 ± 0.0, refuted"


def test_attention_is_compared_by_size_number_and_block():
    runs = [*rows("ape", 50, 51), *rows("rope2d", 52, 53)]
    table = evidence.attention_verdicts(runs)["rows"]
    assert table[0][:3] == ["`rope2d` above `ape`", "mean distance (tokens)", "2"]
    assert table[0][3:] == ["+2.00 ± 0.00, shown"] * 3
    assert table[1][3:] == ["+4.00 ± 0.00, shown"] * 3  # block 3
    assert table[2][3:] == ["+0.00 ± 0.00, not shown"] * 3
    assert table[4][3:] == ["not tested"] * 3


def test_accuracies_have_the_most_accurate_scheme_first():
    table = evidence.accuracies([*rows("ape", 50), *rows("rope2d", 52, 54)])
    assert [row[:3] for row in table["rows"]] == [
        ["`rope2d`", "2", "53.0 ± 12.7"],
        ["`ape`", "1", "50.0"],
    ]


def test_runs_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "SIDES", (8, 12))
    folder, out = tmp_path / "run", tmp_path / "out.json"
    save_run(folder, 3, position="ape", seed=4)
    config = {"seed": 4, "model": {"position": "ape"}}
    (folder / "config.json").write_text(json.dumps(config))
    score = {"resolution": [32, 32], "top1": 0.5, "count": 40, "protocol": "whole image"}
    other = score | {"resolution": [16, 16]}
    (folder / "results.json").write_text(json.dumps({"step": 3, "eval": [score, other]}))
    collect = lambda *runs: call(
        "evidence", evidence.run, [*map(str, runs), "--out", str(out)], "evidence"
    )
    collect(folder)
    (row,) = json.loads(out.read_text())["runs"]
    assert (row["position"], row["seed"]) == ("ape", 4)
    assert [{**x, "protocol": "whole image"} for x in row["eval"]] == [score, other]
    assert {*row["attention"]} == {"8", "12"}
    assert row["attention"]["12"]["entropy"][0] > row["attention"]["8"]["entropy"][0] > 0
    monkeypatch.setattr(evidence, "read_row", lambda run: pytest.fail("it is in the file"))
    collect(folder)
    assert json.loads(out.read_text())["runs"] == [row]
