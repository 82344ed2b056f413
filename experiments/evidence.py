"""The papers' claims on real images: small models, every scheme, several seeds.

    python -m experiments evidence fashion --minutes 50 --data FOLDER --out FILE.json
    python -m experiments evidence fashion_crops --data FOLDER --out FILE.json
    python -m experiments evidence cifar10 --data FILE.npz --out FILE.json
    python -m experiments evidence tiny_imagenet --data FILE.npz --out FILE.json

The first trains small models on Fashion-MNIST, with the official files in FOLDER, one run per CPU
core at a time; the second trains two of them on random crops. The other two need a GPU: runs follow
each other, with the images on the device and all seeds of a scheme in one run; `to_pixels` in
`_parts.py` describes FILE.npz. Each run is an ordinary `rope_jax.main` command with a recipe from
`configs/`; models with rotary embeddings may then be evaluated with every rule of the experiment
`extend`.

The file of --out has all results. Runs that it holds are not repeated, here or on another machine.
A file with other settings, or with seeds that are not requested, is an error. `--minutes 50` ends a
call after fifty minutes, and the same command continues; interrupted runs resume if their workdirs
still exist. `_claims.py` defines what counts as shown. Arguments after `--` are passed to all runs,
which then have separate workdirs: `... -- --config.epochs=0.1`.
"""

import json
import math
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal

from benchmarks._runner import Keep
from experiments._claims import Table, accuracy_table, claims_table
from experiments._parts import PARTS, Run
from experiments.extend import rules_table
from rope_jax.names.text import markdown_table

# backbone, position, seed, eval: rows of results.json, and rules: rows of `extend`, if any.
SeedResult = dict[str, Any]


