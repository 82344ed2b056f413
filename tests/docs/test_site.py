"""The names in the site's API reference."""

import importlib
import pathlib
import re

import pytest

import rope_jax
import rope_jax_kernels

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = re.compile(r"^\.\. (?:auto(?:function|class|data)|currentmodule):: ([\w.]+)", re.MULTILINE)


def documented_names(page):
    """The names on a page of the API reference, with their modules."""
    names, module = [], None
    text = (DOCS / "api" / f"{page}.md").read_text()
    for line in NAMES.finditer(text):
        if "currentmodule" in line[0]:
            module = line[1]
        else:
            names.append(line[1] if "." in line[1] else f"{module}.{line[1]}")
    return names


def test_the_reference_lists_all_public_names():
    kernels = {f"rope_jax_kernels.{name}" for name in rope_jax_kernels.__all__}
    others = {"rope_jax_kernels.adapters.flax_attention_fn"}
    assert set(documented_names("rope_jax_kernels")) == kernels | others
    public = {f"rope_jax.{name}" for name in rope_jax.__all__} - {"rope_jax.__version__"}
    assert set(documented_names("rope_jax")) == public
    assert {f"rope_jax.positions.{name}" for name in rope_jax.positions.__all__} <= {
        *documented_names("extending"),
        "rope_jax.positions.list_positions",  # on the page of rope_jax
    }


ALIASES = {"rope_jax_kernels.Pairing", "rope_jax_kernels.Pattern"}


@pytest.mark.parametrize("page", ["rope_jax", "rope_jax_kernels", "extending"])
def test_documented_names_have_examples(page):
    """`test_doctests` runs them."""
    names = documented_names(page)
    assert names
    for name in {*names} - ALIASES:
        module, _, attribute = name.rpartition(".")
        text = getattr(importlib.import_module(module), attribute).__doc__
        assert ">>> " in text, name
        # reStructuredText ends code only before a space or a mark: `x`s is not code.
        assert not re.search(r"`[\w.]+`\w", text), name
