import pathlib
import re

import pytest

import rope_jax
from benchmarks import tables

README = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_python_of_the_readme_runs(code):
    exec(code, {})


def test_the_tables_list_every_scheme_and_model():
    named = {name.removesuffix("(ape)") for name in re.findall(r"^\| `([^`]+)`", README, re.MULTILINE)}
    assert set(rope_jax.list_positions()) <= named
    models = set()
    for cell in re.findall(r"^\| (`[^|]+`) \|[^|]*\| `", README, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            braces = re.search(r"\{(.*)\}", name)
            models |= {name.replace(braces[0], size) for size in braces[1].split(",")} if braces else {name}
    assert models == set(rope_jax.list_models())


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@|TODO|TBD", README)


@pytest.mark.parametrize("name", tables.FILES)
def test_tables_agree_with_the_results(name):
    text = pathlib.Path(__file__).parents[1].joinpath(name).read_text()
    assert len(tables.BLOCK.findall(text)) == text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert tables.fill(text, tables.read_results()) == text, "run `make tables`"
