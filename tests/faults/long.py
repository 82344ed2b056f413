"""Faults that training must survive: kills, damaged checkpoints, signals, and `attacks`.

    python -m tests.faults.long --out experiments/results/faults_cpu.json

It takes twenty minutes on two idle CPU cores (`make test-faults`); `test_faults.py` and
`test_attacks.py` are a short form. Each killed run of a small model must end in the state, bit for
bit, and with the losses of an uninterrupted one; an AssertionError reports lost work. Attacks are
counted.
"""

import collections
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from benchmarks._runner import Keep, call
from rope_jax.config import resolve_stored
from rope_jax.training.folder import Run as Workdir
from rope_jax.training.metrics import read_metrics
from rope_jax.training.report import Reporter
from rope_jax.training.setup import prepare
from rope_jax.training.trees import tree_hash
from tests.faults.attacks import SMALL, Absent, all_attacks, durable, expect, last_logged_step
from tests.faults.processes import Run

EVERY = 8  # steps between checkpoints
STEPS = 36
SETTINGS = [
    *SMALL,
    "--config.ema_decay=0.9",
    "--config.eval.batch_size=30",
    f"--config.checkpoint_every={EVERY}",
]
DAMAGES = ("flip", "truncate", "zero", "delete")
PHASES = {  # the output of a run at their beginning
    "start": "",
    "compile": "\nparameter ",
    "step": "\nstep 20/",
    "save": f"\nstep {2 * EVERY}/",
    "evaluation": f"\nsaved step {STEPS}:",
}


def start(workdir: pathlib.Path, log: pathlib.Path, **options: Any) -> Run:
    """Starts the run, with its output in a file."""
    return Run([*SETTINGS, f"--workdir={workdir}"], log, **options)


def complete(workdir: pathlib.Path, log: pathlib.Path) -> float:
    """Runs to the end; returns the seconds that it took."""
    begun, run = time.monotonic(), start(workdir, log)
    status = run.wait(600)
    expect(status == 0, f"exit status {status}: {run.read_output()[-2000:]}")
    return time.monotonic() - begun


def restore_newest(
    workdir: pathlib.Path,
    config: pathlib.Path,
    *,
    mode: Literal["train", "evaluate"] = "evaluate",
    strict: bool = False,
) -> dict[str, Any]:
    """The newest state in a workdir that verifies, of a run with this config.json."""
    setup, model = prepare(resolve_stored(json.loads(config.read_text())))
    with Workdir.open(workdir, mode) as opened:
        return opened.resume(setup, model, strict=strict)


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
    """The figures that two equal runs share: hash of the last state, losses, evaluation."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return {
        "state": tree_hash(restore_newest(workdir, workdir / "config.json", strict=True)),
        "losses": [(line["step"], line["loss"]) for line in lines],
        "results": json.loads((workdir / "results.json").read_text()),
    }


def kills(
    count: int, reference: dict, seconds: float, rng: np.random.Generator, folder: pathlib.Path
) -> dict[str, Any]:
    """Kills runs at random instants `count` times, resuming each until it is complete.

    Args:
        count: of SIGKILLs.
        reference: the outcome of the uninterrupted run.
        seconds: of that run; instants are uniform in this time.
        rng: of the instants.
        folder: for workdirs.
    """
    zones = ["UTC", "Asia/Kathmandu", "America/St_Johns"]
    repeated, completed = [], 0
    workdir, log = folder / "killed", folder / "killed.log"
    while len(repeated) < count or workdir.exists():
        run = start(workdir, log, environment={"TZ": str(rng.choice(zones))})
        run.wait(rng.uniform(0, seconds) if len(repeated) < count else 600)
        run.kill()
        if run.returncode == -signal.SIGKILL:
            repeated.append(check_killed(run, workdir))
            repeats = f"step {durable(workdir)} on disk, {repeated[-1]} steps to repeat"
            print(f"kill {len(repeated)}: {repeats}", flush=True)
            continue
        expect(run.returncode == 0, f"exit status {run.returncode}: {run.read_output()[-2000:]}")
        expect(outcome(workdir) == reference, f"{workdir} did not end in the reference's state")
        completed += 1
        shutil.rmtree(workdir)
    return {
        "kills": count,
        "runs_completed": completed,
        "most_steps_repeated": max(repeated),
        "mean_steps_repeated": round(float(np.mean(repeated)), 1),
        "checkpoint_every": EVERY,
    }


def check_killed(run: Run, workdir: pathlib.Path) -> int:
    """Checks that nothing reported is lost; returns the number of steps to repeat."""
    saved = re.findall(r"^(?:saved|found) step (\d+)", run.read_output(), re.MULTILINE)
    reported, on_disk = max(map(int, saved), default=0), durable(workdir)
    expect(on_disk >= reported, f"step {reported} was reported as saved, {on_disk} is on disk")
    repeated = last_logged_step(workdir) - on_disk
    # One interval, and the steps while its checkpoint was being written: at most one more.
    expect(repeated <= 2 * EVERY, f"{repeated} steps to repeat, a checkpoint every {EVERY} steps")
    return repeated


def damage(path: pathlib.Path, kind: str, rng: np.random.Generator) -> bool:
    """Flips a bit of a file, truncates, zeroes or deletes it; False if that changes nothing."""
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
        return True
    if not any(content):
        return False
    if kind == "flip":
        place = int(rng.integers(8 * len(content)))
        content = (int.from_bytes(content) ^ 1 << place).to_bytes(len(content))
    elif kind == "truncate":
        content = content[: int(rng.integers(len(content)))]
    else:
        content = bytes(len(content))
    path.write_bytes(content)
    return True


def corruptions(
    count: int, workdir: pathlib.Path, rng: np.random.Generator, folder: pathlib.Path
) -> dict[str, Any]:
    """Damages one file of the newest checkpoint `count` times; the step before must be restored."""
    source, config, copy = workdir / "checkpoints", workdir / "config.json", folder / "damaged"
    *_, older, newest = sorted(os.listdir(source), key=int)
    shutil.copytree(source / older, copy / "checkpoints" / older)
    expected = tree_hash(restore_newest(copy, config, strict=True))
    paths = (path for path in (source / newest).rglob("*") if path.is_file())
    files = sorted(str(path.relative_to(source / newest)) for path in paths)
    done: collections.Counter = collections.Counter()
    while done.total() < count:
        shutil.rmtree(copy)
        target = shutil.copytree(source, copy / "checkpoints")
        name, kind = str(rng.choice(files)), str(rng.choice(DAMAGES))
        if not damage(target / newest / name, kind, rng):
            continue
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            state = restore_newest(copy, config, mode="train")
        fault = f"{kind} of {name}"
        expect(int(state["step"]) == int(older), f"{fault} was not detected")
        expect(tree_hash(state) == expected, f"after {fault} another state was restored")
        expect((target / f"{newest}.corrupt").is_dir(), f"after {fault} the step is gone")
        done[kind] += 1
    return {"corruptions": count, "by_kind": dict(done), "files": len(files), "fell_back": count}


def _slow_down() -> None:
    """Makes each step of a run take a tenth of a second, so that a signal arrives in it."""
    report = Reporter.report

    def slow(self: Reporter, *arguments: Any) -> None:
        time.sleep(0.1)
        report(self, *arguments)

    Reporter.report = slow


def signals(phases: Iterable[str], reference: dict, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Sends SIGTERM in each phase: logged steps must be saved, and the run must resume."""
    rows = []
    for phase in phases:
        workdir, log = folder / f"signal-{phase}", folder / f"signal-{phase}.log"
        run = start(workdir, log, prepare=_slow_down)
        sent = run.wait_for(PHASES[phase])
        with contextlib.suppress(ProcessLookupError):  # it may have ended on a fast machine
            run.send(signal.SIGTERM)
        status, seconds = run.wait(120), time.monotonic() - sent
        logged, on_disk = last_logged_step(workdir), durable(workdir)
        expect(on_disk >= logged, f"{phase}: step {logged} was logged, {on_disk} is on disk")
        allowed = (0,) if on_disk else (-signal.SIGTERM, 128 + signal.SIGTERM)
        expect(status in allowed, f"SIGTERM in {phase}: exit status {status}")
        complete(workdir, log)
        is_equal = outcome(workdir) == reference
        expect(is_equal, f"after SIGTERM in {phase} the run did not end in the reference's state")
        row = {"phase": phase, "exit_status": status, "seconds_to_exit": round(seconds, 2)}
        rows.append(row | {"logged": logged, "on_disk": on_disk})
        print(rows[-1], flush=True)
    return rows


