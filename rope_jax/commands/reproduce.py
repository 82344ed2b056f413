"""Reproduces the tables and figures of the papers, and compares them with the published numbers.

    rope_jax reproduce                                   list them
    rope_jax reproduce heo/figure_4                      train small models, draw and print
    rope_jax reproduce all --scale=smoke                 everything, to see that it runs
    rope_jax reproduce heo --scale=released --data=IMAGENET/val
    rope_jax reproduce lape/table_I --scale=full --plan  the commands, one per line
    rope_jax reproduce heo/figure_2 --runs=runs/a,runs/b

An id is PAPER/table_N, PAPER/figure_N or PAPER/equation_N, a PAPER, or all. The same command
continues one that was interrupted; runs that tables and figures share are trained once. --workdir
gets results.json, a picture for each figure, and index.html. The scales:

    smoke      seconds a run: tiny models on embedded digits and scenes
    small      minutes a run: small models on them, or on the images of --data: an .npz file, or
               the folder of Fashion-MNIST
    released   the authors' weights, evaluated on --data
    full       trained as published, on --data
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import shlex
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Annotated, Any

import jax

from rope_jax.analysis.runs import read_runs
from rope_jax.commands import evaluate, train
from rope_jax.commands.arguments import Argument, CommandParser, command_parser
from rope_jax.commands.exits import exit_at_once, exit_statuses
from rope_jax.config import ConfigError, in_one_line
from rope_jax.data.workers import DeadWorker, end_with_parent
from rope_jax.names import plugins
from rope_jax.names.notation import Call, items, parse
from rope_jax.names.options import Count, Probability, Range
from rope_jax.names.text import closest, format_table
from rope_jax.papers.declared import ARTIFACTS, DECLARED, find_artifacts, result, sides_by_model
from rope_jax.papers.images import is_packed, unpack
from rope_jax.papers.kinds import Artifact
from rope_jax.papers.lab import IMAGENET_SETS, Job, Lab
from rope_jax.papers.page import progress, write_pages
from rope_jax.papers.plan import estimate, total_hours
from rope_jax.positions.scheme import SCHEMES
from rope_jax.runs import run
from rope_jax.system.compilation import compile_quickly, keep_compiled
from rope_jax.system.cores import cores
from rope_jax.system.files import read_json, write_file
from rope_jax.system.sharding import start_devices
from rope_jax.training.checkpoint import NonFinite
from rope_jax.training.signals import Interrupted
from rope_jax_kernels import device

SCALES = ("smoke", "small", "released", "full")
SETS = ("images", "imagenet", *IMAGENET_SETS, "coco", "ade20k", "cifar10", "cifar100")
VERSION = importlib.metadata.version("rope_jax")
_LATE = "the time of --minutes is over"
# Of one run; the others go on.
_FAILURES = (
    ConfigError,
    DeadWorker,
    MemoryError,
    NonFinite,
    OSError,
    ValueError,
    jax.errors.JaxRuntimeError,
)


def command() -> None:
    """Calls `main` with `sys.argv`, and ends the process."""
    parser, args = _parse(None)
    with exit_at_once():
        _reproduce(parser, args)


def main(arguments: list[str] | None = None) -> None:
    """Lists, plans or reproduces tables and figures."""
    _reproduce(*_parse(arguments))


def _parse(words: list[str] | None) -> tuple[CommandParser, argparse.Namespace]:
    parser = command_parser("rope_jax.reproduce", __doc__)
    add = parser.add_argument
    add("ids", nargs="*", help="tables and figures; none: list them")
    add("--scale", choices=SCALES, default="small", help="default: small")
    add("--data", help=f"images: PATH, or NAME=PATH,NAME=PATH of {', '.join(SETS[1:])}")
    add("--only", help="rows with these models or schemes alone, separated by commas")
    add("--schemes", help="your own schemes, one more row or line each")
    add(
        "--seeds",
        type=Argument(Count),
        help="runs of each model; default: 3 at scale small, otherwise 1",
    )
    positive = Argument(Annotated[float, Range(above=0)])
    add("--epochs", type=positive, help="of classifiers, at scale small")
    add("--runs", help="workdirs of your own runs, separated by commas, instead of the papers'")
    add("--minutes", type=positive, help="stop when they are over, after the runs in progress")
    add("--count", type=Argument(Count), help="images of attention statistics; default: 256")
    add(
        "--token",
        type=Argument(tuple[Probability, Probability]),
        action="append",
        default=[],
        help="figures of maps: place y,x of the token, such as 0.5,0.25",
    )
    add(
        "--limit",
        type=Argument(Count),
        help="images of each set, evenly spaced, at scale released; default: all",
    )
    add("--workdir", type=pathlib.Path, default=pathlib.Path("runs/papers"), help="for everything")
    add("--weights_dir", help="folder with files of published weights")
    add("--plan", action="store_true", help="print the commands that are missing, and stop")
    add("--json", action="store_true", help="print results.json at the end")
    return parser, parser.parse_args(words)


def _reproduce(parser: CommandParser, args: argparse.Namespace) -> None:
    with parser.one_line_errors(extra="plot"):
        artifacts = find_artifacts(args.ids or ["all"])
        lab = _lab(args)
        if lab.only:
            artifacts = _only(artifacts, lab)
        if not (args.ids or args.plan):
            print(format_table(*_list(artifacts, lab)))
            return
        own = lab.given is not None
        if not (lab.small_scale or own or lab.data or (args.plan and lab.scale == "full")):
            images = {
                "released": "the folder of ImageNet's validation images, by class",
                "full": "the folder of ImageNet; --plan prints the commands",
            }
            raise ConfigError(f"--scale={lab.scale} needs --data: {images[lab.scale]}")
        if args.plan:
            _print_plan(artifacts, unpack(lab))
            return
        _check_version(args.workdir)
        args.workdir.mkdir(parents=True, exist_ok=True)
        lab = unpack(lab)  # before runs, whose folders have names by their images
    failed, results = [], None
    printed = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    with exit_statuses(str(args.workdir), distributed=False), printed:
        _start(lab.scale)
        minutes = args.minutes or math.inf
        failed = _train_missing(artifacts, lab, time.monotonic() + 60 * minutes)
        for artifact in artifacts:
            print(artifact.id, flush=True)
            _add_result(artifact.id, result(artifact, lab, args.workdir), lab)
        results = read_json(args.workdir / "results.json")
        write_pages(results, args.workdir, DECLARED)
        print(f"results: {args.workdir / 'results.json'}\npages: {args.workdir / 'index.html'}")
    if args.json and results is not None:
        print(json.dumps(results))
    if failed:
        end = f"not complete: {failed[-1]}; run the same command again to continue"
        print(end, file=sys.stderr if args.json else None)
        sys.exit(0 if failed == [_LATE] else 1)


def _check(args: argparse.Namespace, data: Collection[str]) -> None:
    """Rejects options that another scale or the user's runs leave without effect.

    Args:
        args: of the command.
        data: names of the sets of --data.
    """
    own, scale = args.runs is not None, args.scale
    if own and not items(args.runs):
        raise ConfigError("--runs= names no workdir: name those of your runs, or leave it out")
    for option, reader in (("epochs", "small"), ("limit", "released")):
        if getattr(args, option) is not None and (own or scale != reader):
            raise ConfigError(f"--{option} applies only to runs of --scale={reader}: leave it out")
    if args.seeds is not None and (own or scale == "released"):
        other = "--runs" if own else "--scale=released"
        raise ConfigError(f"--seeds cannot be combined with {other}, which trains nothing")
    if scale == "smoke" and data:
        raise ConfigError("--data cannot be combined with --scale=smoke: leave it out")
    unread = {*data} - {"images"} if scale == "small" else {*data} & {"images"}
    if unread:
        advice = "PATH, without a name" if scale == "small" else "imagenet=PATH"
        raise ConfigError(
            f"--scale={scale} does not read --data={unread.pop()}=: use --data={advice}"
        )


def _lab(args: argparse.Namespace) -> Lab:
    data: dict[str, str] = {}
    for word in items(args.data) if args.data else []:
        name, equals, path = word.partition("=")
        if equals and name not in SETS:
            raise ConfigError(f"--data={word}: {name} is not a set; {closest(name, SETS)}")
        default = "images" if args.scale in ("smoke", "small") else "imagenet"
        data |= {name: path} if equals else {default: word}
    _check(args, data)
    missing = [path for path in data.values() if not pathlib.Path(path).exists()]
    if missing:
        raise ConfigError(f"--data={missing[0]} does not exist: name a file or folder of images")
    is_packed(data.get("images", ""))  # refuses other files
    given = None
    if args.runs:
        given = tuple(r for folder in items(args.runs) for r in read_runs(pathlib.Path(folder)))
        sets = dict.fromkeys(run.rows[0]["dataset"] for run in given)
        if len(sets) > 1:
            raise ConfigError(f"--runs were tested on {' and '.join(sets)}: name runs of one set")
    needed = plugins.find_needed(args.schemes or "")
    schemes = tuple(items(args.schemes)) if args.schemes else ()
    for text in schemes:
        _check_names(parse(text, "--schemes"))
    return Lab(
        scale=args.scale,
        workdir=args.workdir,
        data=data,
        seeds=args.seeds,
        sizes=sides_by_model(),
        schemes=schemes,
        weights_dir=args.weights_dir,
        given=given,
        count=args.count,
        epochs=args.epochs,
        tokens=tuple(args.token),
        limit=args.limit,
        only=tuple(items(args.only)) if args.only else (),
        plugins=needed,
    )


def _check_names(calls: Sequence[Call]) -> None:
    """Raises ValueError for names that are not of schemes."""
    for call in calls:
        SCHEMES[call.name]  # raises it
        for inner in call.inner:
            _check_names(inner)


def _only(artifacts: list[Artifact], lab: Lab) -> list[Artifact]:
    """The artifacts that have a row or line of --only."""
    every = dataclasses.replace(lab, only=())
    names = {artifact.id: artifact.row_names(every) for artifact in artifacts}
    known = sorted(set().union(*names.values()))
    for name in lab.only:
        if name not in known:
            raise ConfigError(f"--only={name} matches no row; {closest(name, known)}")
    return [artifact for artifact in artifacts if not names[artifact.id].isdisjoint(lab.only)]


def _jobs(artifacts: list[Artifact], lab: Lab) -> list[Job]:
    """The commands of all runs, each once, by their stages."""
    jobs = lab.jobs(run for artifact in artifacts for run in artifact.runs(lab))
    return sorted(jobs, key=lambda job: job.stage)


def _list(artifacts: list[Artifact], lab: Lab) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Commands of each scale, their hours at --scale, and the cells filled in the workdir."""
    path = lab.workdir / "results.json"
    stored = read_json(path).get("artifacts", {}) if path.exists() else {}
    rows = []
    for artifact in artifacts:
        counts = []
        for scale in SCALES:
            data = {name: name.upper() for name in SETS[1:]} if scale == "released" else lab.data
            jobs = _jobs([artifact], dataclasses.replace(lab, scale=scale, data=data))
            counts.append(str(len(jobs)))
            if scale == lab.scale:
                hours = f"{total_hours(jobs, scale):,.1f}" if jobs else ""
        done = progress(stored[artifact.id]) if artifact.id in stored else "-"
        rows.append((artifact.id, artifact.title, *counts, hours, done))
    first, *others = SCALES
    hours = f"hours ({lab.scale})"
    return ("id", "shows", f"commands: {first}", *others, hours, "cells done"), rows


