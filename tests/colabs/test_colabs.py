"""Runs each notebook from top to bottom in its own process and folder, without a network."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

COLABS = sorted(pathlib.Path(__file__).parents[2].joinpath("colabs").glob("*.ipynb"))
FAST = ("quickstart",)
# Runs a line "!command {variable}" as IPython does.
SHELL = """
import shlex, subprocess, sys

def run(line):
    subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)
"""
INSTALL = "raise RuntimeError('rope_jax is not installed')"


def program(notebook):
    """The code of a notebook as plain Python, without the installation of the library."""
    lines = [SHELL]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                line = re.sub(r"^( *)%pip install .*", rf"\1{INSTALL}", line)
                if shell := re.match(r"( *)!(python .*)", line):
                    line = f"{shell[1]}run(f{shell[2]!r})"
                lines.append(line)
    return "\n".join(lines)


def test_lines_for_the_shell_become_calls():
    source = ["if x:\n", '    !python -m a "b(c)" --d={e}\n', "    %pip install z"]
    cells = [{"cell_type": "code", "source": source}, {"cell_type": "markdown"}]
    wanted = f"if x:\n    run(f'python -m a \"b(c)\" --d={{e}}')\n    {INSTALL}"
    assert program({"cells": cells}) == f"{SHELL}\n{wanted}"


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_notebooks_are_clean(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["cells"][0]["source"][0].startswith("# ")
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    used = set(re.findall(r"(?:from|import) (rope_jax\S*)", program(notebook)))
    assert used <= {"rope_jax", "rope_jax_kernels", "rope_jax.config"}  # config: for recipes


def marks(path):
    return [] if path.stem in FAST else [pytest.mark.slow]


@pytest.mark.process
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in COLABS]
)
def test_notebooks_run(path, tmp_path):
    (tmp_path / "notebook.py").write_text(program(json.loads(path.read_text())))
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg"} | quick,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
