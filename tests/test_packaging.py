import pathlib
import subprocess
import sys
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).parents[1]


def test_the_wheel_holds_exactly_the_two_packages(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "rope_jax",
        "rope_jax_kernels",
    }
    sources = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("rope_jax/**/*.py")}
    sources |= {
        p.relative_to(ROOT / "kernels").as_posix()
        for p in ROOT.glob("kernels/rope_jax_kernels/**/*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_every_dependency_is_pinned_for_ci():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (
        project["dependencies"]
        + project["optional-dependencies"]["test"]
        + project["optional-dependencies"]["plot"]
    )
    names = {w.split(">")[0].split("[")[0].lower().replace("_", "-") for w in wanted} - {"rope-jax"}
    assert names <= pinned
