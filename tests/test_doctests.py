"""Every example in a docstring runs and prints what the docstring shows."""

import ast
import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = (
    ROOT / "rope_jax",
    ROOT / "kernels" / "rope_jax_kernels",
    ROOT / "benchmarks",
    ROOT / "docs",
)
FILES = [
    path
    for package in PACKAGES
    for path in sorted(package.rglob("*.py"))
    if ">>> " in path.read_text() and path.name != "conf.py"
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def examples(path):
    """One test for each docstring with examples, named after the documented object."""
    package = next(folder for folder in PACKAGES if path.is_relative_to(folder))
    parts = path.relative_to(package.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    parser = doctest.DocTestParser()
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and ">>> " in text:
            name = getattr(node, "name", path.stem)
            yield parser.get_doctest(text, vars(module), name, str(path), 0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in examples(path):
        report = []
        assert runner.run(test, out=report.append).failed == 0, "".join(report)
    assert runner.tries > 0
