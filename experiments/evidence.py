"""The papers' claims on real images: small models, every scheme, several seeds.

    python -m experiments evidence vit --data FOLDER --out experiments/results/evidence_vit_cpu.json
    python -m experiments evidence backbones --data FOLDER --out FILE.json
    python -m experiments evidence cat --data FOLDER --out FILE.json
    python -m experiments evidence cifar10 --data FILE.npz --out FILE.json
    python -m experiments evidence tiny_imagenet --data FILE.npz --out FILE.json

The first three train small models on a part of Fashion-MNIST, with the official files in FOLDER,
one run per CPU core at a time. The other two need a GPU: runs follow each other, with the images on
the device and all seeds of a scheme in one run; `packed` in `_parts.py` describes FILE.npz. Each
run is an ordinary `rope_jax.main` command with a recipe from `configs/`.

Runs that are finished in the workdir or in the file of --out are not repeated: `--minutes 8` stops
after eight minutes, and the same command continues. Differences are computed per seed; intervals
are 95 % (Student's t). Arguments after `--` are passed to all runs, which then have separate
workdirs: `... -- --config.epochs=0.1`.
"""

import json
import math
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from benchmarks._runner import Keep
from experiments._claims import claims, judge, sides
from experiments._parts import PARTS, Run


def start(command: list[str], core: int | None) -> subprocess.Popen:
    """Starts a run, on one core unless it is None."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if core is not None:  # before XLA starts one thread per core
        os.sched_setaffinity(process.pid, {core})
    return process


def train(
    commands: dict[str, list[str]],
    cores: Sequence[int | None],
    minutes: float,
    done: Callable[[], None],
) -> list[str]:
    """Runs commands, one per core at a time; at the time limit they save a checkpoint and stop.

    Args:
        commands: the commands, by the names that are printed.
        cores: cores for one run each; a single None for one run at a time, on all cores.
        minutes: time limit.
        done: called when a run has ended.

    Returns:
        A line for each run that failed; the others continue.
    """
    free, running, waiting, failed = list(cores), {}, list(commands), []
    end = time.monotonic() + 60 * minutes
    try:
        while running or (waiting and time.monotonic() < end):
            for name, (process, core) in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[name]
                    free.append(core)
                    if status:
                        failed.append(f"{name} ended with status {status}")
                    done()
            while waiting and free and time.monotonic() < end:
                name = waiting.pop(0)
                core = free.pop()
                running[name] = start(commands[name], core), core
                print(f"{len(commands) - len(waiting)} of {len(commands)}: {name}", flush=True)
            if time.monotonic() >= end:
                for process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
                while running:  # their status is ignored, as they were stopped
                    running.popitem()[1][0].wait()
                done()
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
    return failed


def collect(run: Run, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the accuracies of each seed of a run; none if the run is not finished."""
    path = workdir / "results.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["eval"]
    found = []
    for seed in run.seeds:
        own = [row for row in rows if row.get("seed", run.seeds[0]) == seed]
        kept = [{key: row[key] for key in ("resolution", "top1", "count")} for row in own]
        about = {"backbone": run.backbone, "position": run.position, "seed": seed}
        found.append(about | {"eval": kept})
    return found


def earlier(
    out: pathlib.Path | None, part: str, flags: Sequence[str], images: str
) -> list[dict[str, Any]]:
    """Returns the runs in the file of an earlier call.

    Raises:
        SystemExit: if they belong to another experiment or part, other flags, or other images.
    """
    if out is None or not out.exists():
        return []
    result = json.loads(out.read_text())
    if result["benchmark"] != "evidence":
        raise SystemExit(f"{out} holds a result of {result['benchmark']}: use another file")
    of = result["settings"]
    on = of.get("data", images)  # the first results had no such field
    if (of["part"], list(of["flags"]), on) != (part, list(flags), images):
        about = f"part {of['part']} with flags {of['flags']} on {on}"
        raise SystemExit(f"{out} holds runs of {about}: use another file")
    return result["runs"]


def _check_arguments(name: str, seeds: Sequence[int], backbones: Sequence[str]) -> None:
    """Raises SystemExit for seeds or backbones that a part cannot train."""
    part = PARTS[name]
    if part.together and list(seeds) != list(range(seeds[0], seeds[0] + len(seeds))):
        raise SystemExit(
            f"--seeds {' '.join(map(str, seeds))}: part {name} trains all seeds in one run, "
            "so they must be consecutive"
        )
    known = dict.fromkeys(backbone for backbone, _ in part.models)
    if unknown := set(backbones) - set(known):
        given = " ".join(sorted(unknown))
        raise SystemExit(f"--backbones {given}: part {name} has {', '.join(known)}")


def is_finished(run: Run, found: Sequence[dict[str, Any]]) -> bool:
    """Whether the results of all seeds of a run are there."""
    there = {(one["backbone"], one["position"], one["seed"]) for one in found}
    return {(run.backbone, run.position, seed) for seed in run.seeds} <= there


def print_summary(name: str, runs: Sequence[Run], found: Sequence[dict[str, Any]]) -> None:
    """Prints the verdict on each claim, and how many runs are finished."""
    for claim in claims(name):
        if verdict := judge(claim, found):
            print(f"{sides(claim)}: {verdict} ({claim.source})")
    done = sum(is_finished(run, found) for run in runs)
    more = "" if done == len(runs) else "; run the same command again to continue"
    print(f"{done} of {len(runs)} runs are finished{more}")


def run(
    keep: Keep,
    name: Literal[*PARTS],
    *flags: str,
    data: pathlib.Path,
    workdir: pathlib.Path = pathlib.Path("runs/evidence"),
    minutes: float = math.inf,
    seeds: list[int] | None = None,
    backbones: list[str] | None = None,
    out: pathlib.Path | None = None,
) -> None:
    """Trains the models of a part, collects their accuracies and judges the claims.

    Args:
        keep: saves the result.
        name: name of the part
        flags: flags of all runs.
        data: folder of Fashion-MNIST's official files, or an .npz file
        workdir: folder for the workdirs of the runs
        minutes: time limit; the same command continues
        seeds: seeds to train; default: those of the part
        backbones: train only these
        out: the JSON file; runs that it holds are not repeated.
    """
    part = PARTS[name]
    seeds = seeds or list(part.seeds)
    _check_arguments(name, seeds, backbones or [])
    runs, found = part.runs(seeds), earlier(out, name, flags, data.name)

    def collect_all() -> None:
        for run in runs:
            if not is_finished(run, found):
                new = collect(run, workdir / part.folder(run, flags))
                found.extend(one for one in new if one not in found)
        settings = {"part": name, "seeds": seeds, "flags": list(flags), "data": data.name}
        complete = all(is_finished(run, found) for run in runs)
        cores = len(os.sched_getaffinity(0))
        keep(settings=settings, cores=cores, complete=complete, runs=found)

    images = workdir / f"{part.name}.npz"
    if not images.exists():
        if not data.exists():
            raise SystemExit(f"--data {data} does not exist")
        images = part.images(data, images)
    commands = {
        part.folder(run, flags): part.command(run, images, workdir, flags)
        for run in runs
        if not is_finished(run, found) and (backbones is None or run.backbone in backbones)
    }
    cores = [None] if part.together else sorted(os.sched_getaffinity(0))
    failed = train(commands, cores, minutes, collect_all)
    collect_all()
    print_summary(name, runs, found)
    if failed:
        raise SystemExit("; ".join(failed))
