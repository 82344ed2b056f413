"""A CPU is several devices if jax's option says so, and runs resume on as many."""

import os
import subprocess
import sys

import pytest

from rope_jax.training.metrics import read_events
from tests.devices import environment
from tests.faults.processes import ROOT, Run
from tests.training.recipe import interrupt_at, losses

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
    two, again = (tmp_path / name for name in ("two", "again"))
    for workdir, prepare in ((two, None), (again, _stop_at_step_6)):
        arguments = [*SETTINGS, f"--workdir={workdir}"]
        process = Run(arguments, tmp_path / "log", environment=environment(2), prepare=prepare)
        try:
            assert process.wait(300) == 0, process.read_output()
        finally:
            process.kill()
    command = [sys.executable, "-m", "rope_jax.main", *SETTINGS, f"--workdir={again}"]
    advised = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}  # read when jax is imported
    subprocess.run(command, cwd=ROOT, env=advised, check=True, timeout=300)
    starts = [e for e in read_events(again / "metrics.jsonl") if e["event"] == "start"]
    assert [(e["step"], e["devices"]) for e in starts] == [(0, 2), (6, 2)]
    assert len(losses(two)) == 11
    assert losses(again) == losses(two)
