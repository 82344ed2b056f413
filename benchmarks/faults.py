"""What training survives: kills at random instants, damaged checkpoints, signals in every phase. Figures, and an error where work was lost.

Runs of the digits recipe on a small model, as a user would start them. Every run that was interrupted must end in the state, bit for bit,
and with the losses, of one that was not. Twenty minutes on two busy CPU cores: `make test-faults`.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks._record import record, write
from rope_jax import train
from rope_jax.checkpoint import Checkpoints, tree_hash
from rope_jax.config import from_json
from rope_jax.metrics import read_events, read_metrics

EVERY = 8  # steps between checkpoints
RECIPE = "configs/digits.py:position=rope_mixed,epochs=6"
SETTINGS = [
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.batch_size=120",
    "--config.ema_decay=0.9",
    "--config.eval.resolutions=((4, 6),)",
    "--config.eval.batch_size=30",
    "--config.log_every=1",
    f"--config.checkpoint_every={EVERY}",
]
DAMAGES = ("flip", "truncate", "zero", "delete")
PHASES = ("import", "compile", "step", "save", "evaluation")
# Runs the command with a mark on the standard output where a phase begins, and a moment's rest there so that the signal meets it.
_MARKED = """
import sys, time
from rope_jax import checkpoint, data, main, train
def mark(phase, rest):
    print(f"phase {phase}", flush=True)
    time.sleep(rest)
def make_step(run, original=train.make_step):
    mark("compile", 0)
    return original(run)
def write(*args, original=checkpoint.Checkpoints._write, **options):
    mark("save", 0.5)
    return original(*args, **options)
def evaluation_batches(*args, original=data.evaluation_batches, **options):
    for batch in original(*args, **options):
        mark("evaluation", 0.1)
        yield batch
train.make_step, checkpoint.Checkpoints._write, data.evaluation_batches = make_step, write, evaluation_batches
main.app.run(main._main, flags_parser=main._parse_flags)
"""


def start(workdir: pathlib.Path, log: pathlib.Path, cache: pathlib.Path, *, marked: bool = False, zone: str = "UTC") -> subprocess.Popen:
    """Starts the run in a process of its own, with its output in a file and compiled programs in a cache."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TZ": zone,
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, *(["-c", _MARKED] if marked else ["-m", "rope_jax.main"]), f"--config={RECIPE}", f"--workdir={workdir}"]
    with log.open("w") as file:
        return subprocess.Popen([*command, *SETTINGS], env=environment, stdout=file, stderr=subprocess.STDOUT)


def complete(workdir: pathlib.Path, log: pathlib.Path, cache: pathlib.Path) -> tuple[float, float]:
    """Runs to the end; returns the seconds until the first step and from there on."""
    begun = time.monotonic()
    process = start(workdir, log, cache)
    first = _wait_for("\nstep ", process, log) - begun
    status = process.wait(timeout=600)
    if status != 0:
        raise RuntimeError(f"exit status {status}:\n{log.read_text()[-2000:]}")
    return first, time.monotonic() - begun - first


def _wait_for(mark: str, process: subprocess.Popen, log: pathlib.Path) -> float:
    """Returns the time when a mark stands in the output, or the process has ended."""
    while mark not in "\n" + log.read_text() and process.poll() is None:
        time.sleep(0.01)
    return time.monotonic()


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
    """What two runs must share: the hash of the last state, the losses, and the rows of the evaluation."""
    run, model = train.prepare(from_json((workdir / "config.json").read_text()))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        state = train.load_newest(run, model, checkpoints, workdir, strict=True)
    lines = read_metrics(workdir / "metrics.jsonl")
    results = json.loads((workdir / "results.json").read_text())
    return {"state": tree_hash(state), "losses": [(line["step"], line["loss"]) for line in lines], "results": results}


def expect(condition: bool, message: str) -> None:
    """Raises when something was lost."""
    if not condition:
        raise AssertionError(message)


