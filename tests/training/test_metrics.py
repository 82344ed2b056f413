import jax.numpy as jnp
import pytest

from rope_jax import metrics
from rope_jax.metrics import MetricsWriter, Progress, format_table, parameter_table, progress_line, read_metrics


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


def test_speed_and_remaining_time(monkeypatch):
    now = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    progress = Progress(total_steps=21, batch_size=8)
    assert progress.at(1) == {}  # the first step pays for compilation
    assert progress.at(5) == {"images_per_second": 16.0, "eta_seconds": 8.0}
    assert progress.at(9) == {"images_per_second": 16.0, "eta_seconds": 6.0}


def test_progress_line():
    values = {"loss": 1.5, "accuracy": 0.25, "learning_rate": 1e-3, "images_per_second": 1234.5, "eta_seconds": 61.0}
    assert progress_line(7, 100, values) == "step   7/100  loss 1.5000  accuracy 0.250  lr 1.00e-03  1,234 images/s, 1:01 left"


def test_parameter_table_joins_blocks_and_counts():
    params = {"blocks": {0: {"w": jnp.ones((2, 3))}, 1: {"w": jnp.ones((2, 3))}}, "head": {"w": jnp.ones((4,))}}
    rows = [line.split() for line in parameter_table(params).splitlines()]
    assert ["blocks.*.w", "2x3", "2", "12"] in rows
    assert rows[-1] == ["total", "16"]


def test_format_table_aligns():
    assert format_table(("name", "n"), [("a", "10"), ("long", "9")]) == "name  n\n----  --\na     10\nlong   9"


def test_tensorboard_is_optional(tmp_path):
    pytest.importorskip("tensorboardX", reason="TensorBoard files need the extra `log`")
    with MetricsWriter(tmp_path, restored_step=0, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0})
    assert list((tmp_path / "tensorboard").iterdir())
