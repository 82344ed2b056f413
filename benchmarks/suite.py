"""The goals in one command: rotary, attention, models forward, training steps, start-up, the most valuable first.

    python -m benchmarks suite --out benchmarks/results     on a GPU: in nine minutes
    python -m benchmarks suite --out DIR                    on a CPU: the short forms, ours beside what else is installed

Each benchmark is a process of its own and has a share of the time, of which what it leaves goes to those behind it. One that fails or takes
too long is ended, and the next one starts; what it has measured by then is kept: all write their results part by part, to
DIR/PART_gpu.json or DIR/PART_cpu.json, and what they print to a .log beside it. At the end: what was measured of each goal, how rope_jax
and other software compare, and what became of each part.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import jax

from benchmarks._goals import GOALS, Goal
from benchmarks._record import record, write
from benchmarks._timing import geometric_mean

GRACE_S = 5.0  # between asking a part to end and ending it
RESERVE_S = 10.0  # of a part's time, in which it writes what it has: what it is told of its limit is so much less


@dataclasses.dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        benchmark: its name.
        share: of the time, beside those of the others.
        on_gpu, on_cpu: its arguments; "{limit}" stands for the seconds that it may take.
    """

    benchmark: str
    share: float
    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()


_LIMIT = "--limit-s={limit}"
_FORWARD = (_LIMIT, "--programs", "forward", "--torch")
_TRAIN = (_LIMIT, "--programs", "train", "--torch", "--positions", "none", "rope_mixed")
# torch.compile takes much of the time, so only the forms that the goals ask for are there.
PARTS = {
    "rotary": Part("rotary", 100, (_LIMIT,), (_LIMIT, "--together", "16")),
    "attention": Part("attention", 120, (_LIMIT,), (_LIMIT,)),
    "forward": Part("models", 145, (*_FORWARD, "--implementations", "None", "jnp"), _FORWARD),
    "train": Part("models", 75, (*_TRAIN, "--models", "deit3_s16", "--implementations", "None", "jnp"), _TRAIN),
    "startup": Part("startup", 90, (_LIMIT,), (_LIMIT,)),
}


def command(part: Part, on_gpu: bool, seconds: float, out: pathlib.Path) -> list[str]:
    """The command of a part that may take so long."""
    arguments = [x.format(limit=max(1, int(seconds - RESERVE_S))) for x in (part.on_gpu if on_gpu else part.on_cpu)]
    return [sys.executable, "-m", "benchmarks", part.benchmark, *arguments, "--out", str(out)]


def run(command: list[str], seconds: float, log: pathlib.Path) -> str:
    """Runs a command with all that it starts, for so long at most: "ok", "out of time", or "failed" with its status."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:  # also when the suite itself is interrupted
            _end(process)
    return "ok" if status == 0 else f"failed (status {status})"


def _end(process: subprocess.Popen) -> None:
    """Ends a process and what it has started: asks, waits, and does not ask again."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def peers(result: dict) -> Iterator[tuple[str, str, str, float]]:
    """What was measured, the other form, ours, and how many times faster ours is: of each pair that does the same, over all sizes.

    Ours are the kernels, or on a machine that has none what rope_jax_kernels computes in plain jax.numpy.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for what, times in _timed(result):
        names = {form: form.partition("+")[0] for form in times}
        kernels = [form for form, name in names.items() if name in ("rope_jax", "triton", "mosaic")]
        ours = kernels or [form for form, name in names.items() if name == "xla"]
        for mine, other in itertools.product(ours, sorted(times.keys() - set(ours))):
            if mine.partition("+")[2] == other.partition("+")[2]:  # neither knows more of positions than the other
                found.setdefault((what, other, mine), []).append(times[other] / times[mine])
    for names, ratios in found.items():
        yield *names, geometric_mean(ratios)


def _timed(result: dict) -> Iterator[tuple[str, dict[str, float]]]:
    """What was measured, and the times of its forms, of a result of `rotary`, `attention` or `models`; of others nothing."""
    if result["benchmark"] == "models":
        forms: dict[str, dict[str, float]] = {}
        for row in result["rows"]:
            what = f"{row['model']} with {row['position']}, {row['program']}, {row['dtype']}, batch {row['batch']}"
            forms.setdefault(what, {})[row["implementation"] or row["software"]] = row["milliseconds"]
        yield from forms.items()
    elif result["benchmark"] in ("rotary", "attention"):
        for row in result["rows"]:
            for temperature, times in row["microseconds"].items():
                yield f"{row.get('model', 'rotation')} {row['direction']}, {temperature}", times
        for row in result.get("peers", []):
            yield f"rotation of q and k, {row['temperature']}", row["microseconds"]


def goal_line(goal: Goal, results: list[dict]) -> str:
    """What was measured of a goal, beside what it asks for."""
    found = next((x["goals"][goal.name]["value"] for x in results if goal.name in x.get("goals", {})), None)
    measured = "not measured" if found is None else f"{found:.2f}"
    return f"{goal.name:5}{measured:>13}  {goal.floor:20}{goal.goal:20}{goal.moonshot:20}{goal.what}"


def summary(parts: list[dict], results: list[dict]) -> str:
    """What became of the parts, the goals, and ours beside others."""
    lines = [f"{'part':12}{'seconds':>8}  what became of it"]
    lines += [f"{x['part']:12}{x['seconds']:8.0f}  {x['status']}" for x in parts]
    lines += ["", f"{'goal':5}{'measured':>13}  {'floor':20}{'goal':20}{'moonshot':20}what"]
    lines += [goal_line(goal, results) for goal in GOALS]
    if rows := [row for result in results for row in peers(result)]:
        lines += ["", "ours beside others, how many times faster:"]
        lines += [f"{ratio:8.2f}  {mine} than {other}: {what}" for what, other, mine, ratio in rows]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Runs the parts and prints what they found; ends with an error where a part left no result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for results and logs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts alone")
    parser.add_argument("--minutes", type=float, default=8.8, help="of all parts together")
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is for the parts
    platform = jax.default_backend()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    parts, results = [], []
    todo = [name for name in PARTS if name in args.only]
    for place, name in enumerate(todo):
        start, part = time.monotonic(), PARTS[name]
        seconds = (end - start) * part.share / sum(PARTS[other].share for other in todo[place:])
        out = args.out / f"{name}_{platform}.json"
        before = out.stat().st_mtime_ns if out.exists() else None
        print(f"{name}: at most {seconds:.0f} s", flush=True)
        status = run(command(part, platform == "gpu", seconds, out), seconds, out.with_suffix(".log"))
        written = out.exists() and out.stat().st_mtime_ns != before
        if written:
            results.append(json.loads(out.read_text()))
        else:
            status += f", no result: see {out.with_suffix('.log')}"
        parts.append({"part": name, "seconds": time.monotonic() - start, "status": status, "written": written})
        write(record("suite", {"only": args.only, "minutes": args.minutes}, parts=parts), args.out / f"suite_{platform}.json")
    print(summary(parts, results))
    if missing := [x["part"] for x in parts if not x["written"]]:
        sys.exit(f"no result of {', '.join(missing)}")
