"""The papers' claims on real images: small models, every scheme, several seeds.

    python -m experiments evidence vit --data FOLDER --out experiments/results/evidence_vit_cpu.json
    python -m experiments evidence backbones --data FOLDER --out FILE.json
    python -m experiments evidence cat --data FOLDER --out FILE.json
    python -m experiments evidence cifar10 --data FILE.npz --out FILE.json
    python -m experiments evidence tiny_imagenet --data FILE.npz --out FILE.json

The first three train small models on a part of Fashion-MNIST, with the official files in FOLDER,
one run per CPU core at a time. The other two need a GPU: runs follow each other, with the images on
the device and all seeds of a scheme in one run; `packed` below describes FILE.npz. Each run is an
ordinary `rope_jax.main` command with a recipe from `configs/`.

Runs that are finished in the workdir or in the file of --out are not repeated: `--minutes 8` stops
after eight minutes, and the same command continues. Differences are computed per seed; intervals
are 95 % (Student's t). Arguments after `--` are passed to all runs, which then have separate
workdirs: `... -- --config.epochs=0.1`.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from benchmarks._runner import Keep
from rope_jax import data

_INNER = ("ape", "sincos1d", "sincos2d")
_LAPE = [scheme for inner in _INNER for scheme in (inner, f"lape({inner})")]
_FRACTIONS = [f"axial_rope(k_rope={k})" for k in (1, 2, 4, 8)]
_SUMS = ["axial_rope(shared=True)", "rope_mixed+ape", "rope_mixed+rpb"]
SCHEMES = ["none", *_LAPE, "rpb", "rope2d", "rope_mixed", *_FRACTIONS, *_SUMS]
_BASIC = ["none", "rpb", "axial_rope"]
_STAGED = [*_BASIC, "rope2d", "rope_mixed", "ape", "lape(ape)", "rope_mixed+rpb"]
_COMPACT = ("vit_lite_7_4", "cvt_7_4", "cct_7_3x1")

Model = tuple[str, str | None]  # backbone, and scheme (None for the backbone's default)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim about the accuracies of two models.

    Attributes:
        source: paper, and its table or figure.
        better: the model that is claimed to be better.
        worse: the model that it is compared with.
        resolution: side in pixels; None for the training resolution.
        equal: True if the claim is that the two do not differ.
    """

    source: str
    better: Model
    worse: Model
    resolution: int | None = None
    equal: bool = False


class Run(NamedTuple):
    """One training command: a backbone with a scheme, and its seeds."""

    backbone: str
    position: str | None
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """The runs on one image set.

    Attributes:
        recipe: name of a recipe in `configs/`.
        models: all models of the part.
        images: function of the path of --data and a file to write, which returns the .npz file of
            the images.
        name: name of the file to write.
        about: description of the image set.
        backbone: the recipe's argument for the backbone.
        seeds: default of --seeds.
        arguments: further arguments of the recipe, such as "epochs=10".
        together: True to train all seeds in one run, one run at a time (on a GPU).
        smaller: sides in pixels below the training resolution at which schemes are compared.
        larger: sides in pixels above the training resolution.
    """

    recipe: str
    models: list[Model]
    images: Callable[[pathlib.Path, pathlib.Path], pathlib.Path]
    name: str
    about: str
    backbone: str = "backbone"
    seeds: tuple[int, ...] = (0, 1, 2)
    arguments: tuple[str, ...] = ()
    together: bool = False
    smaller: tuple[int, ...] = ()
    larger: tuple[int, ...] = ()

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Returns all runs in the order in which they start."""
        groups = [tuple(seeds)] if self.together else [(seed,) for seed in seeds]
        return [Run(*model, group) for group in groups for model in self.models]

    def folder(self, run: Run, flags: Sequence[str] = ()) -> str:
        """Name of a run's workdir, which differs for other flags, seeds or parts."""
        image_set = [self.name] if self.together else []
        more = [flag.removeprefix("--config.").replace("/", "_") for flag in flags]
        model = [run.backbone, run.position or "default", *map(str, run.seeds)]
        return "-".join([*image_set, *model, *self.arguments, *more])

    def command(
        self, run: Run, images: pathlib.Path, workdir: pathlib.Path, flags: Sequence[str] = ()
    ) -> list[str]:
        """Returns the command of a run."""
        given = {"path": images, self.backbone: run.backbone}
        given |= {"position": run.position, "seed": run.seeds[0]}
        arguments = [f"{key}={value}" for key, value in given.items() if value is not None]
        recipe = f"configs/{self.recipe}.py:{','.join([*arguments, *self.arguments])}"
        command = [sys.executable, "-m", "rope_jax.main", f"--config={recipe}"]
        command.append(f"--workdir={workdir / self.folder(run, flags)}")
        if self.together:
            command += ["--config.data.on_device=True", f"--config.seeds={len(run.seeds)}"]
        return [*command, *flags]


