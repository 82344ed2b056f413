"""The command for a machine with a GPU: its steps, and how it continues; outcomes of tests."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from benchmarks import gpu
from benchmarks._runner import main
from rope_jax.commands import tune

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def started_commands(monkeypatch):
    """The started commands; a word in them can make them fail."""
    record = types.SimpleNamespace(commands=[], failing="")

    def run(command, env):
        record.commands.append(command[2:])
        return types.SimpleNamespace(returncode=int(record.failing in command))

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu.subprocess, "run", run)
    return record


def test_steps_run_in_order_and_are_not_repeated(tmp_path, started_commands):
    started_commands.failing = "--model=deit3_b16"
    argv = ["gpu", f"--out={tmp_path}"]
    with pytest.raises(SystemExit, match=r"failed: tune_deit3_b16_axial_rope$"):
        main(argv)
    modules = [command[0] for command in started_commands.commands]
    assert modules == ["pytest", *["rope_jax.tune"] * len(gpu.MODELS), "benchmarks"]
    assert started_commands.commands[-1] == [
        "benchmarks",
        "speed",
        f"--out={tmp_path}/speed_gpu.json",
    ]
    for command in started_commands.commands[1:-1]:
        tune.make_parser().parse_args(command[1:])
    started_commands.commands.clear()
    started_commands.failing = "none"
    assert main(argv) == 0
    assert [command[1] for command in started_commands.commands] == ["--model=deit3_b16"]


def test_failed_tests_of_earlier_calls_are_reported(tmp_path, started_commands):
    started_commands.failing = "none"
    path = tmp_path / f"tests_gpu_{gpu.hash_sources()}.jsonl"
    path.write_text(json.dumps({"test": "a", "outcome": "failed"}) + "\n")
    with pytest.raises(SystemExit, match=r"failed: tests of .*jsonl"):
        main(["gpu", f"--out={tmp_path}"])


def test_nothing_starts_without_a_gpu_or_a_folder(tmp_path, capsys):
    with pytest.raises(SystemExit, match="jax runs on cpu"):
        main(["gpu", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match="2"):
        main(["gpu"])
    assert "required: --out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_gpu_tests_can_be_rehearsed_and_are_not_repeated(tmp_path):
    """Rehearses a test that interprets no kernel."""
    path = tmp_path / "tests.jsonl"
    path.write_text('{"test": "of a line that was cut o\n')
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_gpu_limits.py", "-q", "-p",
               "no:cacheprovider", "-k", "on_the_cpu", "-n", "1", "--dist", "loadgroup",
               f"--outcomes={path}"]  # fmt: skip
    environment = os.environ | {"ROPE_JAX_REHEARSE_GPU_TESTS": "1"}
    for status in (0, 5):  # 5: no test is left
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout
    entries = list(map(json.loads, path.read_text().splitlines()[1:]))
    assert [entry["outcome"] for entry in entries] == ["passed"]
