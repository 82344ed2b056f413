"""What a run says of itself: metrics as JSON lines (and TensorBoard), progress with speed and remaining time, tables."""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def write_file(path: pathlib.Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


class MetricsWriter:
    """Appends metrics to `metrics.jsonl`, one JSON object a line, each written at once; a context manager."""

    def __init__(self, workdir: pathlib.Path, *, restored_step: int, tensorboard: bool):
        """Opens the file; lines of steps after `restored_step`, and a line torn by a crash, are dropped: they will come again."""
        self._path = workdir / "metrics.jsonl"
        kept = [json.dumps(line) + "\n" for line in read_metrics(self._path) if line["step"] <= restored_step]
        write_file(self._path, "".join(kept))
        self._file = self._path.open("a", buffering=1)
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=restored_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of one step."""
        self._file.write(json.dumps({"step": step} | values) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; none when there is no file. A last line without its end is not counted."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


class Progress:
    """Speed and remaining time, measured since the first step that this process finished (which pays for compilation)."""

    def __init__(self, *, total_steps: int, batch_size: int):
        self._total, self._batch_size = total_steps, batch_size
        self._first: tuple[int, float] | None = None

    def at(self, step: int) -> dict[str, float]:
        """Returns images per second and the remaining seconds, for a step that has just finished; nothing for the first one."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = self._first or (step, now)
            return {}
        rate = (step - self._first[0]) / max(now - self._first[1], 1e-9)
        return {"images_per_second": rate * self._batch_size, "eta_seconds": (self._total - step) / rate}


def progress_line(step: int, total: int, values: dict[str, float]) -> str:
    """One line for a person: step, loss, accuracy, learning rate, speed, remaining time."""
    parts = [f"step {step:>{len(str(total))}}/{total}", f"loss {values['loss']:.4f}", f"accuracy {values['accuracy']:.3f}"]
    parts.append(f"lr {values['learning_rate']:.2e}")
    if "images_per_second" in values:
        minutes, seconds = divmod(round(values["eta_seconds"]), 60)
        parts.append(f"{values['images_per_second']:,.0f} images/s, {minutes}:{seconds:02d} left")
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
