"""Metrics and events of a run as JSON lines (and TensorBoard); speed, profiles, tables."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from rope_jax.data.images.decode import decode_image
from rope_jax.names.text import format_table
from rope_jax.system.files import open_regular, warn, write_file


class MetricsWriter:
    """Appends to `metrics.jsonl`, one JSON object per line, each in a single write.

    A line holds `step`, and metrics by name or an `event` ("start", "saved", "skipped",
    "profile", "stop") with its details. With several processes only the first writes.
    """

    def __init__(self, workdir: pathlib.Path, *, restored_step: int, tensorboard: bool):
        """Opens the file and drops torn lines and those after `restored_step`."""
        self._file = self._board = self.last_event = None
        if jax.process_index() > 0:
            return
        path = workdir / "metrics.jsonl"
        lines = _read_lines(path)
        self.last_event = next(
            (line for line in reversed(lines) if line.get("event") in ("start", "stop")), None
        )
        kept = [line for line in lines if line["step"] <= restored_step]
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("ab", buffering=1 << 20)  # keeps lines that a full disk rejects
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=restored_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of lines that a warning has named
                self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of one step."""
        self._append({"step": step} | values)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def event(self, step: int, event: str, **details: Any) -> None:
        """Writes an event."""
        self._append({"step": step, "event": event} | details)

    def _append(self, line: dict[str, Any]) -> None:
        """Writes a line. If the disk is full, it is written with one of the next lines."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            warn(f"WARNING: {self._file.name} could not be written: {error.strerror}")


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics in a `metrics.jsonl`; none without the file. Damaged lines are skipped.

    Raises:
        ValueError: it is not a regular file.
    """
    return [line for line in _read_lines(path) if "event" not in line]


def seed_metrics(line: dict[str, Any], seed: int) -> dict[str, Any]:
    """The metrics of one seed in a line of a run of several, as a run of this seed writes them."""
    suffix = f"_seed{seed}"  # these take the places of the means, which come first
    return {
        name.removesuffix(suffix): value
        for name, value in line.items()
        if name.endswith(suffix) or ("_seed" not in name and name != "loss_std")
    }


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a `metrics.jsonl`: starts, saves, skipped steps, profiles, stops."""
    return [line for line in _read_lines(path) if "event" in line]


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    lines = []
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        for text in file:
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text))
    return [x for x in lines if isinstance(x, dict) and isinstance(x.get("step"), int)]


class Speedometer:
    """Speed and remaining time since the first step of this process (which compiles)."""

    def __init__(self, total_steps: int, batch_size: int):
        self._total, self._batch_size = total_steps, batch_size
        self._first: tuple[int, float] | None = None  # step and time
        self._mark = (0, 0.0)  # start of the current interval
        self._waited = 0.0  # for batches, since the mark
        self._best = 0.0  # steps per second of the fastest interval

    def add_wait(self, seconds: float) -> None:
        """Adds time spent waiting for a batch."""
        self._waited += seconds

    def at(self, step: int) -> dict[str, float]:
        """The speed at a step that has just finished; empty for the first one.

        Returns:
            `images_per_second` and `eta_seconds` over the whole process. Over the last second or
            more: `step_seconds`; `data_wait`, the fraction of time spent waiting for batches; and
            `of_best`, the speed relative to the fastest interval. `device_memory_bytes` is the
            peak, if devices report it.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = self._mark = (step, now)
            self._waited = 0.0
        if step <= self._first[0]:
            return {}
        rate = (step - self._first[0]) / max(now - self._first[1], 1e-9)
        steps, seconds = step - self._mark[0], max(now - self._mark[1], 1e-9)
        values = {
            "images_per_second": rate * self._batch_size,
            "eta_seconds": (self._total - step) / rate,
            "step_seconds": seconds / steps,
            "data_wait": min(self._waited / seconds, 1.0),
        }
        if seconds >= 1:  # the speed of shorter intervals is mostly noise
            self._best = max(self._best, steps / seconds)
            values["of_best"] = steps / seconds / self._best
            self._mark, self._waited = (step, now), 0.0
        if memory := jax.local_devices()[0].memory_stats():
            peak = memory.get("peak_bytes_in_use", memory.get("bytes_in_use", 0))
            values["device_memory_bytes"] = peak
        return values


class Profiler:
    """Records a few steps with jax's profiler into `workdir/profile/`, for xprof or Perfetto."""

    STEPS = 5

    def __init__(self, workdir: pathlib.Path):
        self._folder, self._until = workdir / "profile", None

    def start(self, step: int) -> None:
        """Starts recording, unless it is recording already."""
        if self._until is None:
            jax.profiler.start_trace(str(self._folder))
            self._until = step + self.STEPS

    def after(self, step: int, outputs: Any) -> str | None:
        """Call after each step with its outputs; returns the folder of a complete profile."""
        if self._until is None or step + 1 < self._until:
            return None
        jax.block_until_ready(outputs)
        return self.close()

    def close(self) -> str | None:
        """Ends a recording; returns its folder, if there was one."""
        if self._until is None:
            return None
        jax.profiler.stop_trace()
        self._until = None
        return str(self._folder)


def write_board(
    workdir: pathlib.Path,
    step: int,
    *,
    numbers: Mapping[str, float],
    pictures: Iterable[pathlib.Path],
) -> None:
    """Adds results and pictures of a step to the TensorBoard files of a run.

    Args:
        workdir: of the run.
        step: to which they belong.
        numbers: by name; TensorBoard allows letters, digits and -_./, others become underscores.
        pictures: files, whose stems are their names.
    """
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(workdir / "tensorboard")) as board:
        for name, number in numbers.items():
            board.add_scalar(name, number, step)
        for path in pictures:
            board.add_image(path.stem, decode_image(path.read_bytes()), step, dataformats="HWC")


def progress_line(step: int, total: int, values: dict[str, float]) -> str:
    """One line: step, loss, accuracy, learning rate, speed, remaining time, slowdowns."""
    spread = f" +- {values['loss_std']:.4f}" if "loss_std" in values else ""
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"loss {values['loss']:.4f}{spread}",
        f"accuracy {values['accuracy']:.3f}",
        f"lr {values['learning_rate']:.2e}",
    ]
    if "images_per_second" in values:
        minutes, seconds = divmod(round(values["eta_seconds"]), 60)
        remaining = (
            f"{minutes}:{seconds:02d}"
            if minutes < 60
            else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        )
        parts.append(f"{values['images_per_second']:,.0f} images/s, {remaining} left")
    if values.get("of_best", 1.0) < 0.8:
        parts.append(f"{values['of_best']:.0%} of its best speed")
    if values.get("data_wait", 0.0) > 0.1:
        parts.append(f"{values['data_wait']:.0%} waiting for data")
    if "device_memory_bytes" in values:
        parts.append(f"{values['device_memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join(parts)


def parameter_table(params: Any) -> str:
    """Shape and count of each parameter; blocks of equal shapes share a row."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [str(key.key) for key in path]
        name = ".".join("*" if key.isdigit() else key for key in keys)
        groups.setdefault((name, "x".join(map(str, leaf.shape))), []).append(
            int(np.prod(leaf.shape))
        )
    rows = [
        (name, shape, f"{len(sizes)}", f"{sum(sizes):,}") for (name, shape), sizes in groups.items()
    ]
    total = sum(sum(sizes) for sizes in groups.values())
    return format_table(
        ("parameter", "shape", "times", "count"), [*rows, ("total", "", "", f"{total:,}")]
    )
