"""Runs each notebook from top to bottom in its own process and folder, without a network.

The stored outputs must match the code; the cell that installs the library finds it in a clone, in a
wheel and on an index.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from docs.make_notebooks import COLABS, checksum, up_to_date

ROOT = COLABS[0].parents[1]
QUICKSTART = next(path for path in COLABS if path.stem == "quickstart")
# Runs a line "!command {variable}" as IPython does.
SHELL = """
import shlex, subprocess, sys

def run(line):
    subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)
"""
PACKAGES = {"rope_jax", "rope_jax_kernels", "rope_jax.config"}  # config: for recipes


def code(path):
    """The cells with code of a notebook, by their ids."""
    cells = json.loads(path.read_text())["cells"]
    return {cell["id"]: cell for cell in cells if cell["cell_type"] == "code"}


def program(path):
    """The code of a notebook as plain Python, in which the library has to be installed."""
    text = "\n".join("".join(cell["source"]) for cell in code(path).values())
    text = re.sub("%pip install .*", "raise RuntimeError('rope_jax is not installed')", text)
    return SHELL + re.sub("!(python .*)", lambda line: f"run(f{line[1]!r})", text)


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_notebooks_have_the_outputs_of_their_code(path):
    assert up_to_date(path), "run `make notebooks`"
    notebook, first = (json.loads(file.read_text()) for file in (path, QUICKSTART))
    title, *shared = ["".join(cell["source"]) for cell in notebook["cells"][:3]]
    assert title.startswith("# ")
    shared[1] = shared[1].replace(*[FIRST[name] for name in ("fused_kernels", "quickstart")])
    assert shared == ["".join(cell["source"]) for cell in first["cells"][1:3]]
    cells = list(code(path).values())
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert '"error"' not in shown
    assert not re.search(r"/(tmp|home|root|work)/", shown)
    assert set(re.findall(r"(?:from|import) (rope_jax\S*)", program(path))) <= PACKAGES
    cells[-1]["source"] += ["\nprint(1)"]
    assert checksum({"cells": cells}) != notebook["metadata"]["executed"]


# What the cell that installs says first: the package, and what else contains it.
FIRST = {
    "quickstart": """\
PACKAGES = ["rope_jax"]
FOLDER, EXTRAS = ".", "[demo,export,hub,plot]"
""",
    "fused_kernels": """\
PACKAGES = ["rope_jax_kernels", "rope_jax"]  # the first is installed, and both contain it
FOLDER, EXTRAS = "kernels", ""
""",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that runs the installation cell, in the current folder.

    Its arguments are the versions of installed packages; it returns the arguments of pip. After an
    installation, jax has the version 0.12.
    """
    monkeypatch.chdir(tmp_path)

    def run(name_on_index="", gpu=False, notebook="quickstart", **versions):
        (path,) = [path for path in COLABS if path.stem == notebook]
        source = "".join(code(path)["install"]["source"])
        assert FIRST[notebook] in source
        source = re.sub(r'%pip install -q (".*")', r"pip(f\1)", source)
        commands = []

        def version(package):
            if package in versions:
                return versions[package]
            raise importlib.metadata.PackageNotFoundError(package)

        def pip(requirement):
            commands.append(requirement)
            versions["jax"] = "0.12"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
        filled = source.replace('NAME_ON_INDEX = ""', f'NAME_ON_INDEX = "{name_on_index}"')
        exec(filled, {"pip": pip})
        return commands

    return run


EXTRAS = "[demo,export,hub,plot]"


def make_clone(folder):
    (folder / "kernels" / "rope_jax_kernels").mkdir(parents=True)
    return folder


def test_the_cell_installs_the_library_from_any_location(install, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"clone rope_jax into {tmp_path}, or upload"):
        install()
    assert install("rope_jax") == [f"rope_jax{EXTRAS}"]
    wheel = tmp_path / "rope_jax-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install("rope_jax") == [f"{wheel}{EXTRAS}"]
    clone = make_clone(tmp_path / "rope_jax")  # its name is that of the package
    assert install() == [f"{clone}{EXTRAS}"]
    (clone / "colabs").mkdir()
    monkeypatch.chdir(clone / "colabs")
    assert install() == [f"{clone}{EXTRAS}"]
    assert install(rope_jax="0.1.0") == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS[1:-1].split(",")) <= set(project["optional-dependencies"])


def test_the_notebook_of_the_kernels_installs_them_alone(install, tmp_path):
    clone = make_clone(tmp_path / "rope_jax")
    assert install(notebook="fused_kernels") == [f"{clone / 'kernels'}"]
    for installed in ({"rope_jax_kernels": "0.1.0"}, {"rope_jax": "0.1.0"}):
        assert install(notebook="fused_kernels", **installed) == []
    (tmp_path / "rope_jax").rename(tmp_path.parent / "elsewhere")
    wheel = tmp_path / "rope_jax_kernels-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install(notebook="fused_kernels") == [str(wheel)]


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_jaxs_gpu_plugin_follows_a_newer_jax(install, tmp_path, cuda):
    first = f"{make_clone(tmp_path / 'clone')}{EXTRAS}"
    plugin = {f"jax-{cuda}-plugin": "0.10"}
    assert install(gpu=True, jax="0.12", **plugin) == [first]
    assert install(jax="0.10", **plugin) == [first]
    assert install(gpu=True, jax="0.10", **plugin) == [first, f"jax[{cuda}]==0.12"]


@pytest.mark.process
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem != "quickstart"))
        for path in COLABS
    ],
)
def test_notebooks_run(path, tmp_path):
    (tmp_path / "notebook.py").write_text(program(path))
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
