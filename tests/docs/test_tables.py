"""The tables of the pages: rendering and selection of results."""

import ast
import re

import pytest

from docs import make_tables as tables
from docs import paper_tables
from docs.results import ROOT, newest, read_results
from rope_jax.papers.declared import DECLARED

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
    ("query", "shown"),
    [
        ("speed", f"{HEAD}| `ape` | 12,300 |\n| `rpb` | 7 |\n\nA note. {WHERE}.\n"),
        ("speed part=a rows=^`rpb`", f"{HEAD}| `rpb` | 7 |\n\nA note. {WHERE}.\n"),
        ("speed part=b", "No result yet: `python -m benchmarks speed`.\n"),
        ("two number=1", f"{HEAD}| `ape` | 12,300 |\n| `rpb` | 7 |\n\n{WHERE}.\n"),
    ],
)
def test_only_blocks_are_replaced(query, shown):
    without_note = {key: TABLE[key] for key in ("columns", "rows")}
    two = ORIGIN | {"benchmark": "two", "tables": [TABLE, without_note]}
    text = f"before\n<!-- table: {query} -->\nstale\n<!-- end -->\nafter\n"
    filled = tables.fill(text, [ORIGIN | TABLE, two])
    assert filled == text.replace("stale\n", shown)
    assert tables.fill(filled, [ORIGIN | TABLE, two]) == filled


def test_the_newest_results_are_shown():
    on_cpu = ORIGIN | {"machine": {"device": "cpu", "platform": "cpu"}, "file": "cpu"}
    other = ORIGIN | {"settings": {"part": "b"}, "file": "other"}
    newest_results = newest([on_cpu, ORIGIN, other, ORIGIN | {"file": "older"}], "speed")
    assert [result["file"] for result in newest_results] == [ORIGIN["file"], "other", "cpu"]
    assert newest(newest_results, "speed", {"part": "b"}) == [other]


def test_the_command_writes_only_changed_files(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text("<!-- table: recipe name=digits -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FILES", [path])
    monkeypatch.setitem(tables.TABLES, "recipe", lambda name: f"{name}\n")
    tables.main()
    tables.main()
    assert "digits\n<!-- end -->" in path.read_text()
    assert capsys.readouterr().out == "written: README.md\n"


def test_the_page_has_all_papers_and_their_recipes():
    recipes = {
        path.stem
        for path in ROOT.glob("configs/*.py")
        if "rope_jax reproduce" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    page = (ROOT / "docs/papers.md").read_text()
    assert set(re.findall(r"<!-- table: recipe name=(\w+) -->", page)) == recipes
    assert re.findall(r"<!-- table: papers name=(\w+) -->", page) == [x.name for x in DECLARED]


def test_the_tables_of_papers_have_a_row_for_each_artifact():
    (header, _, *rows) = paper_tables.papers("heo").splitlines()
    assert header == "| id | shows | runs: small | full | published | claims |"
    figure = next(row for row in rows if "`heo/figure_4`" in row)
    # Five schemes of one stand-in with three seeds; S in one stage, B and L in two.
    assert "| 15 | 25 | 30 | rope2d above ape, at 256, 320, 384, 448, 512 px (3 models)" in figure
    assert rows[-1].split(" | ")[-2] == "139"


def test_every_tested_claim_is_in_one_section():
    page = (ROOT / "docs/papers.md").read_text()
    finished = [x for x in newest(read_results(), "evidence") if x["complete"]]
    assert finished
    for result in finished:
        for row in result["tables"][1]["rows"]:
            assert page.count(f"| {' | '.join(row)} |") == 1, row
