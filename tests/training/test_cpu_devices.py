"""The command on a CPU: one device a core, which a resumed run keeps."""

import json
import signal

import pytest

import rope_jax.run
from rope_jax.training.report import Reporter
from rope_jax.workdir.metrics import read_events, read_metrics
from tests.faults.processes import Run

SETTINGS = [
    "--config=configs/digits.py:epochs=1",
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.log_every=1",
    "--config.eval.resolutions=((4, 6),)",
]


def _on_eight_cores_until_step_6():
    rope_jax.run.cores = lambda: 8
    waiting = Reporter.waiting_for_batch

    def interrupted(self, number):
        if number == 6:
            signal.raise_signal(signal.SIGINT)
        return waiting(self, number)

    Reporter.waiting_for_batch = interrupted


def _on_two_cores():
    rope_jax.run.cores = lambda: 2


@pytest.mark.process
def test_a_run_on_eight_devices_of_a_cpu_is_that_on_one(tmp_path):
    """It is stopped on a machine of eight cores and goes on where there are two."""
    one, eight = tmp_path / "one", tmp_path / "eight"
    for workdir, prepare, more in (
        (one, None, ["--config.mesh.cpu_devices=1"]),
        (eight, _on_eight_cores_until_step_6, []),
        (eight, _on_two_cores, []),
    ):
        arguments = [*SETTINGS, f"--workdir={workdir}", *more]
        run = Run(arguments, tmp_path / "said.txt", prepare=prepare)
        try:
            assert run.wait(300) == 0, run.said()
        finally:
            run.kill()
    starts = [
        [(event["step"], event["devices"]) for event in read_events(workdir / "metrics.jsonl")
         if event["event"] == "start"] for workdir in (one, eight)
    ]  # fmt: skip
    assert starts == [[(0, 1)], [(0, 8), (6, 8)]]
    config = json.loads((eight / "config.json").read_text())
    assert config["mesh"]["cpu_devices"] == 8
    losses = [
        [line["loss"] for line in read_metrics(workdir / "metrics.jsonl")]
        for workdir in (one, eight)
    ]
    assert len(losses[0]) == 11
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)
    rows = [json.loads((workdir / "results.json").read_text())["eval"] for workdir in (one, eight)]
    assert [row["count"] for row in rows[1]] == [360, 360]
    assert [row["top1"] for row in rows[1]] == pytest.approx(
        [row["top1"] for row in rows[0]],
        abs=1 / 360,  # a tie that rounding decides
    )
