"""A CPU is one device unless jax's own option says otherwise, and a run resumes on as many."""

import os
import signal
import subprocess
import sys

import jax
import pytest

import rope_jax.run
from rope_jax.analysis.runs import read_runs
from rope_jax.config import ConfigError
from rope_jax.sharding import make_mesh
from rope_jax.training.report import Reporter
from rope_jax.training.signals import Interrupted
from rope_jax.workdir.checkpoint import Checkpoints
from rope_jax.workdir.metrics import read_events, read_metrics
from tests.devices import environment
from tests.faults.processes import ROOT, Run
from tests.training.recipe import interrupt_at, run, tiny

SETTINGS = [
    "--config=configs/digits.py:epochs=1",
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.log_every=1",
    "--config.eval.resolutions=()",
]


def _stop_at_step_6():
    waiting = Reporter.waiting_for_batch

    def interrupted(self, number):
        if number == 6:
            signal.raise_signal(signal.SIGINT)
        return waiting(self, number)

    Reporter.waiting_for_batch = interrupted


@pytest.mark.process
def test_a_run_on_two_devices_of_a_cpu_resumes_on_two_bit_for_bit(tmp_path):
    workdirs = one, two, stopped = [tmp_path / name for name in ("one", "two", "stopped")]
    for workdir, variables, prepare, status in (
        (one, {}, None, 0),
        (two, environment(2), None, 0),
        (stopped, environment(2), _stop_at_step_6, 0),
        (stopped, {}, None, 2),
    ):
        arguments = [*SETTINGS, f"--workdir={workdir}"]
        process = Run(arguments, tmp_path / "said.txt", environment=variables, prepare=prepare)
        try:
            assert process.wait(300) == status, process.said()
        finally:
            process.kill()
    advice = f"--workdir={stopped} was trained with 2 CPU devices: repeat the command as JAX_NUM"
    assert advice in process.said()
    command = [sys.executable, "-m", "rope_jax.main", *SETTINGS, f"--workdir={stopped}"]
    advised = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run(command, cwd=ROOT, env=advised, check=True, timeout=300)
    starts = [
        [(event["step"], event["devices"]) for event in read_events(workdir / "metrics.jsonl")
         if event["event"] == "start"] for workdir in workdirs
    ]  # fmt: skip
    assert starts == [[(0, 1)], [(0, 2)], [(0, 2), (6, 2)]]
    losses = [
        [line["loss"] for line in read_metrics(workdir / "metrics.jsonl")] for workdir in workdirs
    ]
    assert len(losses[0]) == 11
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)
    assert losses[2] == losses[1]


def test_more_devices_than_a_cpu_has_are_refused_with_what_makes_them():
    with pytest.raises(ValueError, match="2 of 1 devices; use one of 1, or JAX_NUM_CPU_DEVICES=2"):
        make_mesh(2, devices=jax.devices()[:1])


def test_runs_that_were_stored_with_the_setting_resume_or_say_how(tmp_path, monkeypatch):
    """`mesh.cpu_devices` was one a core by default; runs of before had one device, or GPUs."""
    settings = {"epochs": 0.4, "eval__resolutions": ()}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(Interrupted):
            run(tmp_path, **settings)
    about, entry = Checkpoints.about, {"cpu_devices": 2}

    def older(self, step):
        found = about(self, step)
        found["config"]["mesh"] |= entry
        return {name: value for name, value in found.items() if name != "cpu_devices"}

    monkeypatch.setattr(Checkpoints, "about", older)
    with pytest.raises(ConfigError, match=r"with 2 CPU devices: .*JAX_NUM_CPU_DEVICES=2 rope_jax"):
        run(tmp_path, **settings)
    rope_jax.run.evaluate_newest(tiny(**settings), tmp_path)
    entry = {"cpu_devices": 1}
    run(tmp_path, **settings)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    entry = {"cpu_devices": 2}
    run(tmp_path, **settings)  # complete: nothing is left to compute
    rope_jax.load_checkpoint(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"fsdp": 1', '"fsdp": 1, "cpu_devices": 2'))
    assert read_runs(tmp_path)[0].step == 5
