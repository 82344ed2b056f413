"""README and docs: Python blocks run, names exist, tables agree with the results."""

import contextlib
import functools
import pathlib
import re

import pytest
import yaml
from flax import nnx

import rope_jax
from docs import make_tables
from rope_jax.names.notation import parse
from rope_jax.positions.scheme import SCHEMES
from tests.parity import official

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_of_the_readme_runs(code):
    exec(code, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        code
        for page in ("models.md", "own_images.md", "own_loop.md")
        for code in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    ],
    ids=["maps", "load", "save", "fine-tune", "loop", "devices"],
)
def test_python_of_the_pages_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(code, {})


def test_pages_have_no_placeholders():
    for text in (README, *PAGES.values()):
        assert not re.search(r"@[A-Z]+@|TODO|TBD|(?<!estimated, )not measured", text)


def names_in_column(text, column):
    """The names in backquotes of a column of all tables, with {a,b} expanded."""
    names = set()
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[column]):
            braces = re.search(r"\{(.*)\}", name)
            sizes = braces[1].split(",") if braces else [""]
            names |= {name.replace(braces[0], size) if braces else name for size in sizes}
    return names


def test_pages_list_every_scheme_and_model():
    page, _, _ = PAGES["schemes.md"].partition("## Beyond")
    schemes = {name.removesuffix("(ape)") for name in names_in_column(page, 0)}
    assert schemes == set(rope_jax.list_positions())
    assert names_in_column(PAGES["models.md"], 0) == set(rope_jax.list_models())


def test_the_page_lists_models_without_official_outputs():
    page = PAGES["models.md"]
    table, _, text = page.partition("`tests/parity`")
    compared = {case["model"] for case in official.CASES.values()} | {"vit_adapter_ti16"}
    rows = [names_in_column(f"| {row} |", 0) for row in re.findall(r"^\| (`.*?) \|", table, re.M)]
    without = set().union(*(row for row in rows if not row & compared), {"cat_vit_5"})
    listed = re.search(r"For\s(`nat_iso.*?)\sthere are no such outputs", text, re.DOTALL)[1]
    assert names_in_column(f"| {' '.join(listed.split())} |", 0) == without


def test_the_readme_names_existing_models_and_schemes():
    table = README[README.index("## Backbones and schemes") : README.index("All sizes")]
    models, schemes = table.split("**schemes**")
    assert names_in_column(models, 1) <= set(rope_jax.list_models())
    listed = {x.removesuffix("(ape)") for x in names_in_column(f"| schemes{schemes}", 1)}
    # `none` is not listed, and two are special cases of others.
    assert set(rope_jax.list_positions()) - listed == {"none", "axial_rope_v1", "rope3d"}


def schemes_in(text):
    """The inline codes that are schemes with options, in the notation."""
    for code in re.findall(r"`([^`\n]+)`", text):
        with contextlib.suppress(ValueError):
            names = {call.name for call in parse(code, "code")}
            if "(" in code and names <= SCHEMES.keys() - {"none"}:
                yield code


def test_schemes_in_the_pages_have_valid_options():
    notations = {code for text in (README, *PAGES.values()) for code in schemes_in(text)}
    assert len(notations) > 30
    for code in notations:
        name = "vit_s16" if code.startswith("decomposed") else "deit3_s16"
        make = functools.partial(rope_jax.create_model, name, position=code, depth=1)
        nnx.eval_shape(make)


@pytest.mark.parametrize(
    "path",
    [  # that creates models
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem == "choosing"))
        for path in make_tables.FILES
        if "<!-- table: " in path.read_text()
    ],
)
def test_tables_match_the_results(path):
    text = path.read_text()
    blocks = len(make_tables.BLOCK.findall(text))
    assert blocks == text.count("<!-- table: ") == text.count("<!-- end -->")
    assert make_tables.fill(text, make_tables.read_results()) == text, "run `make tables`"


def test_the_page_cites_all_of_the_citation_file():
    page, cff = PAGES["citing.md"], yaml.safe_load((ROOT / "CITATION.cff").read_text())
    for work in (cff, *cff["references"]):
        people = [name for person in work["authors"] for name in person.values()]
        values = [work.get(key, "") for key in ("title", "year", "url", "version")]
        for text in map(str, (*people, *values)):
            assert text.removeprefix("and ") in page, text
