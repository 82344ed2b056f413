import os

import jax.numpy as jnp
import pytest

from rope_jax.files import SaveFailed
from rope_jax.text import format_table
from rope_jax.workdir import metrics
from rope_jax.workdir.metrics import (
    MetricsWriter,
    Speedometer,
    parameter_table,
    progress_line,
    read_events,
    read_metrics,
)


def write(folder, steps, restored_step=0):
    with MetricsWriter(folder, restored_step=restored_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"loss": float(step)})


def test_lines_after_the_restored_step_are_written_anew(tmp_path):
    write(tmp_path, (1, 2, 3))
    write(tmp_path, (3, 4), restored_step=2)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_torn_last_line_is_dropped(tmp_path):
    write(tmp_path, (1, 2))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(tmp_path, (3,), restored_step=3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_no_file_is_no_lines(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    "torn", [b'{"step": 9, "lo', b"\xff\xfe\x00", b"[1, 2]", b'{"loss": 1.0}', b'"step"', b""]
)
def test_what_a_crash_has_torn_is_dropped_wherever_it_stands(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 1.0}\n' + torn + b'\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss"'
    )
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    write(tmp_path, (3,), restored_step=2)
    assert path.read_text() == "".join(f'{{"step": {n}, "loss": {n}.0}}\n' for n in (1, 2, 3))


def test_events_stand_between_the_metrics_and_apart_from_them(tmp_path):
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        assert writer.last_event is None
        writer.event(0, "start", resumes_from=None)
        writer.write(1, {"loss": 1.0})
        writer.event(1, "saved", bytes=7)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert [event["event"] for event in read_events(tmp_path / "metrics.jsonl")] == [
        "start",
        "saved",
    ]
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        assert writer.last_event == {
            "step": 0,
            "event": "start",
            "resumes_from": None,
        }  # and no stop after it: it was killed


def test_a_line_is_one_write_and_a_full_disk_is_told(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        written, real = [], os.write
        monkeypatch.setattr(
            metrics.os, "write", lambda file, data: written.append(data) or real(file, data)
        )
        writer.write(1, {"loss": 1.0, "note": 10_000 * "x"})
        assert len(written) == 1
        monkeypatch.setattr(metrics.os, "write", lambda file, data: real(file, data[:12]))
        with pytest.raises(
            SaveFailed, match=r"metrics.jsonl could not be written: only 12 of 25 bytes"
        ):
            writer.write(2, {"loss": 1.0})
        monkeypatch.setattr(metrics.os, "write", real)
        writer.event(2, "stop", why="the disk is full")
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert [line["event"] for line in read_events(tmp_path / "metrics.jsonl")] == [
        "stop"
    ]  # not joined to the half line before it


def test_speed_and_remaining_time(monkeypatch):
    now = iter([10.0, 12.0, 14.0, 14.5, 18.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    progress = Speedometer(total_steps=21, batch_size=8)
    progress.waited(5.0)
    assert progress.at(1) == {}  # the first step pays for compilation
    whole = {"images_per_second": 16.0, "eta_seconds": 8.0}
    assert progress.at(5) == whole | {"step_seconds": 0.5, "data_wait": 0.0, "of_best": 1.0}
    progress.waited(0.5)
    assert progress.at(9) == whole | {
        "eta_seconds": 6.0,
        "step_seconds": 0.5,
        "data_wait": 0.25,
        "of_best": 1.0,
    }
    assert "of_best" not in progress.at(10)  # half a second tells too little
    assert progress.at(11) == {
        "images_per_second": 10.0,
        "eta_seconds": 8.0,
        "step_seconds": 2.0,
        "data_wait": 0.0,
        "of_best": 0.25,
    }


def test_progress_line():
    values = {
        "loss": 1.5,
        "accuracy": 0.25,
        "learning_rate": 1e-3,
        "images_per_second": 1234.5,
        "eta_seconds": 61.0,
    }
    assert (
        progress_line(7, 100, values)
        == "step   7/100  loss 1.5000  accuracy 0.250  lr 1.00e-03  1,234 images/s, 1:01 left"
    )


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(59.6, "1:00"), (3599.0, "59:59"), (3600.0, "1:00:00"), (270_061.0, "75:01:01")],
)
def test_the_remaining_time_has_hours_where_there_are_any(seconds, left):
    values = {
        "loss": 1.5,
        "accuracy": 0.25,
        "learning_rate": 1e-3,
        "images_per_second": 10.0,
        "eta_seconds": seconds,
    }
    assert progress_line(7, 9, values).endswith(f" {left} left")


def test_the_progress_line_names_what_slows_a_run_down():
    values = {
        "loss": 1.5,
        "accuracy": 0.25,
        "learning_rate": 1e-3,
        "images_per_second": 10.0,
        "eta_seconds": 1.0,
    }
    assert progress_line(7, 9, values | {"of_best": 0.9, "data_wait": 0.05}).endswith("0:01 left")
    slow = progress_line(
        7, 9, values | {"of_best": 0.5, "data_wait": 0.6, "device_memory_bytes": 3 * 2**30}
    )
    assert slow.endswith("0:01 left  50% of its best speed  60% waiting for data  3.0 GiB")


def test_parameter_table_joins_blocks_and_counts():
    params = {
        "blocks": {0: {"w": jnp.ones((2, 3))}, 1: {"w": jnp.ones((2, 3))}},
        "head": {"w": jnp.ones((4,))},
    }
    rows = [line.split() for line in parameter_table(params).splitlines()]
    assert ["blocks.*.w", "2x3", "2", "12"] in rows
    assert rows[-1] == ["total", "16"]


def test_format_table_aligns():
    assert (
        format_table(("name", "n"), [("a", "10"), ("long", "9")])
        == "name  n\n----  --\na     10\nlong   9"
    )


def test_tensorboard_is_optional(tmp_path):
    pytest.importorskip("tensorboardX", reason="TensorBoard files need the extra `log`")
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0})
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_log_that_is_no_file_is_set_aside(tmp_path, kind, capsys):
    path = tmp_path / "metrics.jsonl"
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is .*, not a regular file"):
        read_metrics(path)
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]
    assert "It is kept as metrics.jsonl.damaged" in capsys.readouterr().err


def test_lines_that_cannot_be_read_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = [b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": "1"}', b"\xff\xfe", b"7"]
    path.write_bytes(b"\n".join([*bad, b'{"step": 1, "loss": 1.0}', b'{"step": 2']))
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]