def _print_plan(artifacts: list[Artifact], lab: Lab) -> None:
    """Prints the missing commands, one per line, each with what it costs."""
    jobs = [job for job in _jobs(artifacts, lab) if not job.done]
    for job in jobs:
        print(f"{_words(job)}  # stage {job.stage + 1}, {estimate(job, lab.scale)}")
    hours = f"{total_hours(jobs, lab.scale):,.1f} hours"
    print(f"# {len(jobs)} commands, {hours}; those of a stage need the stages before it")


def _words(job: Job) -> str:
    return shlex.join(["rope_jax", *job.words])


def _check_version(workdir: pathlib.Path) -> None:
    path = workdir / "results.json"
    if path.exists() and (version := read_json(path).get("version")) != VERSION:
        raise ConfigError(
            f"--workdir={workdir} holds results of rope_jax {version}, and this is "
            f"{VERSION}: use another folder"
        )


def _train_missing(artifacts: list[Artifact], lab: Lab, end: float) -> list[str]:
    """Runs the commands that are missing until a time, and returns what is left to do.

    At the scales smoke and small as many run at a time as a machine without a GPU has cores. A run
    that fails leaves its cells empty; the others go on.
    """
    jobs = [job for job in _jobs(artifacts, lab) if not job.done]
    count = min(cores(), len(jobs)) if lab.small_scale and not device.is_gpu() else 1
    numbers, failed = itertools.count(1), []

    def report(job: Job, problem: str | None) -> None:
        print(f"[{next(numbers)}/{len(jobs)}] {_words(job)}", flush=True)
        if problem is not None:
            failed.append(f"{_words(job)}: {problem}")
            print(f"failed: {problem}", file=sys.stderr, flush=True)

    if count < 2:
        for job in jobs:
            if time.monotonic() > end:
                return [*failed, _LATE]
            report(job, _run(job))
        return failed
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(count, context, _start_worker, (lab.scale,)) as pool:
        try:
            for _, stage in itertools.groupby(jobs, key=lambda job: job.stage):
                running = {pool.submit(_run_or_end, job): job for job in stage}
                left = None if end == math.inf else max(0.0, end - time.monotonic())
                for future in futures.as_completed(running, left):
                    report(running[future], future.result())
        except TimeoutError:
            failed.append(_LATE)
        except BrokenProcessPool:
            failed.append(
                "the process of a run was killed, perhaps because it took too much memory"
            )
        finally:  # runs in progress end, or stop at a signal
            pool.shutdown(cancel_futures=True)
    return failed


