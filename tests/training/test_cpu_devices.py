"""A CPU is one device unless jax's option changes that; runs resume on other numbers of devices."""

import os
import subprocess
import sys

import pytest

import rope_jax
from rope_jax.analysis.runs import read_runs
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.metrics import read_events
from tests.devices import environment
from tests.faults.processes import ROOT, Run
from tests.training.recipe import interrupt_at, losses, run

SETTINGS = [
    "--config=configs/digits.py:epochs=1",
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.log_every=1",
    "--config.eval.resolutions=()",
]


def _stop_at_step_6():
    interrupt_at(pytest.MonkeyPatch(), 6)


@pytest.mark.process
def test_cpu_runs_resume_bit_for_bit_on_equal_devices(tmp_path):
    workdirs = two, again, single = [tmp_path / name for name in ("two", "again", "one")]
    for workdir, variables, prepare in (
        (two, environment(2), None),
        (again, environment(2), _stop_at_step_6),
        (single, environment(2), _stop_at_step_6),
        (single, {}, None),
    ):
        arguments = [*SETTINGS, f"--workdir={workdir}"]
        process = Run(arguments, tmp_path / "said.txt", environment=variables, prepare=prepare)
        try:
            assert process.wait(300) == 0, process.read_output()
        finally:
            process.kill()
    command = [sys.executable, "-m", "rope_jax.main", *SETTINGS, f"--workdir={again}"]
    advised = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}  # read when jax is imported
    subprocess.run(command, cwd=ROOT, env=advised, check=True, timeout=300)
    events = [read_events(workdir / "metrics.jsonl") for workdir in workdirs]
    starts = [[(e["step"], e["devices"]) for e in each if e["event"] == "start"] for each in events]
    assert starts == [[(0, 2)], [(0, 2), (6, 2)], [(0, 2), (6, 1)]]
    losses_of_runs = [[loss for _, loss in losses(workdir)] for workdir in workdirs]
    assert len(losses_of_runs[0]) == 11
    assert losses_of_runs[1] == losses_of_runs[0]
    assert losses_of_runs[2] == pytest.approx(losses_of_runs[0], rel=5e-6)


def test_runs_with_the_former_setting_load_and_resume(tmp_path, monkeypatch):
    """`mesh.cpu_devices` was one per core by default in earlier versions."""
    settings = {"epochs": 0.4, "eval__resolutions": ()}
    original_about = Checkpoints.about

    def earlier_about(self, step):
        metadata = original_about(self, step)
        metadata["config"]["mesh"] |= {"cpu_devices": 2}
        return metadata

    run(tmp_path, **settings)
    monkeypatch.setattr(Checkpoints, "about", earlier_about)
    run(tmp_path, **settings)
    rope_jax.load_checkpoint(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"fsdp": 1', '"fsdp": 1, "cpu_devices": 2'))
    assert read_runs(tmp_path)[0].step == 5
