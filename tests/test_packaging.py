"""Installed files: the wheels, the command `rope_jax` without a clone, types, and versions."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile

import pytest

import rope_jax
import rope_jax_kernels

ROOT = pathlib.Path(__file__).parents[1]
PROJECT, KERNELS = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in (".", "kernels")
)


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project, out):
    """The wheel of a folder with a pyproject.toml."""
    run("-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=project)
    (wheel,) = out.iterdir()
    return wheel


def sources(folder, inside):
    """Names in a wheel of the modules in a folder, and of its marker for type checkers."""
    files = [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]
    return {f"{inside}/{path.relative_to(ROOT / folder)}" for path in files}


def list_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.endswith((".py", "py.typed"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_wheels_contain_exactly_packages_and_recipes(wheel, tmp_path):
    kernels = sources("kernels/rope_jax_kernels", "rope_jax_kernels")
    recipes = {f"rope_jax/configs/{path.name}" for path in ROOT.glob("configs/*.py")}
    assert list_wheel(wheel) == sources("rope_jax", "rope_jax") | kernels | recipes
    assert list_wheel(build(ROOT / "kernels", tmp_path)) == kernels


def test_the_kernels_share_bounds_and_version():
    assert set(KERNELS["dependencies"]) <= set(PROJECT["dependencies"])
    names = {re.match(r"\w+", need)[0] for need in KERNELS["dependencies"]}
    assert names == {"jax", "jaxtyping", "numpy"}
    assert KERNELS["requires-python"] == PROJECT["requires-python"]
    assert rope_jax_kernels.__version__ == rope_jax.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {rope_jax.__version__}\n" in citation
    assert importlib.metadata.version("rope_jax") == rope_jax.__version__


def test_every_dependency_is_pinned_for_ci():
    names = lambda lines: {re.match(r"[\w-]+", x)[0].lower().replace("_", "-") for x in lines}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names(line for line in lines if "==" in line)
    required = PROJECT["dependencies"] + [
        need
        for extra in ("coco", "demo", "docs", "log", "plot", "test")
        for need in PROJECT["optional-dependencies"][extra]
    ]
    assert names(required) - {"rope-jax"} <= pinned


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel installed in it."""
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target")
    run("-m", "pip", "install", *options, site, wheel, cwd=site)
    return site


@pytest.mark.process
def test_the_command_works_without_a_clone(installed, tmp_path):
    def command(*words):
        return run(installed / "bin" / "rope_jax", *words, cwd=tmp_path, PYTHONPATH=str(installed))

    where = run("-c", "import rope_jax; print(rope_jax.__file__)", cwd=tmp_path,
                PYTHONPATH=str(installed))  # fmt: skip
    assert pathlib.Path(where.strip()).is_relative_to(installed)
    assert command("--version") == f"rope_jax {rope_jax.__version__}\n"
    small = ["--config.model.options=depth=1,width=16,heads=1", "--config.eval.resolutions=()"]
    trained = command("train", "--config=digits:epochs=1", "--workdir=run", *small)
    (following,) = (line for line in trained.splitlines() if line.startswith("try next: "))
    assert following.startswith("try next: rope_jax train --config=digits:epochs=1 ")
    assert following.endswith(" --config.model.position=rope2d --workdir=run_rope2d")
    command(*shlex.split(following.removeprefix("try next: rope_jax ")))
    assert (tmp_path / "run_rope2d" / "results.json").exists()
    assert "12x12" in command("evaluate", "run", "--resolutions=12")
    command("report", "run", "--out=page")
    assert (tmp_path / "page" / "report.html").exists()
    command("export", "run", "--out=new/model.bin", "--platforms=cpu")
    assert (tmp_path / "new" / "model.bin").exists()


PROGRAM = """
import jax.numpy as jnp
import rope_jax
from flax import nnx
from rope_jax_kernels import Rotation, rotate

model: nnx.Module = rope_jax.create_model("vit_digits", position="rope_mixed", num_classes=10)
names: list[str] = rope_jax.list_models("vit*")
version: str = rope_jax.__version__
rotation = Rotation(jnp.ones((4, 2)), jnp.ones((1, 2, 4)))
q, k = rotate(jnp.ones((1, 4, 2, 16)), jnp.ones((1, 4, 2, 16)), rotation)
shape: tuple[int, ...] = q.shape
"""


@pytest.mark.process
def test_type_checkers_read_the_types(installed, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    correct, wrong = tmp_path / "correct.py", tmp_path / "wrong.py"
    correct.write_text(PROGRAM)
    wrong.write_text("import rope_jax\nrope_jax.create_model(3)\nrope_jax.list_model()\n")
    options = ("--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}/cache")
    paths = {"MYPYPATH": str(installed)}
    assert "Success" in run("-m", "mypy", *options, correct, cwd=tmp_path, **paths)
    with pytest.raises(AssertionError) as caught:
        run("-m", "mypy", *options, wrong, cwd=tmp_path, **paths)
    message = str(caught.value)
    assert 'wrong.py:2: error: Argument 1 to "create_model" has incompatible type' in message
    assert 'wrong.py:3: error: Module has no attribute "list_model"' in message


def test_public_names_match_those_of_type_checkers():
    tree = ast.parse((ROOT / "rope_jax" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in block.body for alias in node.names}
    assert homes == rope_jax._HOMES
    assert sorted([*homes, "__version__"]) == rope_jax.__all__
    assert all(callable(getattr(rope_jax, name)) for name in homes)
    assert set(rope_jax.__all__) <= set(dir(rope_jax))
    with pytest.raises(AttributeError, match="no attribute 'create_modle'"):
        _ = rope_jax.create_modle