def first_of_fashion_mnist(folder: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Writes the first 10,000 training and 5,000 test images to one file."""
    arrays = {}
    for split, count in (("train", 10_000), ("test", 5_000)):
        images = data.load("idx", str(folder), split)
        arrays[f"{split}_images"] = images.images[:count, :, :, 0]
        arrays[f"{split}_labels"] = images.labels[:count]
    return _saved(arrays, path)


def packed(file: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Returns an .npz file of pixels; decodes a file of concatenated JPEGs into one.

    A file of pixels has the arrays train_images uint8 [n, H, W, 3], train_labels, test_images and
    test_labels, and is returned unchanged.

    A file of JPEGs has an array `body`, with image k from offsets[k] to offsets[k + 1], without the
    bytes at its start that images have in common. These are in `header`, or in one of several
    pieces of it, from header_offsets[i] to header_offsets[i + 1] with i = header_id[k]. `split` is
    0 for training images and 1 for test images; without it, the first 50,000 are for training.
    `labels` are renumbered from 0 without gaps.

    Args:
        file: the file to read.
        path: the file to write.

    Raises:
        SystemExit: if the file has neither form.
    """
    with np.load(file) as archive:
        if "train_images" in archive.files:
            return file
        if missing := {"body", "offsets", "header", "labels"} - set(archive.files):
            raise SystemExit(
                f"--data {file} has neither train_images nor {', '.join(sorted(missing))}: "
                "pass a file with pixels or JPEGs"
            )
        read = {name: archive[name] for name in archive.files}
    body, offsets, header = read["body"].tobytes(), read["offsets"], read["header"].tobytes()
    starts = read.get("header_offsets", [0, len(header)])
    which = read.get("header_id", np.zeros(len(offsets) - 1, int))
    headers = [header[start:end] for start, end in itertools.pairwise(starts)]
    pieces = zip(which, itertools.pairwise(offsets), strict=True)
    images = np.stack([data.decode_image(headers[i] + body[a:b]) for i, (a, b) in pieces])
    labels = np.unique(read["labels"], return_inverse=True)[1].astype(np.int32)
    split = read.get("split", np.arange(len(labels)) >= 50_000)
    arrays = {}
    for number, name in enumerate(("train", "test")):
        arrays[f"{name}_images"] = images[split == number]
        arrays[f"{name}_labels"] = labels[split == number]
    return _saved(arrays, path)


def _saved(arrays: dict[str, np.ndarray], path: pathlib.Path) -> pathlib.Path:
    """Writes an .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("incomplete.npz")
    np.savez(temporary, **arrays)
    temporary.replace(path)
    return path


_FASHION = (first_of_fashion_mnist, "fashion_mnist", "10,000 images of Fashion-MNIST")
_CAT: list[Model] = [("cat", None), ("cat_no_imprint", None), ("cat_vit", None)]
_BACKBONES: list[Model] = [
    *itertools.product(("swin", "nat", "dinat", "cct"), _BASIC),
    ("cat", None),
    ("cat", "none"),
    ("cat", "axial_rope"),
    *_CAT[1:],
]
_CIFAR: list[Model] = [
    *itertools.product(_COMPACT, ("ape", "lape(ape)")),  # as in LaPE
    *itertools.product(_COMPACT, ("none", "axial_rope", "rope_mixed")),
]
PARTS = {
    "vit": Part(
        "evidence",
        [("vit", position) for position in SCHEMES],
        *_FASHION,
        smaller=(12, 16),
        larger=(24, 28, 32),
    ),
    "backbones": Part("evidence", _BACKBONES, *_FASHION),
    "cat": Part("evidence", _CAT, *_FASHION, arguments=("epochs=10",)),
    "cifar10": Part(
        "cct",
        _CIFAR,
        packed,
        "cifar10",
        "CIFAR-10",
        backbone="variant",
        seeds=(121, 122, 123),
        together=True,
        smaller=(24,),
        larger=(40, 48, 64),
    ),
    "tiny_imagenet": Part(
        "tiny_imagenet",
        [("vit", position) for position in SCHEMES]
        + [(backbone, position) for position in _STAGED for backbone in ("swin", "nat")],
        packed,
        "tiny_imagenet",
        "50 classes of Tiny-ImageNet",
        together=True,
        smaller=(32, 48),
        larger=(80, 96, 112, 128, 144, 160),
    ),
}


def claims(name: str) -> Iterator[Claim]:
    """Yields the claims that the runs of a part can test."""
    made = set(PARTS[name].models)
    return (x for x in _of_papers(PARTS[name], name) if {x.better, x.worse} <= made)


def _of_papers(part: Part, name: str) -> Iterator[Claim]:
    """Yields all claims about the backbones of a part, also about models that it lacks."""
    smaller, larger = part.smaller, part.larger
    sides = (*smaller, None, *larger)
    for backbone in dict.fromkeys(backbone for backbone, _ in part.models):
        has_fractions = (backbone, _FRACTIONS[1]) in part.models
        axial = _FRACTIONS[1] if has_fractions else "axial_rope"
        # Heo et al.'s figure 4 compares with APE on ViT, figure 5 with RPB on Swin.
        figure, table = (5, "rpb") if backbone in ("swin", "nat") else (4, "ape")
        part_is_enough = "thesis, table 4.3: a part of the channels is enough"
        share = "thesis, tables 4.2 and 4.3: heads may share angles"
        sums = "Heo et al., figure 6 and table 5"
        lape = "LaPE, CIFAR-10" if name == "cifar10" else "LaPE, inner embeddings of DeiT-Ti"
        comparisons = [
            ("thesis, table 4.1", "rpb", "none", (None,)),
            ("thesis, table 4.1", axial, "rpb", (None,)),
            *((part_is_enough, fraction, _FRACTIONS[0], (None,)) for fraction in _FRACTIONS[1:]),
            (share, "axial_rope(shared=True)", axial, (None,)),
            (f"Heo et al., figure {figure}", "rope2d", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", table, (*smaller, *larger)),
            (f"Heo et al., figure {figure}", "rope_mixed", "rope2d", sides),
            (sums, "rope_mixed+ape", "rope_mixed", smaller),
            (sums, "rope_mixed", "rope_mixed+ape", larger),
            ("Heo et al., figure 6", "rope_mixed", "rope_mixed+rpb", sides if figure == 5 else ()),
            *((lape, f"lape({inner})", inner, (None,)) for inner in _INNER),
        ]
        for source, better, worse, at in comparisons:
            equal = source in (part_is_enough, share)
            for side in at:
                yield Claim(source, (backbone, better), (backbone, worse), side, equal)
    epochs = "" if name == "cat" else ", there after ten epochs"
    yield Claim(f"CAT, table 1{epochs}", ("cat", None), ("cat_vit", None))
    yield Claim(f"CAT, table 4{epochs}", ("cat", None), ("cat_no_imprint", None))


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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval (Student's t); NaN for a single value."""
    if len(values) == 1:
        return values[0], math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), stats.t.ppf(0.975, len(values) - 1) * error


