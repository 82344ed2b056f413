"""What training survives: kills at random instants, damaged checkpoints, signals in every phase. Figures, and an error where work was lost.

Runs of the digits recipe on a small model. Every run that was interrupted must end in the state, bit for bit, and with the losses, of one
that was not. Five minutes on two CPU cores that do little else: `make test-faults`.
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

from benchmarks._processes import Run
from benchmarks._record import record, write
from rope_jax import checkpoint, data, train
from rope_jax.checkpoint import Checkpoints, tree_hash
from rope_jax.config import from_json
from rope_jax.metrics import read_events, read_metrics

EVERY = 8  # steps between checkpoints
STEPS = 36
SETTINGS = [
    "--config=configs/digits.py:position=rope_mixed,epochs=3",
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
# What a run says when a phase begins in which it may be killed.
BEGINNINGS = {
    "compilation": ("\nparameter ", "\nfound step "),
    "training": ("\nstep ",),
    "evaluation": (f"\nsaved step {STEPS}:", "training is complete"),
}


def start(workdir: pathlib.Path, log: pathlib.Path, **options: Any) -> Run:
    """Starts the run, with what it says in a file."""
    return Run([*SETTINGS, f"--workdir={workdir}"], log, **options)


def complete(workdir: pathlib.Path, log: pathlib.Path) -> dict[str, float]:
    """Runs to the end; returns the seconds of each phase."""
    run = start(workdir, log)
    times = [run.wait_for(*marks) for marks in BEGINNINGS.values()]
    status = run.wait(600)
    if status != 0:
        raise RuntimeError(f"exit status {status}: {run.said()[-2000:]}")
    times.append(time.monotonic())
    return {phase: end - begin for phase, begin, end in zip(BEGINNINGS, times, times[1:], strict=False)}


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


def kills(count: int, reference: dict, seconds: dict[str, float], rng: np.random.Generator, folder: pathlib.Path) -> dict:
    """Kills runs at random instants until there were `count` kills, resuming each until it is complete.

    Args:
        count: of SIGKILLs.
        reference: the outcome of the run that was not interrupted.
        seconds: how long each of its phases took. All phases are met equally often, each at instants that are uniform in it (at its end
            where it ends before).
        rng: of the instants.
        folder: for workdirs.
    """
    zones = ["UTC", "Asia/Kathmandu", "America/St_Johns"]
    met, repeated, completed = collections.Counter(), [], 0
    killed, workdir, log, phases, seconds = 0, folder / "killed", folder / "killed.log", [], dict(seconds)
    while killed < count or workdir.exists() or not completed:
        phases = phases or [str(phase) for phase in rng.permutation(list(seconds))]
        run = start(workdir, log, environment={"TZ": str(rng.choice(zones))})
        if killed < count:
            begun = run.wait_for(*BEGINNINGS[phases[-1]])
            with contextlib.suppress(TimeoutError):
                ended = run.wait_for(*_ends(phases[-1]), seconds=rng.uniform(0, seconds[phases[-1]]))
                if run.has_said(*BEGINNINGS[phases[-1]]):
                    seconds[phases[-1]] = ended - begun  # faster than the run that was measured
        else:
            run.wait(600)
        run.kill()
        if run.returncode == -signal.SIGKILL:
            killed += 1
            phases.pop()
            reported = max(map(int, re.findall(r"^(?:saved|found) step (\d+)", run.said(), re.MULTILINE)), default=0)
            met[phase := _phase(run, workdir)] += 1
            on_disk, lines = durable(workdir), read_metrics(workdir / "metrics.jsonl")
            expect(on_disk >= reported, f"step {reported} was reported as saved, but step {on_disk} is what is there")
            repeated.append(max((line["step"] for line in lines), default=0) - on_disk)
            # One interval, and what was computed while its checkpoint was being written, which is at most one more.
            expect(repeated[-1] <= 2 * EVERY, f"{repeated[-1]} steps are to be repeated, with a checkpoint every {EVERY} steps")
            print(f"kill {killed}: {phase}, step {on_disk} on disk, {repeated[-1]} steps to repeat", flush=True)
            continue
        expect(run.returncode == 0, f"exit status {run.returncode}: {run.said()[-2000:]}")
        expect(outcome(workdir) == reference, f"{workdir} did not end where the uninterrupted run did")
        completed += 1
        shutil.rmtree(workdir)
    return {
        "kills": killed,
        "by_phase": dict(met),
        "runs_completed": completed,
        "bit_identical": completed,
        "reported_as_saved_and_lost": 0,
        "most_steps_repeated": max(repeated, default=0),
        "mean_steps_repeated": round(float(np.mean(repeated)), 1) if repeated else 0,
        "checkpoint_every": EVERY,
    }


def _ends(phase: str) -> tuple[str, ...]:
    """What a run says when the phase after this one begins; nothing for the last one."""
    phases = list(BEGINNINGS)
    return BEGINNINGS[phases[phases.index(phase) + 1]] if phase != phases[-1] else ()


def _phase(run: Run, workdir: pathlib.Path) -> str:
    """What a run was about when it was killed, by what it has left and said."""
    left = [path.name for path in (workdir / "checkpoints").glob("*")]
    for name, phase in ((".writing", "saving"), (".deleting", "cleaning up")):
        if any(name in entry for entry in left):
            return phase
    if run.has_said("\npicture: ", "\nno picture: "):
        return "ending"
    reached = [phase for phase, marks in BEGINNINGS.items() if run.has_said(*marks)]
    return reached[-1] if reached else "import"


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


def _slowed() -> None:
    """Makes a run say where a phase begins, and rest there, so that a signal meets it."""

    def say(phase: str, rest: float) -> None:
        print(f"phase {phase}", flush=True)
        time.sleep(rest)

    def make_step(run: Any, original: Any = train.make_step) -> Any:
        say("compile", 0)
        return original(run)

    def write_checkpoint(*args: Any, original: Any = Checkpoints._write) -> None:
        say("save", 0.5)
        return original(*args)

    def evaluation_batches(*args: Any, original: Any = data.evaluation_batches, **options: Any) -> Any:
        for batch in original(*args, **options):
            say("evaluation", 0.1)
            yield batch

    train.make_step, checkpoint.Checkpoints._write, data.evaluation_batches = make_step, write_checkpoint, evaluation_batches


def signals(phases: Iterable[str], reference: dict, folder: pathlib.Path) -> list[dict]:
    """Sends SIGTERM in each phase: what was logged must be on disk soon after, and the resumed run end where it should."""
    rows = []
    for phase in phases:
        workdir, log = folder / f"signal-{phase}", folder / f"signal-{phase}.log"
        status, seconds = _terminated_import(workdir) if phase == "import" else _terminated(phase, workdir, log)
        logged = max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)
        on_disk = durable(workdir)
        expect(on_disk >= logged, f"SIGTERM in {phase}: step {logged} was logged, but step {on_disk} is on disk")
        expect(status in ((0,) if on_disk else (-signal.SIGTERM, 128 + signal.SIGTERM)), f"SIGTERM in {phase}: exit status {status}")
        events = [event for event in read_events(workdir / "metrics.jsonl") if event["event"] == "stop"]
        complete(workdir, log)
        expect(outcome(workdir) == reference, f"after SIGTERM in {phase} the run did not end where the uninterrupted one did")
        rows.append({"phase": phase, "exit_status": status, "seconds_to_exit": round(seconds, 2), "logged": logged, "on_disk": on_disk})
        print(rows[-1], [event["why"] for event in events], flush=True)
    return rows


def _terminated(phase: str, workdir: pathlib.Path, log: pathlib.Path) -> tuple[int, float]:
    """The exit status of a run that gets SIGTERM in a phase, and the seconds until then."""
    run = start(workdir, log, prepare=_slowed)
    sent = run.wait_for("\nstep 20/" if phase == "step" else f"\nphase {phase}")
    expect(run.returncode is None, f"the run ended before its {phase}: {run.said()[-2000:]}")
    run.send(signal.SIGTERM)
    status = run.wait(120)
    expect(status is not None, f"SIGTERM in {phase} did not end the run: {run.said()[-2000:]}")
    return status, time.monotonic() - sent


def _terminated_import(workdir: pathlib.Path) -> tuple[int, float]:
    """The same for a command as it is typed, while Python still imports."""
    process = subprocess.Popen([sys.executable, "-m", "rope_jax.main", *SETTINGS, f"--workdir={workdir}"], stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    process.terminate()
    sent = time.monotonic()
    return process.wait(120), time.monotonic() - sent


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
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
        for workdir in ("first", "reference"):  # the first one compiles
            seconds = complete(folder / workdir, folder / "log")
        reference = outcome(folder / "reference")
        expect(outcome(folder / "first") == reference, "two runs of the same config differ")
        figures = {
            "cores": sorted(os.sched_getaffinity(0)),
            "seconds_uninterrupted": {phase: round(part, 2) for phase, part in seconds.items()},
            "state": reference["state"],
            "signals": signals(args.phases, reference, folder),
            "corruptions": corruptions(args.corruptions, folder / "reference", rng, folder),
            "kills": kills(args.kills, reference, seconds, rng, folder),
        }
    figures["seconds"] = round(time.monotonic() - begun)
    print(json.dumps({name: value for name, value in figures.items() if name != "cores"}, indent=1))
    write(record("faults", vars(args), **figures), args.out)
