"""The site: its pages, and the names of its API reference."""

import importlib
import pathlib
import re

import pytest

import rope_jax
import rope_jax_kernels

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.rglob("*.md"), *ROOT.glob("colabs/*.ipynb"), ROOT / "README.md"]
PAGES.append(ROOT / "kernels" / "README.md")
INDEX = (DOCS / "index.md").read_text()
NAMES = re.compile(r"^\.\. (?:auto(?:function|class|data)|currentmodule):: ([\w.]+)", re.MULTILINE)


def test_every_page_is_in_the_contents_and_in_the_list():
    contents = "\n".join(re.findall(r"```{toctree}\n(.*?)```", INDEX, re.DOTALL))
    entries = [line for line in contents.splitlines() if line and not line.startswith(":")]
    listed = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
    pages = {path.with_suffix("") for path in PAGES} - {DOCS / "index"}
    assert len(listed) == len(set(listed))
    assert {(DOCS / entry).resolve() for entry in listed} == pages
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)]*)\)", INDEX)}
    assert set(map(pathlib.Path.resolve, PAGES)) - {DOCS / "index.md"} <= linked


def documented(page):
    """The names on a page of the API reference, with their modules."""
    names, module = [], None
    text = (DOCS / "api" / f"{page}.md").read_text()
    for line in NAMES.finditer(text):
        if "currentmodule" in line[0]:
            module = line[1]
        else:
            names.append(line[1] if "." in line[1] else f"{module}.{line[1]}")
    return names


def test_the_reference_has_all_public_names():
    kernels = {f"rope_jax_kernels.{name}" for name in rope_jax_kernels.__all__}
    others = {"rope_jax_kernels.adapters.flax_attention_fn"}
    assert set(documented("rope_jax_kernels")) == kernels | others
    public = {f"rope_jax.{name}" for name in rope_jax.__all__} - {"rope_jax.__version__"}
    assert set(documented("rope_jax")) == public
    assert {f"rope_jax.positions.{name}" for name in rope_jax.positions.__all__} <= {
        *documented("extending"),
        "rope_jax.positions.list_positions",  # on the page of rope_jax
    }


ALIASES = {"rope_jax_kernels.Pairing", "rope_jax_kernels.Pattern"}


@pytest.mark.parametrize("page", ["rope_jax", "rope_jax_kernels", "extending"])
def test_names_of_the_reference_have_examples(page):
    """`test_doctests` runs them."""
    names = documented(page)
    assert names
    for name in {*names} - ALIASES:
        module, _, attribute = name.rpartition(".")
        text = getattr(importlib.import_module(module), attribute).__doc__
        assert ">>> " in text, name
        # reStructuredText ends code only before a space or a mark: `x`s is not code.
        assert not re.search(r"`[\w.]+`\w", text), name