def tries(pattern: str, seed: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Tries the attacks whose names match a pattern; a row for each, with its counts."""
    rows = []
    for attack in all_attacks():
        if not re.search(pattern, attack.name):
            continue
        row = {"attack": attack.name, "tries": 0, "survived": 0}
        for number in range(attack.tries):
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
                try:
                    attack.run(pathlib.Path(name), number, np.random.default_rng((seed, number)))
                except Absent as absent:
                    print(f"not tried: {attack.name}: {absent}")
                    break
                except Exception:  # the table counts failures
                    traceback.print_exc()
                else:
                    row["survived"] += 1
            row["tries"] += 1
        rows.append(row)
        print(row, flush=True)
    return rows


def run(
    keep: Keep,
    *,
    kill_count: int = 50,
    corruption_count: int = 200,
    attacks: str = ".",
    phases: list[Literal[*PHASES]] = list(PHASES),  # noqa: B006
    seed: int = 0,
) -> None:
    """Runs all faults.

    Args:
        keep: writes the result.
        kill_count: SIGKILLs
        corruption_count: damaged checkpoints
        attacks: pattern of the names of the attacks of `tests.faults.attacks` to try
        phases: in which SIGTERM is sent
        seed: of the instants and the damages
    """
    rng, begun = np.random.default_rng(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
        for workdir in ("first", "reference"):  # the first one compiles
            seconds = complete(folder / workdir, folder / "log")
        reference = outcome(folder / "reference")
        expect(outcome(folder / "first") == reference, "two runs of one config differ")
        figures = {
            "cores": sorted(os.sched_getaffinity(0)),
            "seconds_uninterrupted": round(seconds, 2),
            "state": reference["state"],
            "signals": signals(phases, reference, folder),
            "corruptions": corruptions(corruption_count, folder / "reference", rng, folder),
            "kills": kills(kill_count, reference, seconds, rng, folder),
            "attacks": tries(attacks, seed, folder),
        }
    figures["seconds"] = round(time.monotonic() - begun)
    rows = [  # failures end the program, except those of attacks
        ["`SIGKILL` at a random instant", kill_count, kill_count],
        ["a damaged checkpoint", corruption_count, corruption_count],
        ["`SIGTERM` in each phase of a run", len(phases), len(phases)],
        *([row["attack"], row["tries"], row["survived"]] for row in figures["attacks"]),
    ]
    print(json.dumps(figures, indent=1))
    keep(**figures, columns=["attack", "tries", "survived"], rows=rows)


if __name__ == "__main__":
    call("faults", run, sys.argv[1:], "python -m tests.faults.long")
