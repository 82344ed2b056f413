"""The command as a user gives it, in a process of its own."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from benchmarks._processes import Run
from rope_jax.metrics import read_metrics
from rope_jax.workdir import locked

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--config.model.options=depth=1,width=16,heads=1", "--config.log_every=1", "--config.eval.resolutions=((4, 6),)"]


def command(workdir, *settings, recipe="configs/digits.py:epochs=1"):
    return [sys.executable, "-m", "rope_jax.main", f"--config={recipe}", f"--workdir={workdir}", *settings]


def environment(devices=1):
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def run(*args, devices=1, **kwargs):
    return subprocess.run(command(*args, **kwargs), cwd=ROOT, env=environment(devices), capture_output=True, text=True, timeout=300)


@pytest.fixture
def forked(tmp_path_factory):
    """The same command in a process that need not import anything; it ends with the test."""
    started = []

    def start(workdir, *settings, devices=1):
        log = tmp_path_factory.mktemp("said") / "log"
        started.append(Run(command(workdir, *settings)[3:], log, environment={"XLA_FLAGS": environment(devices)["XLA_FLAGS"]}))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--config.batch_sise=3"], 'there is no such setting: batch_sise Did you mean "batch_size"'),
        (["--confg=x"], "Unknown command line flag 'confg'"),
        (["--config.model.position=axial_rope(k_rope=16)"], "k_rope=16 does not go with head dimension 16"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, settings, message, forked):
    done = forked(tmp_path / "run", *settings)
    assert done.wait(300) == 2
    assert message in done.said()
    assert len(done.said().strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_is_one_line(tmp_path):
    done = run(tmp_path, recipe="configs/nothing.py")
    assert done.returncode == 2
    assert "configs/nothing.py" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_workdir_in_use_is_one_line(tmp_path, forked):
    with locked(tmp_path):
        done = forked(tmp_path)
        assert done.wait(300) == 2
    assert f"{tmp_path} is in use by process {os.getpid()} on" in done.said()
    assert len(done.said().strip().splitlines()) == 1


def test_a_signal_before_the_first_step_is_told_by_the_status(tmp_path, forked):
    stopped = forked(tmp_path, *SMALL)
    stopped.wait_for("\nparameter ")
    stopped.send(signal.SIGTERM)
    assert stopped.wait(120) == 143
    assert "stopped by SIGTERM before there was anything to save" in stopped.said()


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, forked):
    settings = [*SMALL, "--config.epochs=400.0"]
    stopped = forked(tmp_path, *settings)
    stopped.wait_for("\nstep ")
    stopped.send(signal.SIGINT)
    assert stopped.wait(120) == 0
    assert "stopped by SIGINT; what was reached is saved" in stopped.said()
    (saved,) = (int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved >= read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
    again = forked(tmp_path, *settings)
    again.wait_for("\nfound step")
    again.send(signal.SIGTERM)
    assert again.wait(120) == 0
    assert f"found step {saved}" in again.said()


def test_one_device_and_eight_give_the_same_curve(tmp_path, forked):
    for devices in (1, 8):
        done = forked(tmp_path / str(devices), *SMALL, "--config.epochs=4.0", devices=devices)
        assert done.wait(300) == 0, done.said()
    one, eight = ([line["loss"] for line in read_metrics(tmp_path / str(n) / "metrics.jsonl")] for n in (1, 8))
    assert len(one) == len(eight) == 45
    assert max(abs(a - b) for a, b in zip(one, eight, strict=True)) <= 5e-6
    results = [json.loads((tmp_path / str(n) / "results.json").read_text())["eval"] for n in (1, 8)]
    assert [row["resolution"] for row in results[0]] == [row["resolution"] for row in results[1]]


def test_the_line_to_try_next_is_a_command_that_runs(tmp_path):
    settings = [*SMALL, "--config.epochs=0.2"]
    done = run(tmp_path / "run", *settings, recipe="configs/digits.py:position=none,epochs=1,seed=3")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("try next: "))
    words = shlex.split(line.removeprefix("try next: "))
    assert words[3:5] == ["--config=configs/digits.py:position=rope_mixed,epochs=1,seed=3", f"--workdir={tmp_path}/run_rope_mixed"]
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run_rope_mixed" / "results.json").exists()


def test_a_batch_that_eight_devices_cannot_share(tmp_path, forked):
    done = forked(tmp_path, *SMALL, "--config.batch_size=100", devices=8)
    assert done.wait(300) == 2
    assert "--config.batch_size=100 cannot be divided over 8 devices; use 96 or 104" in done.said()
