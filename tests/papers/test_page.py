"""The pages of `rope_jax reproduce`."""

from rope_jax.papers import page


def cell(published, ours, **key):
    numbers = {"mean": ours, "interval": None, "seeds": [0], "runs": ["a"]}
    return {"key": key, "published": published, "ours": ours and numbers, "note": ""}


CELLS = [
    cell(81.2, 11.0, model="vit_s16", position="rpb", resolution=[224, 224], quantity="top1"),
    cell(79.0, None, model="vit_s16", position="none", resolution=[224, 224], quantity="top1"),
]
RESULT = {"cells": CELLS, "columns": "position"}


def test_numbers_of_other_images_have_a_table_of_their_own():
    ours, published = page.tables(RESULT, "smoke")
    assert ours == (["model (ours)", "rpb", "none"], [["vit_s16", "11", "-"]])
    assert published == (["model (published)", "rpb", "none"], [["vit_s16", "81.2", "79"]])


def test_numbers_of_the_papers_images_are_side_by_side():
    (both,) = page.tables(RESULT, "released")
    assert both[1] == [["vit_s16", "11; 81.2", "-; 79"]]


def test_settings_that_differ_are_bold():
    cells = [
        {"key": {"setting": "epochs"}, "published": "310", "ours": "300", "note": "differs"},
        {"key": {"setting": "EMA"}, "published": "False", "ours": "False", "note": ""},
    ]
    ((header, rows),) = page.tables({"cells": cells, "columns": "position"}, "full")
    assert header == ["setting", "published", "ours (bold: differs)"]
    assert rows == [["epochs", "310", "**300**"], ["EMA", "False", "False"]]


def test_claims_show_their_interval():
    claim = {"claim": "a above b", "verdict": "shown", "difference": 1.25, "interval": [0.5, 2.0]}
    claim |= {"seeds": [0, 1, 2], "after_the_fact": True}
    row = ("a above b", "shown (after the fact)", "+1.25 [+0.5, +2]", "0, 1, 2")
    assert page.claim_row(claim) == row
