"""All goals in one command: rotary, attention, models forward, training steps, start-up.

    python -m benchmarks suite --out benchmarks/results

Takes nine minutes on a GPU; on a CPU, short versions run. Each benchmark runs in its own process
with a share of the time; unused time goes to the remaining ones. A benchmark that fails or takes
too long is stopped, and the next one starts. Each saves its result as it goes, to DIR/PART_gpu.json
or DIR/PART_cpu.json, and its output to a .log file with the same name. The same command continues
what is not complete. At the end, the suite prints the goals, a comparison with other libraries, and
the status of each part.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax

from benchmarks._goals import geometric_mean, goal_table
from benchmarks._runner import Keep, Result, arguments_of, earlier, record, write
from rope_jax.text import format_table

GRACE_S = 5.0  # between SIGTERM and SIGKILL
RESERVE_S = 10.0  # seconds kept for saving the result after --limit-s


@dataclasses.dataclass(frozen=True)
class Part:
    """A benchmark that runs in its own process.

    Attributes:
        benchmark: name of the benchmark.
        share: share of the time, relative to those of the other parts.
        on_gpu: arguments on a GPU, besides --limit-s and --out.
        on_cpu: the same on a CPU.
    """

    benchmark: str
    share: float
    on_gpu: str = ""
    on_cpu: str = ""


_FORWARD = "--programs forward --torch"
_TRAIN = "--programs train --torch --positions none rope_mixed"
# torch.compile takes much of the time, so only the forms that the goals need are measured.
PARTS = {
    "rotary": Part("rotary", 100, "", "--together 16"),
    "attention": Part("attention", 120),
    "forward": Part("models", 145, f"{_FORWARD} --implementations None jnp", _FORWARD),
    "train": Part("models", 75, f"{_TRAIN} --models deit3_s16 --implementations None jnp", _TRAIN),
    "startup": Part("startup", 90),
}


def options(part: Part, platform: str) -> list[str]:
    """The arguments of a part besides --limit-s and --out."""
    return (part.on_gpu if platform == "gpu" else part.on_cpu).split()


def command(part: Part, platform: str, seconds: float, out: pathlib.Path) -> list[str]:
    """Returns the command of a part with a time limit."""
    limit = f"--limit-s={max(1, int(seconds - RESERVE_S))}"
    arguments = [limit, *options(part, platform), f"--out={out}"]
    return [sys.executable, "-m", "benchmarks", part.benchmark, *arguments]


def finished(name: str, platform: str, out: pathlib.Path) -> Result:
    """The complete result of the suite's own command for a part, in folder `out`; or {}."""
    part = PARTS[name]
    found = earlier(out / f"{name}_{platform}.json", part.benchmark, {})
    function = importlib.import_module(f"benchmarks.{part.benchmark}").run
    same = found.get("arguments") == arguments_of(function, options(part, platform))
    return found if same and found.get("left") == 0 else {}


def run_process(command: list[str], seconds: float, log: pathlib.Path) -> str:
    """Runs a command; returns "ok", "out of time" or "failed (status ...)"."""
    with log.open("w") as file, _exit_at_sigterm():
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:  # also when the suite itself is interrupted
            _end(process)
    return "ok" if status == 0 else f"failed (status {status})"


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit, so that processes in their own sessions end."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen) -> None:
    """Stops a process and its children: SIGTERM, a pause, SIGKILL."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def peers(result: Result) -> Iterator[tuple[str, str, str, float]]:
    """Speedups over other libraries: (problem, other form, our form, times faster), all sizes.

    Only forms with the same position information are compared. Our form is a kernel, or where there
    is none, rope_jax_kernels in plain jax.numpy.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for what, times in _timed(result):
        names = {form: form.partition("+")[0] for form in times}
        kernels = [form for form, name in names.items() if name in ("rope_jax", "triton", "mosaic")]
        ours = kernels or [form for form, name in names.items() if name == "xla"]
        for mine, other in itertools.product(ours, sorted(times.keys() - set(ours))):
            if mine.partition("+")[2] == other.partition("+")[2]:
                found.setdefault((what, other, mine), []).append(times[other] / times[mine])
    for names, ratios in found.items():
        yield *names, geometric_mean(ratios)