def accuracies(
    found: Sequence[dict[str, Any]], backbone: str, position: str | None, resolution: int | None
) -> dict[int, float]:
    """Top-1 accuracy of a model in per cent, by seed; resolution=None is that of training."""
    values = {}
    for run in found:
        if (run["backbone"], run["position"]) == (backbone, position):
            rows = run["eval"][:1]
            if resolution is not None:
                size = [resolution, resolution]
                rows = [row for row in run["eval"] if row["resolution"] == size]
            if rows:
                values[run["seed"]] = 100 * rows[0]["top1"]
    return values


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a claim.

    Attributes:
        difference: mean difference over seeds, in percentage points.
        half_width: half width of its 95 % interval.
        seeds: number of seeds with which both models were trained.
        verdict: "shown", "not shown", "the opposite", "a difference" or "no difference seen".
    """

    difference: float
    half_width: float
    seeds: int
    verdict: str

    def __str__(self) -> str:
        return f"{self.difference:+.1f} ± {self.half_width:.1f}, {self.verdict}"


def judge(claim: Claim, found: Sequence[dict[str, Any]]) -> Verdict | None:
    """Judges a claim by the seeds that both models have; None for fewer than two seeds."""
    better = accuracies(found, *claim.better, claim.resolution)
    worse = accuracies(found, *claim.worse, claim.resolution)
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return None
    mean, half = interval([better[seed] - worse[seed] for seed in seeds])
    if claim.equal:
        verdict = "a difference" if abs(mean) > half else "no difference seen"
    else:
        verdict = "shown" if mean > half else "the opposite" if mean < -half else "not shown"
    return Verdict(mean, half, len(seeds), verdict)


def sides(claim: Claim) -> str:
    """Formats the comparison of a claim in Markdown."""
    (backbone, position), (other, plain) = claim.better, claim.worse
    better = f"`{backbone}`" + (f" with `{position}`" if position else "")
    worse = f"`{other}`" + (f" with `{plain}`" if plain else "")
    where = "" if claim.resolution is None else f" at {claim.resolution} px"
    return f"{better} {'equal to' if claim.equal else 'above'} {worse}{where}"


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
