"""Runs each notebook from top to bottom in its own process and folder, without a network.

The outputs that notebooks carry are those of their code; the cell that installs the library finds
it in a clone, in a wheel and on an index.
"""

import doctest
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from docs import make_notebooks

ROOT = pathlib.Path(__file__).parents[2]
COLABS = sorted(ROOT.glob("colabs/*.ipynb"))
FAST = ("quickstart",)
# Runs a line "!command {variable}" as IPython does.
SHELL = """
import shlex, subprocess, sys

def run(line):
    subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)
"""
INSTALL = "raise RuntimeError('rope_jax is not installed')"
PACKAGES = {"rope_jax", "rope_jax_kernels", "rope_jax.config"}  # config: for recipes


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


def test_all_notebooks_are_executed_for_the_site():
    assert sorted(make_notebooks.NOTEBOOKS) == COLABS


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_notebooks_carry_the_outputs_of_their_code(path):
    notebook = make_notebooks.read(path)
    assert notebook["cells"][0]["source"].startswith("# ")
    assert make_notebooks.up_to_date(notebook), "run `make notebooks`"
    assert notebook == make_notebooks.share(notebook, make_notebooks.read(make_notebooks.FIRST))
    assert [cell["id"] for cell in notebook["cells"][1:3]] == ["on-colab", "install"]
    cells = make_notebooks.code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert '"error"' not in shown
    assert not re.search(r"/(tmp|home|root|work)/", shown)
    used = set(re.findall(r"(?:from|import) (rope_jax\S*)", program(notebook)))
    assert used <= PACKAGES


def test_changed_code_is_not_up_to_date():
    notebook = make_notebooks.read(make_notebooks.FIRST)
    *_, last = make_notebooks.code(notebook)
    last["source"] += "\nprint(1)"
    assert not make_notebooks.up_to_date(notebook)


def test_text_that_was_overwritten_is_not_shown():
    tried = doctest.testmod(make_notebooks)
    assert (tried.attempted, tried.failed) == (1, 0)
    stream = {"output_type": "stream", "name": "stdout"}
    picture = {"output_type": "display_data", "data": {}}
    outputs = [
        stream | {"text": ["1 of 2\r"]},
        stream | {"text": ["2 of 2\r\n", "\x1b[1mx\x1b[0m"]},
    ]
    first, second, third = make_notebooks.cleaned([*outputs, picture, stream | {"text": ["y"]}])
    assert first["text"] == ["2 of 2\n", "x"]
    assert (second, third["text"]) == (picture, ["y"])


class Machine:
    """Installed packages; the installation cell sees these, and notes here what it installs.

    Attributes:
        versions: of packages, by name.
        newer: jax as an installation of rope_jax leaves it.
        commands: the arguments of pip.
    """

    def __init__(self, newer, versions):
        self.newer, self.versions, self.commands = newer, dict(versions), []

    def version(self, package):
        if package not in self.versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return self.versions[package]

    def pip(self, what):
        self.commands.append(what)
        self.versions["jax"] = self.newer


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that runs the installation cell on a machine, in the current folder."""
    monkeypatch.chdir(tmp_path)
    notebook = make_notebooks.read(make_notebooks.FIRST)
    (source,) = [cell["source"] for cell in notebook["cells"] if cell["id"] == "install"]
    program, count = re.subn(r'%pip install -q (".*")', r"pip(f\1)", source)
    assert count == 2

    def run(machine, name_on_index="", gpu=False):
        monkeypatch.setattr(importlib.metadata, "version", machine.version)
        monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
        filled = program.replace('NAME_ON_INDEX = ""', f'NAME_ON_INDEX = "{name_on_index}"')
        exec(filled, {"pip": machine.pip})
        return machine.commands

    return run


EXTRAS = "[demo,export,hub,plot]"


def make_clone(folder):
    (folder / "kernels" / "rope_jax_kernels").mkdir(parents=True)
    return folder


def test_the_cell_installs_from_where_the_library_is(install, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"clone rope_jax into {tmp_path}, or upload"):
        install(Machine("0.12", {}))
    assert install(Machine("0.12", {}), name_on_index="rope_jax") == [f"rope_jax{EXTRAS}"]
    wheel = tmp_path / "rope_jax-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install(Machine("0.12", {}), name_on_index="rope_jax") == [f"{wheel}{EXTRAS}"]
    clone = make_clone(tmp_path / "rope_jax")  # its name is that of the package
    assert install(Machine("0.12", {})) == [f"{clone}{EXTRAS}"]
    (clone / "colabs").mkdir()
    monkeypatch.chdir(clone / "colabs")
    assert install(Machine("0.12", {})) == [f"{clone}{EXTRAS}"]
    assert install(Machine("0.12", {"rope_jax": "0.1.0"})) == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS[1:-1].split(",")) <= set(extras)


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_the_part_of_jax_for_gpus_follows_a_newer_jax(install, tmp_path, cuda):
    clone = make_clone(tmp_path / "clone")
    plugin = {f"jax-{cuda}-plugin": "0.10"}
    first = f"{clone}{EXTRAS}"
    assert install(Machine("0.12", plugin | {"jax": "0.12"}), gpu=True) == [first]
    assert install(Machine("0.12", plugin | {"jax": "0.10"})) == [first]
    updated = install(Machine("0.12", plugin | {"jax": "0.10"}), gpu=True)
    assert updated == [first, f"jax[{cuda}]==0.12"]


def marks(path):
    return [] if path.stem in FAST else [pytest.mark.slow]


@pytest.mark.process
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in COLABS]
)
def test_notebooks_run(path, tmp_path):
    (tmp_path / "notebook.py").write_text(program(json.loads(path.read_text())))
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
