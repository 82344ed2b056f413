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


def test_rows_of_two_crops_are_told_apart():
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


def test_rows_of_one_protocol_do_not_repeat_it():
    assert "protocol" not in results_table(ROWS[:2])
    assert rows_by_line("ape", ROWS[:2]) == {"ape": ROWS[:2]}


def test_scores_of_detections_are_listed_and_none_is_a_dash():
    row = {"resolution": [64, 64], "ap": 0.25, "ap50": 0.5, "ap75": 0.125, "ap_small": 0.25}
    row |= {"ap_medium": None, "ap_large": None, "count": 200, "class_ap": [0.25, None]}
    header, _, line = results_table([row]).splitlines()
    assert header.split("  ")[-1] == "images"
    assert line.split() == ["64x64", "0.2500", "0.5000", "0.1250", "0.2500", "-", "-", "200"]
    assert class_table([row]).split()[-4:] == ["0", "0.2500", "1", "-"]


def test_seeds_and_crops_have_lines_of_their_own():
    rows = [row | {"seed": seed} for row in ROWS for seed in (0, 1)]
    lines = rows_by_line("ape", rows)
    assert len(lines) == 4
    assert [row["seed"] for row in lines["ape, seed 1, centre(crop=1.0)"]] == [1, 1]
    header, _, first, *_ = map(str.split, results_table(rows).splitlines())
    assert dict(zip(header, first, strict=True))["protocol"] == "centre(crop=1.0)"


RESULTS = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "nested": lambda text: "[" * 100_000,
    "edited": lambda text: text.replace("0.25", "0.95"),
    "edited step": lambda text: text.replace('"step": 7', '"step": 8'),
    "a list": lambda text: "[]",
    "without its digest": lambda text: json.dumps({"step": 7, "eval": ROWS}),
}


@pytest.mark.parametrize("damage", RESULTS)
def test_damaged_results_are_refused_or_set_aside(tmp_path, damage, capsys):
    write_results(tmp_path, 7, ROWS)
    assert read_results(tmp_path) == {"step": 7, "eval": ROWS}
    path = tmp_path / "results.json"
    damaged = RESULTS[damage](path.read_text())
    path.write_text(damaged)
    if damage == "without its digest":  # as earlier versions wrote them
        assert read_results(tmp_path) == {"step": 7, "eval": ROWS}
        assert "cannot be verified" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match=r"is not JSON|has no digest|was changed"):
            read_results(tmp_path)
    assert usable_results(tmp_path) is None
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [
        ("results.json.damaged", damaged)
    ]
    assert "its results are computed again. It is kept as" in capsys.readouterr().err


def test_damaged_evaluations_are_begun_anew(tmp_path):
    path, row = tmp_path / "evaluations.json", {"asked": {"seed": 0}, "top1": 0.5}
    for number, damage in enumerate(RESULTS.values(), 1):
        add_evaluation(path, {"asked": {"seed": 1}, "top1": 0.25, "step": 7})
        path.write_text(damage(path.read_text()))
        add_evaluation(path, row)
        assert read_evaluations(path) == [row]
        assert len(list(tmp_path.glob("*.damaged*"))) == number
        path.unlink()
    path.mkdir()
    add_evaluation(path, row)
    assert read_evaluations(path) == [row]


def test_evaluations_of_earlier_versions_are_adopted(tmp_path, capsys):
    """They have no digest; what is damaged is lost, except what is asked for again."""
    path = tmp_path / "evaluations.json"
    rows = [{"asked": {"seed": seed}, "top1": 0.5} for seed in range(3)]
    path.write_text(json.dumps({"rows": rows[:2]}))
    add_evaluation(path, rows[2])
    assert "has no digest, as those of earlier versions" in capsys.readouterr().err
    assert read_evaluations(path) == rows
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert usable_evaluations(path) == []
    told = capsys.readouterr().err
    assert "of its results only those that are asked for are computed again" in told
