import json

import pytest

from rope_jax.evaluate import (
    add_evaluation,
    read_evaluations,
    read_results,
    results_table,
    rows_by_line,
    usable_results,
    write_results,
)
from rope_jax.evaluate.results import class_table, usable_evaluations

ROWS = [
    {
        "resolution": [size, size],
        "top1": top1,
        "top5": 1.0,
        "count": 360,
        "protocol": f"centre(crop={crop}) of each image; weights of the last step",
    }
    for crop, top1s in ((1.0, (0.5, 0.25)), (0.875, (0.75, 0.625)))
    for size, top1 in zip((8, 12), top1s, strict=True)
]


def test_rows_of_two_crops_are_distinguished():
    table = [line.split() for line in results_table(ROWS).splitlines()]
    assert [(line[0], line[-1]) for line in table] == [
        ("resolution", "protocol"),
        ("----------", "-" * len("centre(crop=0.875)")),
        ("8x8", "centre(crop=1.0)"),
        ("12x12", "centre(crop=1.0)"),
        ("8x8", "centre(crop=0.875)"),
        ("12x12", "centre(crop=0.875)"),
    ]
    assert rows_by_line("ape", ROWS) == {
        "ape, centre(crop=1.0)": ROWS[:2],
        "ape, centre(crop=0.875)": ROWS[2:],
    }
    assert "protocol" not in results_table(ROWS[:2])
    assert rows_by_line("ape", ROWS[:2]) == {"ape": ROWS[:2]}


def test_published_scores_are_beside_those_of_their_resolution():
    rows = [*ROWS[:2], ROWS[0] | {"resolution": [8, 16]}]
    header, _, *lines = map(str.split, results_table(rows, {8: 0.809, 16: 0.7}).splitlines())
    column = header.index("published")
    assert [line[column] for line in lines] == ["0.8090", "-", "-"]


def test_detection_scores_are_listed_with_dashes_for_none():
    row = {"resolution": [64, 64], "ap": 0.25, "ap50": 0.5, "ap75": 0.125, "ap_small": 0.25}
    row |= {"ap_medium": None, "ap_large": None, "count": 200, "class_ap": [0.25, None]}
    line = results_table([row]).splitlines()[-1]
    assert line.split() == ["64x64", "0.2500", "0.5000", "0.1250", "0.2500", "-", "-", "200"]
    assert class_table([row]).split()[-4:] == ["0", "0.2500", "1", "-"]


def test_seeds_and_crops_have_separate_lines():
    lines = rows_by_line("ape", [row | {"seed": seed} for row in ROWS for seed in (0, 1)])
    assert len(lines) == 4
    assert [row["seed"] for row in lines["ape, seed 1, centre(crop=1.0)"]] == [1, 1]


WRONG = '{"step": 7, "eval": [1], "rows": [1]}'


@pytest.mark.parametrize(
    "content", ['{"step": 7, "ev', "", "[" * 100_000, "[]", '{"step": 7}', WRONG]
)
@pytest.mark.parametrize("name", ["results.json", "evaluations.json"])
def test_damaged_results_are_refused_or_set_aside(tmp_path, content, name, capsys):
    path = tmp_path / name
    path.write_text(content)
    place = tmp_path if name == "results.json" else path
    read, usable = {
        "results.json": (read_results, usable_results),
        "evaluations.json": (read_evaluations, usable_evaluations),
    }[name]
    with pytest.raises(ValueError, match=f"{name} is (not JSON|damaged)"):
        read(place)
    assert not usable(place)
    assert (tmp_path / f"{name}.damaged").read_text() == content
    assert f"{name}.damaged" in capsys.readouterr().err


def test_results_and_evaluations_are_read_and_extended(tmp_path):
    """Other entries, such as those of earlier versions, are ignored."""
    write_results(tmp_path, 7, ROWS)
    results = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps(results | {"sha256": "x"}))
    assert read_results(tmp_path) == usable_results(tmp_path) == {"step": 7, "eval": ROWS}
    path, rows = tmp_path / "evaluations.json", [{"asked": seed, "top1": 0.5} for seed in range(3)]
    rows[0] = {"top1": 0.5}  # not of this command
    path.write_text(json.dumps({"rows": rows[:2], "sha256": "x"}))
    add_evaluation(path, rows[2])
    add_evaluation(path, rows[2] | {"top1": 0.25})  # in place of the other
    assert json.loads(path.read_text()) == {"rows": [*rows[:2], rows[2] | {"top1": 0.25}]}