def durable(workdir: pathlib.Path) -> int:
    """The newest step on disk that verifies, 0 for none; refuses a folder in which anything is damaged."""
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        return 0
    with Checkpoints(folder) as checkpoints:
        return checkpoints.newest_verified(strict=True) or 0


def kills(
    count: int, reference: dict, seconds: tuple[float, float], rng: np.random.Generator, folder: pathlib.Path, cache: pathlib.Path
) -> dict:
    """Kills runs at random instants until there were `count` kills, resuming each until it is complete.

    Args:
        count: of SIGKILLs.
        reference: the outcome of the run that was not interrupted.
        seconds: how long that took until its first step, and from there on. A kill comes after U(0, all of it) of a process, or as often
            after U(0, the second part) from its first step on.
        rng: of the instants.
        folder: for workdirs.
        cache: of compiled programs.
    """
    phases, lost, completed = collections.Counter(), [], 0
    killed, workdir, log = 0, folder / "killed", folder / "killed.log"
    while killed < count or workdir.exists() or not completed:
        process = start(workdir, log, cache, zone=str(rng.choice(["UTC", "Asia/Kathmandu", "America/St_Johns"])))
        instant = rng.uniform(0, sum(seconds))
        if rng.random() < 0.5:
            _wait_for("\nstep ", process, log)
            instant = rng.uniform(0, seconds[1])
        try:
            process.wait(timeout=instant if killed < count else 600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said = log.read_text()
        if process.returncode == -signal.SIGKILL:
            killed += 1
            reported = max(map(int, re.findall(r"^(?:saved|found) step (\d+)", said, re.MULTILINE)), default=0)
            on_disk, lines = durable(workdir), read_metrics(workdir / "metrics.jsonl")
            expect(on_disk >= reported, f"step {reported} was reported as saved, but step {on_disk} is what is there")
            lost.append(max((line["step"] for line in lines), default=0) - on_disk)
            phases[_phase(said)] += 1
            print(f"kill {killed}: {_phase(said)}, step {on_disk} on disk, {lost[-1]} steps to repeat", flush=True)
            continue
        expect(process.returncode == 0, f"exit status {process.returncode}:\n{said[-2000:]}")
        expect(outcome(workdir) == reference, f"{workdir} did not end where the uninterrupted run did")
        completed += 1
        shutil.rmtree(workdir)
    return {
        "kills": killed,
        "by_phase": dict(phases),
        "runs_completed": completed,
        "bit_identical": completed,
        "reported_as_saved_and_lost": 0,
        "most_steps_repeated": max(lost, default=0),
        "checkpoint_every": EVERY,
    }


def _phase(said: str) -> str:
    """What a process was about when it was killed, by what it had said."""
    marks = [("saved step 72", "evaluation"), ("\nstep ", "training"), ("total  ", "compilation"), ("found step", "compilation")]
    return next((phase for mark, phase in marks if mark in "\n" + said), "import")


def damage(path: pathlib.Path, kind: str, rng: np.random.Generator) -> bool:
    """Flips one bit of a file, cuts it short, fills it with zeros, or deletes it; False where that would change nothing."""
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
        return True
    if not any(content):
        return False
    if kind == "flip":
        place = int(rng.integers(8 * len(content)))
        content[place // 8] ^= 1 << place % 8
    elif kind == "truncate":
        content = content[: int(rng.integers(len(content)))]
    else:
        content = bytes(len(content))
    path.write_bytes(content)
    return True


def corruptions(count: int, workdir: pathlib.Path, rng: np.random.Generator, folder: pathlib.Path) -> dict:
    """Damages one file of the newest checkpoint, `count` times: each must be seen, and the step before it restored."""
    run, model = train.prepare(from_json((workdir / "config.json").read_text()))
    steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    newest, older = str(steps[-1]), str(steps[-2])
    with tempfile.TemporaryDirectory(dir=folder) as copied:
        shutil.copytree(workdir / "checkpoints" / older, pathlib.Path(copied) / "checkpoints" / older)
        with Checkpoints(pathlib.Path(copied) / "checkpoints") as checkpoints:
            expected = tree_hash(train.load_newest(run, model, checkpoints, pathlib.Path(copied), strict=True))
    checkpoint = workdir / "checkpoints" / newest
    files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    done: collections.Counter = collections.Counter()
    while done.total() < count:
        with tempfile.TemporaryDirectory(dir=folder) as copied:
            target = pathlib.Path(copied) / "checkpoints"
            shutil.copytree(workdir / "checkpoints", target)
            name, kind = str(rng.choice(files)), str(rng.choice(DAMAGES))
            if not damage(target / newest / name, kind, rng):
                continue
            with Checkpoints(target) as checkpoints, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                state = train.load_newest(run, model, checkpoints, pathlib.Path(copied), rename=True)
            expect(int(state["step"]) == int(older), f"{kind} of {name} was not seen")
            expect(tree_hash(state) == expected, f"after {kind} of {name} another state was restored")
            expect((target / f"{newest}.corrupt").is_dir(), f"after {kind} of {name} the damaged step is gone")
            done[kind] += 1
    return {"corruptions": count, "by_kind": dict(done), "files": len(files), "detected": count, "fell_back": count, "silent": 0}


def signals(phases: Iterable[str], reference: dict, folder: pathlib.Path, cache: pathlib.Path) -> list[dict]:
    """Sends SIGTERM in each phase: what was logged must be on disk soon after, and the resumed run end where it should."""
    rows = []
    for phase in phases:
        workdir, log = folder / f"signal-{phase}", folder / f"signal-{phase}.log"
        process = start(workdir, log, cache, marked=True)
        mark = {"import": "", "step": "\nstep 20/"}.get(phase, f"phase {phase}")
        if phase == "import":
            time.sleep(0.5)
        sent = _wait_for(mark, process, log)
        expect(process.poll() is None, f"the run ended before its {phase}:\n{log.read_text()[-2000:]}")
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=120)
        seconds = time.monotonic() - sent
        logged = max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)
        on_disk = durable(workdir)
        expect(on_disk >= logged, f"SIGTERM in {phase}: step {logged} was logged, but step {on_disk} is on disk\n{log.read_text()}")
        expect(status in ((0,) if on_disk else (-signal.SIGTERM, 128 + signal.SIGTERM)), f"SIGTERM in {phase}: exit status {status}")
        events = [event for event in read_events(workdir / "metrics.jsonl") if event["event"] == "stop"]
        complete(workdir, log, cache)
        expect(outcome(workdir) == reference, f"after SIGTERM in {phase} the run did not end where the uninterrupted one did")
        rows.append({"phase": phase, "exit_status": status, "seconds_to_exit": round(seconds, 2), "logged": logged, "on_disk": on_disk})
        print(rows[-1], [event["why"] for event in events], flush=True)
    return rows


def main(argv: list[str]) -> None:
    """Runs all three and writes their figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--corruptions", type=int, default=200)
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=PHASES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    rng, begun = np.random.default_rng(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cache = folder / "xla"
        for workdir in ("first", "reference"):  # the first one compiles
            seconds = complete(folder / workdir, folder / "log", cache)
        reference = outcome(folder / "reference")
        expect(outcome(folder / "first") == reference, "two runs of the same config differ")
        figures = {
            "cores": sorted(os.sched_getaffinity(0)),
            "seconds_uninterrupted": [round(part, 2) for part in seconds],
            "state": reference["state"],
            "signals": signals(args.phases, reference, folder, cache),
            "corruptions": corruptions(args.corruptions, folder / "reference", rng, folder),
            "kills": kills(args.kills, reference, seconds, rng, folder, cache),
        }
    figures["seconds"] = round(time.monotonic() - begun)
    print(json.dumps({name: value for name, value in figures.items() if name != "cores"}, indent=1))
    write(record("faults", vars(args), **figures), args.out)
