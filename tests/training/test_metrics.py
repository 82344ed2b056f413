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


def test_events_are_kept_separate_from_metrics(tmp_path):
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        assert writer.last_event is None
        writer.event(0, "start", resumes_from=None)
        writer.write(1, {"loss": 1.0})
        writer.event(1, "saved", bytes=7)
    path, start = tmp_path / "metrics.jsonl", {"step": 0, "event": "start", "resumes_from": None}
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]
    assert read_events(path) == [start, {"step": 1, "event": "saved", "bytes": 7}]
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        assert writer.last_event == start  # and no stop after it: it was killed


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
    progress.add_wait(5.0)
    assert progress.at(1) == {}  # the first step pays for compilation
    full_speed = {"images_per_second": 16.0, "eta_seconds": 8.0}
    assert progress.at(5) == full_speed | {"step_seconds": 0.5, "data_wait": 0.0, "of_best": 1.0}
    progress.add_wait(0.5)
    assert progress.at(9)["data_wait"] == 0.25
    assert "of_best" not in progress.at(10)  # half a second is too short for a comparison
    slow = {"images_per_second": 10.0, "eta_seconds": 8.0, "step_seconds": 2.0}
    assert progress.at(11) == slow | {"data_wait": 0.0, "of_best": 0.25}


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
    block = {"w": np.ones((2, 3))}
    params = {"blocks": {0: block, 1: block}, "head": {"w": np.ones(4)}}
    rows = [line.split() for line in parameter_table(params).splitlines()]
    assert ["blocks.*.w", "2x3", "2", "12"] in rows
    assert rows[-1] == ["total", "16"]


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        write(tmp_path, (1,))
