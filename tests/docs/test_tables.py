"""The tables of the pages: how results are rendered, and which are shown where."""

import ast
import re

import pytest

from docs import make_tables as tables
from docs.results import ROOT, newest, read_results

ORIGIN = {
    "benchmark": "speed",
    "date": "2030-01-02T03:04:05+00:00",
    "machine": {"device": "Some GPU", "platform": "gpu"},
    "versions": {"jax": "9.9"},
    "settings": {"part": "a"},
    "file": "benchmarks/results/x.json",
}
WHERE = "Some GPU, jax 9.9, 2030-01-02, `benchmarks/results/x.json`"
ROWS = [["`ape`", 12345.6], ["`rpb`", 7]]
TABLE = {"columns": ["scheme", "rate"], "rows": ROWS, "note": "A note."}
HEAD = "| scheme | rate |\n| --- | --- |\n"


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("speed", f"{HEAD}| `ape` | 12,300 |\n| `rpb` | 7 |\n\nA note. {WHERE}.\n"),
        ("speed part=a rows=^`rpb`", f"{HEAD}| `rpb` | 7 |\n\nA note. {WHERE}.\n"),
        ("speed part=b", "No result yet: `python -m benchmarks speed`.\n"),
        ("two number=1", f"{HEAD}| `ape` | 12,300 |\n| `rpb` | 7 |\n\n{WHERE}.\n"),
    ],
)
def test_a_block_is_replaced_and_nothing_else(asked, shown):
    without_note = {key: TABLE[key] for key in ("columns", "rows")}
    two = ORIGIN | {"benchmark": "two", "tables": [TABLE, without_note]}
    text = f"before\n<!-- table: {asked} -->\nstale\n<!-- end -->\nafter\n"
    filled = tables.fill(text, [ORIGIN | TABLE, two])
    assert filled == text.replace("stale\n", shown)
    assert tables.fill(filled, [ORIGIN | TABLE, two]) == filled


def test_the_newest_result_of_each_platform_and_settings_is_shown():
    on_cpu = ORIGIN | {"machine": {"device": "cpu", "platform": "cpu"}, "file": "cpu"}
    other = ORIGIN | {"settings": {"part": "b"}, "file": "other"}
    found = newest([on_cpu, ORIGIN, other, ORIGIN | {"file": "older"}], "speed")
    assert [result["file"] for result in found] == [ORIGIN["file"], "other", "cpu"]
    assert newest(found, "speed", part="b") == [other]


def test_the_command_writes_the_files_that_change(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text("<!-- table: recipe name=digits -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FILES", [path])
    monkeypatch.setitem(tables.TABLES, "recipe", lambda name: f"{name}\n")
    tables.main()
    tables.main()
    assert "digits\n<!-- end -->" in path.read_text()
    assert capsys.readouterr().out == "written: README.md\n"


def test_every_recipe_with_published_accuracies_has_a_section():
    published = {
        path.stem
        for path in ROOT.glob("configs/*.py")
        if "Expected top-1" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    page = (ROOT / "docs/papers.md").read_text()
    assert set(re.findall(r"<!-- table: recipe name=(\w+) -->", page)) == published


def test_every_claim_that_was_tested_is_in_the_section_of_one_paper():
    page = (ROOT / "docs/papers.md").read_text()
    for result in newest(read_results(), "evidence"):
        for row in result["tables"][1]["rows"]:
            assert page.count(f"| {' | '.join(row)} |") == 1, row