def _timed(result: Result) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (problem, times by form) from a result of rotary, attention or models."""
    if result["benchmark"] == "models":
        forms: dict[str, dict[str, float]] = {}
        for row in result["rows"]:
            about = f"{row['program']}, {row['dtype']}, batch {row['batch']}"
            times = forms.setdefault(f"{row['model']} with {row['position']}, {about}", {})
            times[row["implementation"] or row["software"]] = row["milliseconds"]
        yield from forms.items()
    elif result["benchmark"] in ("rotary", "attention"):
        for row in result["rows"]:
            for temperature, times in row["microseconds"].items():
                yield f"{row.get('model', 'rotation')} {row['direction']}, {temperature}", times
        for row in result.get("peers", []):
            if result["benchmark"] == "rotary":
                yield f"rotation of q and k, {row['temperature']}", row["microseconds"]
            else:
                what = f"{row['model']} {row['pattern']}, without position"
                yield what, row["microseconds"]["cold"]


def summary(parts: list[dict[str, Any]], results: list[Result]) -> str:
    """Status of the parts, goals and comparison with other libraries, for the terminal."""
    rows = [(x["part"], f"{x['seconds']:.0f}", x["status"]) for x in parts]
    lines = [format_table(("part", "seconds", "status"), rows), ""]
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        found = result.get("goals", {}) | found
    lines.append(goal_table(found, "KAMTS"))
    compared = [
        (f"{ratio:.2f}", mine, other, what)
        for result in results
        for what, other, mine, ratio in peers(result)
    ]
    if compared:
        lines += ["", format_table(("times faster", "ours", "other", "problem"), compared)]
    return "\n".join(lines)


_ALL_PARTS = list(PARTS)


def run(
    keep: Keep,
    *,
    out: pathlib.Path,
    only: list[Literal[*PARTS]] = _ALL_PARTS,
    minutes: float = 8.8,
) -> None:
    """Runs the parts and prints their results; fails if a part has no result.

    Args:
        keep: unused, because `out` is a folder.
        out: folder for results and logs.
        only: parts to run
        minutes: time limit of all parts together
    """
    if out is None:
        raise SystemExit("--out must name a folder for results and logs")
    platform = jax.default_backend()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    complete = {name: finished(name, platform, out) for name in PARTS if name in only}
    todo = [name for name, found in complete.items() if not found]
    results = [found for found in complete.values() if found]
    status = {"seconds": 0.0, "status": "complete", "written": True}
    parts = [{"part": name} | status for name, found in complete.items() if found]
    for place, name in enumerate(todo):
        start, part = time.monotonic(), PARTS[name]
        seconds = (end - start) * part.share / sum(PARTS[other].share for other in todo[place:])
        file = out / f"{name}_{platform}.json"
        log = file.with_suffix(".log")
        before = file.stat().st_mtime_ns if file.exists() else None
        print(f"{name}: at most {seconds:.0f} s", flush=True)
        status = run_process(command(part, platform, seconds, file), seconds, log)
        written = file.exists() and file.stat().st_mtime_ns != before
        if written:
            results.append(json.loads(file.read_text()))
            status += f", {results[-1]['left']} left" if results[-1].get("left") else ""
        else:
            status += f", no result: see {log}"
        seconds = time.monotonic() - start
        parts.append({"part": name, "seconds": seconds, "status": status, "written": written})
        suite = record("suite", {"only": only, "minutes": minutes}, parts=parts)
        write(suite, out / f"suite_{platform}.json")
    print(summary(parts, results))
    if missing := [x["part"] for x in parts if not x["written"]]:
        sys.exit(f"no result of {', '.join(missing)}")
