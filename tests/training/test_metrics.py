import os

import numpy as np
import pytest

from rope_jax.training import metrics
from rope_jax.training.metrics import (
    MetricsWriter,
    Speedometer,
    parameter_table,
    progress_line,
    read_events,
    read_metrics,
)
from tests.training.recipe import largest_file


def write(folder, steps, restored_step=0):
    with MetricsWriter(folder, restored_step=restored_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"loss": float(step)})


TORN = [b'{"step": 9, "lo', b"\xff\xfe\x00", b"[1, 2]", b'{"loss": 1.0}', b'"step"', b"", b"7"]
TORN += [b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": "1"}']


@pytest.mark.parametrize("torn", TORN)
def test_lines_torn_by_a_crash_are_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 1.0}\n' + torn + b'\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss"'
    )
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    write(tmp_path, (3, 4), restored_step=2)
    write(tmp_path, (3,), restored_step=2)  # lines after the restored step are rewritten
    assert path.read_text() == "".join(f'{{"step": {n}, "loss": {n}.0}}\n' for n in (1, 2, 3))


def test_a_start_without_a_stop_is_noticed(tmp_path):
    """The process was killed; events are no metrics."""
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        writer.event(0, "start", resumes_from=None)
        writer.write(1, {"loss": 1.0})
        writer.event(1, "saved", bytes=7)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        assert writer.last_event == {"step": 0, "event": "start", "resumes_from": None}


def test_failed_writes_are_repeated_later(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        with largest_file(path.stat().st_size + 12):
            writer.write(2, {"loss": 2.0})
        assert [line["step"] for line in read_metrics(path)] == [1]
        writer.event(2, "stop", why="complete")
    assert f"{path} could not be written: File too large" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert [line["event"] for line in read_events(path)] == ["stop"]


def test_speed_and_remaining_time(monkeypatch):
    now = iter([10.0, 12.0, 14.0, 14.5, 18.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    progress = Speedometer(total_steps=21, batch_size=8)
    names = ("images_per_second", "eta_seconds", "step_seconds", "data_wait", "of_best")
    progress.add_wait(5.0)
    assert progress.at(1) == {}  # the first step pays for compilation
    assert progress.at(5) == dict(zip(names, (16.0, 8.0, 0.5, 0.0, 1.0), strict=True))
    progress.add_wait(0.5)
    assert progress.at(9)["data_wait"] == 0.25
    assert "of_best" not in progress.at(10)  # half a second is too short for a comparison
    assert progress.at(11) == dict(zip(names, (10.0, 8.0, 2.0, 0.0, 0.25), strict=True))


VALUES = {"loss": 1.5, "accuracy": 0.25, "learning_rate": 1e-3, "images_per_second": 1234.5}
LINE = "step   7/100  loss 1.5000  accuracy 0.250  lr 1.00e-03  1,234 images/s, "


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ({"eta_seconds": 59.6}, "1:00 left"),
        ({"eta_seconds": 270_061.0}, "75:01:01 left"),
        ({"eta_seconds": 61.0, "of_best": 0.9, "data_wait": 0.05}, "1:01 left"),
        (
            {"eta_seconds": 61.0, "of_best": 0.5, "data_wait": 0.6, "device_memory_bytes": 3 << 30},
            "1:01 left  50% of its best speed  60% waiting for data  3.0 GiB",
        ),
    ],
)
def test_the_progress_line_shows_remaining_time_and_slowdowns(values, end):
    assert progress_line(7, 100, VALUES | values) == LINE + end


def test_the_parameter_table_joins_blocks():
    blocks = {number: {"w": np.ones((2, 3))} for number in (0, 1)}
    table = parameter_table({"blocks": blocks, "head": {"w": np.ones(4)}})
    rows = [line.split() for line in table.splitlines()]
    assert ["blocks.*.w", "2x3", "2", "12"] in rows
    assert rows[-1] == ["total", "16"]


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        write(tmp_path, (1,))
