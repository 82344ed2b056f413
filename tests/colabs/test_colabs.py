"""Runs the notebooks from top to bottom, each in a process and a folder of its own, as a fresh Colab would without the network."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

COLABS = sorted(pathlib.Path(__file__).parents[2].joinpath("colabs").glob("*.ipynb"))
FAST = ("quickstart",)
# What IPython makes of a line "!command {variable}".
SHELL = "import shlex, subprocess, sys\nrun = lambda line: subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)\n"


def program(notebook):
    """The code of a notebook as plain Python. The line that installs the library is left out: it is installed."""
    lines = [SHELL]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                line = re.sub(r"^( *)%pip install .*", r"\1raise RuntimeError('rope_jax is not installed')", line)
                lines.append(re.sub(r"^( *)!(python .*)", lambda found: f"{found[1]}run(f{found[2]!r})", line))
    return "\n".join(lines)


def test_lines_for_the_shell_become_calls():
    cells = [
        {"cell_type": "code", "source": ["if x:\n", '    !python -m a "b(c)" --d={e}\n', "    %pip install z"]},
        {"cell_type": "markdown"},
    ]
    wanted = "if x:\n    run(f'python -m a \"b(c)\" --d={e}')\n    raise RuntimeError('rope_jax is not installed')"
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
    assert used <= {"rope_jax", "rope_jax_kernels", "rope_jax.config"}  # public names, and what a recipe starts from


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else [pytest.mark.slow]) for path in COLABS]
)
def test_notebooks_run(path, tmp_path):
    (tmp_path / "notebook.py").write_text(program(json.loads(path.read_text())))
    environment = {"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
