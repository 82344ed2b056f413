"""What a run says of itself: metrics and events as JSON lines (and TensorBoard), speed and remaining time, profiles, tables."""

import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rope_jax.workdir import SaveFailed, warn, write_file


class MetricsWriter:
    """Appends to `metrics.jsonl`, one JSON object a line, each in a single write; a context manager.

    A line holds `step` and either numbers by name, or `event` (what happened: "start", "saved", "skipped", "profile", "stop") and what is
    known about it. Of several processes only the first one writes.
    """

    def __init__(self, workdir: pathlib.Path, *, restored_step: int, tensorboard: bool):
        """Opens the file; lines of steps after `restored_step`, and what a crash has torn, are dropped: the steps will come again."""
        self._path = workdir / "metrics.jsonl"
        self._file = self._board = self.last_event = None
        self._torn = False  # whether the last line ends in its midst
        if jax.process_index() > 0:
            return
        lines = _read_lines(self._path)
        self.last_event = next((line for line in reversed(lines) if line.get("event") in ("start", "stop")), None)
        kept = [line for line in lines if line["step"] <= restored_step]
        write_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=restored_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of one step."""
        self._append({"step": step} | values)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def event(self, step: int, event: str, **about: Any) -> None:
        """Writes that something happened. A disk that is full costs this line, not the run."""
        try:
            self._append({"step": step, "event": event} | about)
        except SaveFailed as error:
            warn(f"WARNING: {error}")

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = ("\n" * self._torn + json.dumps(line) + "\n").encode()
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise SaveFailed(f"{self._path} could not be written: {error.strerror}") from error
        self._torn = written != len(data)
        if self._torn:
            raise SaveFailed(f"{self._path} could not be written: only {written} of {len(data)} bytes of a line fit on the disk")


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of numbers of a `metrics.jsonl`; none when there is no file. What a crash has torn is not counted."""
    return [line for line in _read_lines(path) if "event" not in line]


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a `metrics.jsonl`: when the run started, saved and stopped, and why."""
    return [line for line in _read_lines(path) if "event" in line]


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class Progress:
    """Speed and remaining time, measured since the first step that this process finished (which pays for compilation)."""

    def __init__(self, *, total_steps: int, batch_size: int):
        self._total, self._batch_size = total_steps, batch_size
        self._first: tuple[int, float] | None = None
        self._mark: tuple[int, float] = (0, 0.0)  # where the stretch begins that is compared with the best one
        self._waited = 0.0  # since then
        self._best = 0.0  # steps per second

    def waited(self, seconds: float) -> None:
        """Notes for how long the loop has waited for a batch."""
        self._waited += seconds

    def at(self, step: int) -> dict[str, float]:
        """Returns the speed at a step that has just finished, as numbers for `metrics.jsonl`; nothing for the first one.

        `images_per_second` and `eta_seconds` are of the whole process. Of the last second or more: `step_seconds`; `data_wait`, the share
        of the time in which the loop waited for batches; and `of_best`, the speed as a share of the best that there was.
        `device_memory_bytes` is the most that a device has held, where the devices tell.
        """
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:
            if self._first is None:
                self._first = self._mark = (step, now)
                self._waited = 0.0
            return {}
        rate = (step - self._first[0]) / max(now - self._first[1], 1e-9)
        values = {"images_per_second": rate * self._batch_size, "eta_seconds": (self._total - step) / rate}
        steps, seconds = step - self._mark[0], max(now - self._mark[1], 1e-9)
        values |= {"step_seconds": seconds / steps, "data_wait": min(self._waited / seconds, 1.0)}
        if seconds >= 1:  # shorter stretches tell more of chance than of speed
            self._best = max(self._best, steps / seconds)
            values["of_best"] = steps / seconds / self._best
            self._mark, self._waited = (step, now), 0.0
        if memory := jax.local_devices()[0].memory_stats():
            values["device_memory_bytes"] = memory.get("peak_bytes_in_use", memory.get("bytes_in_use", 0))
        return values


class Profiler:
    """Records a few steps with jax's profiler into `workdir/profile/`, to be looked at with xprof or Perfetto."""

    STEPS = 5

    def __init__(self, workdir: pathlib.Path):
        self._folder, self._until = workdir / "profile", None

    def start(self, step: int) -> bool:
        """Starts to record at a step; False when it is recording already."""
        if self._until is not None:
            return False
        jax.profiler.start_trace(str(self._folder))
        self._until = step + self.STEPS
        return True

    def after(self, step: int, outputs: Any) -> str | None:
        """To be called after each step with what it computes; the folder, once the recording is complete."""
        if self._until is None or step + 1 < self._until:
            return None
        jax.block_until_ready(outputs)
        return self.close()

    def close(self) -> str | None:
        """Ends a recording; its folder, if there was one."""
        if self._until is None:
            return None
        jax.profiler.stop_trace()
        self._until = None
        return str(self._folder)


def progress_line(step: int, total: int, values: dict[str, float]) -> str:
    """One line for a person: step, loss, accuracy, learning rate, speed, remaining time, and what slows it down, if anything does."""
    spread = f" +- {values['loss_std']:.4f}" if "loss_std" in values else ""
    parts = [f"step {step:>{len(str(total))}}/{total}", f"loss {values['loss']:.4f}{spread}", f"accuracy {values['accuracy']:.3f}"]
    parts.append(f"lr {values['learning_rate']:.2e}")
    if "images_per_second" in values:
        minutes, seconds = divmod(round(values["eta_seconds"]), 60)
        left = f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        parts.append(f"{values['images_per_second']:,.0f} images/s, {left} left")
    if values.get("of_best", 1.0) < 0.8:
        parts.append(f"{values['of_best']:.0%} of its best speed")
    if values.get("data_wait", 0.0) > 0.1:
        parts.append(f"{values['data_wait']:.0%} waiting for data")
    if "device_memory_bytes" in values:
        parts.append(f"{values['device_memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join(parts)


def parameter_table(params: Any) -> str:
    """Parameters by module: name, shape of each array, count. Blocks of equal shapes are one row."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [str(key.key) for key in path]
        name = ".".join("*" if key.isdigit() else key for key in keys)
        groups.setdefault((name, "x".join(map(str, leaf.shape))), []).append(int(np.prod(leaf.shape)))
    rows = [(name, shape, f"{len(sizes)}", f"{sum(sizes):,}") for (name, shape), sizes in groups.items()]
    total = sum(sum(sizes) for sizes in groups.values())
    return format_table(("parameter", "shape", "times", "count"), [*rows, ("total", "", "", f"{total:,}")])


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table with aligned columns, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    align = lambda cell, width: cell.rjust(width) if cell[:1].isdigit() or cell[:1] == "-" else cell.ljust(width)
    line = lambda row: "  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