def _start_worker(scale: str) -> None:
    """Prepares a process of the pool, which ends with its parent: its run can be resumed."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    _start(scale)


def _start(scale: str) -> None:
    if scale == "smoke":
        compile_quickly()
    keep_compiled()
    start_devices()


def _run_or_end(job: Job) -> str | None:
    """`_run` in a process of the pool, which ends at a signal and takes no other run."""
    try:
        return _run(job)
    except Interrupted:
        os._exit(1)


def _run(job: Job) -> str | None:
    """Runs a command in this process, and returns why it failed.

    What it prints goes to log.txt in its folder.
    """
    job.result.parent.mkdir(parents=True, exist_ok=True)
    with open(job.result.parent / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        try:
            if job.words[0] == "evaluate":
                evaluate.main(list(job.words[1:]))
            else:
                args, config = train.parse(list(job.words[1:]))
                run.train(config, args.workdir)
        except SystemExit as error:  # its line is printed
            return f"status {error.code}" if error.code else None
        except _FAILURES as error:
            return in_one_line(error)
    return None


def _add_result(name: str, entry: dict[str, Any], lab: Lab) -> None:
    """Adds an artifact to results.json."""
    path, scale = lab.workdir / "results.json", "runs" if lab.given else lab.scale
    head = {"scale": scale, "data": dict(lab.data), "version": VERSION}
    head |= {"epochs": lab.epochs, "limit": lab.limit}
    stored = read_json(path) if path.exists() else {}
    if not head.items() <= stored.items():  # of another scale, length or other images
        stored = head | {"artifacts": {}}
    if lab.only and name in stored["artifacts"]:  # the other rows stay
        for part, key in (("cells", "key"), ("claims", "claim")):
            both = (*stored["artifacts"][name][part], *entry[part])
            newest = {json.dumps(each[key], sort_keys=True): each for each in both}
            entry = entry | {part: list(newest.values())}
    stored["artifacts"][name] = entry
    entries = stored["artifacts"]
    stored["artifacts"] = {name: entries[name] for name in ARTIFACTS if name in entries}
    write_file(path, json.dumps(stored, indent=1) + "\n")