def start(command: list[str], core: int | None) -> subprocess.Popen:
    """Starts a command, on one core unless it is None."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if core is not None:  # before XLA starts one thread per core
        os.sched_setaffinity(process.pid, {core})
    return process


def train(
    runs: dict[str, list[list[str]]],
    cores: Sequence[int | None],
    minutes: float,
    done: Callable[[], Any],
) -> list[str]:
    """Runs commands, one per core at a time; at the time limit they save what they have and stop.

    Args:
        runs: commands that follow each other, by the name of the run, which is printed.
        cores: cores for one run each; a single None for one run at a time, on all cores.
        minutes: time limit.
        done: called when a run has ended.

    Returns:
        A line for each run that failed; the others continue.
    """
    free, end = list(cores), time.monotonic() + 60 * minutes

    def follow(name: str) -> list[str]:
        core, status = free.pop(), 0
        for command in runs[name]:
            if status or time.monotonic() >= end:
                break
            print(f"{name}: {' '.join(command[2:4])}", flush=True)
            process = start(command, core)
            try:
                status = process.wait(end - time.monotonic())
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        free.append(core)
        return [f"{name} ended with status {status}"] if status else []

    failed = []
    with futures.ThreadPoolExecutor(len(cores)) as pool:
        try:
            for ended in futures.as_completed([pool.submit(follow, name) for name in runs]):
                failed += ended.result()
                done()
        finally:  # after Ctrl-C, which the runs receive as well
            pool.shutdown(cancel_futures=True)
    return failed


def collect(run: Run, workdir: pathlib.Path, extended: bool = False) -> list[SeedResult]:
    """Returns the accuracies of each seed of a run; none if the run is not finished.

    Args:
        run: the run.
        workdir: its workdir.
        extended: True for a run that is also evaluated with the rules of `extend`.
    """
    results, rules = workdir / "results.json", workdir / "extend.json"
    if not results.exists() or (extended and not rules.exists()):
        return []
    rule_results = json.loads(rules.read_text()) if extended else {"complete": True, "rows": []}
    if not rule_results["complete"]:
        return []
    rows, seed_results = json.loads(results.read_text())["eval"], []
    for seed in run.seeds:
        result = {"backbone": run.backbone, "position": run.position, "seed": seed}
        result["eval"] = _seed_rows(rows, seed, ("resolution", "top1", "count"))
        if extended:
            result["rules"] = _seed_rows(
                rule_results["rows"], seed, ("rule", "resolution", "score", "count")
            )
        seed_results.append(result)
    return seed_results


def _seed_rows(rows: Sequence[dict[str, Any]], seed: int, keys: Sequence[str]) -> list[dict]:
    """Rows of a seed, with these keys; rows name their seed only if there are several."""
    seed_rows = [row for row in rows if row.get("seed", seed) == seed]
    return [{key: row[key] for key in keys} for row in seed_rows]


def earlier(out: pathlib.Path | None, settings: dict[str, Any]) -> list[SeedResult]:
    """Returns the runs in the file of an earlier call.

    Raises:
        SystemExit: if they have other settings, or seeds that are not among these.
    """
    if out is None or not out.exists():
        return []
    result = json.loads(out.read_text())
    stored = result["settings"]
    if set(stored.get("seeds", [])) - set(settings["seeds"]) or any(
        stored.get(name) != value for name, value in settings.items() if name != "seeds"
    ):
        raise SystemExit(f"{out} holds runs with other settings: use another file")
    return result["runs"]


def is_finished(run: Run, results: Sequence[SeedResult]) -> bool:
    """Checks whether all seeds of a run have results."""
    finished = {(result["backbone"], result["position"], result["seed"]) for result in results}
    return {(run.backbone, run.position, seed) for seed in run.seeds} <= finished


def tables(name: str, results: Sequence[SeedResult], seeds: int) -> list[Table]:
    """Accuracies, verdicts on the claims, and effects of rules for other sizes, if evaluated."""
    output = [accuracy_table(PARTS[name].models, results), claims_table(name, results, seeds)]
    identity = lambda result: {
        "model": result["backbone"],
        "position": result["position"],
        "run": result["seed"],
    }
    rules = [identity(result) | row for result in results for row in result.get("rules", [])]
    return [*output, rules_table(rules)] if rules else output


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
        seeds: seeds to train, at least those of the file; default: those of the part
        backbones: train only these
        out: the JSON file; runs that it holds are not repeated.
    """
    part = PARTS[name]
    seeds = seeds or list(part.seeds)
    if part.together and seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise SystemExit(f"--seeds={seeds}: part {name} needs consecutive ones, for a single run")
    if unknown := set(backbones or []) - {run.backbone for run in part.runs(seeds)}:
        raise SystemExit(f"--backbones={', '.join(unknown)}: not one of part {name}")
    designs = {backbone: part.design(backbone) for backbone, _ in part.models}
    settings = {"part": name, "flags": list(flags), "data": data.name, "designs": designs}
    settings["seeds"] = seeds
    runs, results = part.runs(seeds), earlier(out, json.loads(json.dumps(settings)))

    def collect_all() -> None:
        for run in runs:
            if not is_finished(run, results):
                folder = workdir / part.folder(run, flags)
                new = collect(run, folder, (run.backbone, run.position) in part.extended)
                results.extend(result for result in new if result not in results)
        complete = all(is_finished(run, results) for run in runs)
        cores = len(os.sched_getaffinity(0))
        keep(
            settings=settings,
            cores=cores,
            complete=complete,
            runs=results,
            tables=tables(name, results, len(seeds)),
        )

    images = workdir / f"{part.name}.npz"
    if not images.exists():
        images = part.images(data, images)
    commands = {
        part.folder(run, flags): part.commands(run, images, workdir, flags)
        for run in runs
        if not is_finished(run, results) and (backbones is None or run.backbone in backbones)
    }
    cores = [None] if part.together else sorted(os.sched_getaffinity(0))
    failed = train(commands, cores, minutes, collect_all)
    collect_all()
    verdicts = claims_table(name, results, len(seeds))
    print(markdown_table(verdicts["columns"], verdicts["rows"]))
    done = sum(is_finished(run, results) for run in runs)
    more = "" if done == len(runs) else "; run the same command again to continue"
    print(f"{done} of {len(runs)} runs are finished{more}")
    if failed:
        raise SystemExit("; ".join(failed))
