"""The papers' claims on real images: models with every scheme, several seeds, and what the order of their accuracies says.

    python -m benchmarks evidence vit --data FOLDER --out benchmarks/results/evidence_vit_cpu.json
    python -m benchmarks evidence backbones --data FOLDER --out benchmarks/results/evidence_backbones_cpu.json
    python -m benchmarks evidence cat --data FOLDER --out benchmarks/results/evidence_cat_cpu.json
    python -m benchmarks evidence cifar10 --data FILE.npz --out benchmarks/results/evidence_cifar10_gpu.json
    python -m benchmarks evidence tiny_imagenet --data FILE.npz --out benchmarks/results/evidence_tiny_imagenet_gpu.json

The first three train small models on a part of Fashion-MNIST, whose official files FOLDER holds, as many at a time as there are cores, one
core each. The others are for a GPU: one run after the other, the images on the device, all seeds of a scheme in one run; FILE is as
`packed` below takes it. Each run is the command that a user would type, with a recipe of `configs/`. What an earlier call left in the
workdir, or in the file of `--out`, is taken up: `--minutes 8` stops after eight minutes, and the same command goes on. The result holds
what is finished. Differences are taken seed by seed; their intervals are 95 % (Student's t).
"""

import argparse
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
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks._record import record, write
from rope_jax import data

_LAPE = [scheme for inner in ("ape", "sincos1d", "sincos2d") for scheme in (inner, f"lape({inner})")]
_FRACTIONS = [f"axial_rope(k_rope={k})" for k in (1, 2, 4, 8)]
SCHEMES = ["none", *_LAPE, "rpb", "rope2d", "rope_mixed", *_FRACTIONS, "axial_rope(shared=True)", "rope_mixed+ape", "rope_mixed+rpb"]
_BASIC = ["none", "rpb", "axial_rope"]
_COMPACT = ("vit_lite_7_4", "cvt_7_4", "cct_7_3x1")
_STAGED = ["none", "rpb", "axial_rope", "rope2d", "rope_mixed", "ape", "lape(ape)", "rope_mixed+rpb"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of two runs: `better` is above `worse`, at the training resolution or at another one.

    Attributes:
        source: paper and place.
        better: (backbone, position).
        worse: like `better`.
        resolution: side in pixels; None for that of training.
        equal: whether the claim is rather that the two do not differ.
    """

    source: str
    better: tuple[str, str | None]
    worse: tuple[str, str | None]
    resolution: int | None = None
    equal: bool = False


class Run(NamedTuple):
    """What one command trains: a backbone with a scheme (None for its own), one model for each seed."""

    backbone: str
    position: str | None
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Runs on one image set.

    Attributes:
        recipe: of `configs/`.
        backbone: the recipe's argument that names it.
        models: (backbone, position) of all runs.
        images: (what --data names, file to write) -> the images' file, an .npz of `rope_jax.data.load`.
        name: of that file.
        about: the image set, for a reader.
        seeds: unless --seeds names others.
        arguments: more of the recipe's, as "epochs=10".
        together: whether the seeds are trained in one run, and runs one after the other: on a GPU.
        smaller, larger: the other sides in pixels at which schemes are held against each other, below that of training and above it.
    """

    recipe: str
    models: list[tuple[str, str | None]]
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
        """All of them, in the order in which they are started."""
        groups = [tuple(seeds)] if self.together else [(seed,) for seed in seeds]
        return [Run(*model, group) for group in groups for model in self.models]

    def folder(self, run: Run, flags: Sequence[str] = ()) -> str:
        """The name of a run's workdir: another one with other flags, or one run would be taken for another."""
        image_set = [self.name] if self.together else []  # in which a single seed would be called like that of another part
        more = [flag.removeprefix("--config.").replace("/", "_") for flag in flags]
        return "-".join([*image_set, run.backbone, run.position or "default", *map(str, run.seeds), *self.arguments, *more])

    def command(self, run: Run, images: pathlib.Path, workdir: pathlib.Path, flags: Sequence[str] = ()) -> list[str]:
        """What a user would type for a run."""
        given = {"path": images, self.backbone: run.backbone, "position": run.position, "seed": run.seeds[0]}
        arguments = [*(f"{key}={value}" for key, value in given.items() if value is not None), *self.arguments]
        together = ["--config.data.on_device=True", f"--config.seeds={len(run.seeds)}"] if self.together else []
        recipe = f"--config=configs/{self.recipe}.py:{','.join(arguments)}"
        return [sys.executable, "-m", "rope_jax.main", recipe, f"--workdir={workdir / self.folder(run, flags)}", *together, *flags]


def first_of_fashion_mnist(folder: pathlib.Path, path: pathlib.Path, training: int = 10_000, test: int = 5_000) -> pathlib.Path:
    """Writes the first images of either split into one file."""
    arrays = {}
    for split, count in (("train", training), ("test", test)):
        images = data.load("idx", str(folder), split)
        arrays |= {f"{split}_images": images.images[:count, :, :, 0], f"{split}_labels": images.labels[:count]}
    return _saved(arrays, path)


def packed(file: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """The file itself, where it holds pixels: train_images uint8 [n, H, W, 3], train_labels, test_images, test_labels; or JPEGs, decoded.

    Those lie in `body` one behind the other, from offsets[k] to offsets[k + 1], without what many have in common: before each belongs
    `header`, or where there are several the piece of it from header_offsets[i] to header_offsets[i + 1], i = header_id[k]. `split` is 0 for
    training images and 1 for others; without it the first 50,000 are for training. `labels` may have gaps, which are closed.

    Raises:
        SystemExit: the file holds neither.
    """
    with np.load(file) as archive:
        if "train_images" in archive.files:
            return file
        if missing := {"body", "offsets", "header", "labels"} - set(archive.files):
            raise SystemExit(f"--data {file} has neither train_images nor {', '.join(sorted(missing))}: name a file with pixels or JPEGs")
        read = {name: archive[name] for name in archive.files}
    body, offsets, header = read["body"].tobytes(), read["offsets"], read["header"].tobytes()
    starts, which = read.get("header_offsets", [0, len(header)]), read.get("header_id", np.zeros(len(offsets) - 1, int))
    headers = [header[start:end] for start, end in itertools.pairwise(starts)]
    pieces = zip(which, itertools.pairwise(offsets), strict=True)
    images = np.stack([data.decode_image(headers[i] + body[start:end]) for i, (start, end) in pieces])
    labels = np.unique(read["labels"], return_inverse=True)[1].astype(np.int32)
    split = read.get("split", np.arange(len(labels)) >= 50_000)
    arrays = {}
    for number, name in enumerate(("train", "test")):
        arrays |= {f"{name}_images": images[split == number], f"{name}_labels": labels[split == number]}
    return _saved(arrays, path)


def _saved(arrays: dict[str, np.ndarray], path: pathlib.Path) -> pathlib.Path:
    """Writes an .npz file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("incomplete.npz")
    np.savez(temporary, **arrays)
    temporary.replace(path)
    return path


_FASHION = (first_of_fashion_mnist, "fashion_mnist", "10,000 images of Fashion-MNIST")
PARTS = {
    "vit": Part("evidence", [("vit", position) for position in SCHEMES], *_FASHION, smaller=(12, 16), larger=(24, 28, 32)),
    "backbones": Part(
        "evidence",
        [
            *((backbone, position) for backbone in ("swin", "nat", "dinat", "cct") for position in _BASIC),
            *(("cat", position) for position in (None, "none", "axial_rope")),
            ("cat_no_imprint", None),
            ("cat_vit", None),
        ],
        *_FASHION,
    ),
    "cat": Part(
        "evidence",
        [("cat", None), ("cat_no_imprint", None), ("cat_vit", None)],
        *_FASHION,
        arguments=("epochs=10",),
    ),
    "cifar10": Part(
        "cct",
        [
            *((backbone, position) for backbone in _COMPACT for position in ("ape", "lape(ape)")),  # what LaPE has
            *((backbone, position) for backbone in _COMPACT for position in ("none", "axial_rope", "rope_mixed")),
        ],
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
        [*(("vit", position) for position in SCHEMES), *((backbone, position) for position in _STAGED for backbone in ("swin", "nat"))],
        packed,
        "tiny_imagenet",
        "50 classes of Tiny-ImageNet",
        together=True,
        smaller=(32, 48),
        larger=(80, 96, 112, 128, 144, 160),
    ),
}


def claims(part: str) -> Iterator[Claim]:
    """Every claim that the runs of a part can test."""
    made = set(PARTS[part].models)
    yield from (claim for claim in _of_papers(PARTS[part], part) if {claim.better, claim.worse} <= made)


def _of_papers(part: Part, name: str) -> Iterator[Claim]:
    """The papers' claims about any backbone of a part, also such as no run is there for."""
    smaller, larger = part.smaller, part.larger
    for backbone in dict.fromkeys(backbone for backbone, _ in part.models):
        axial = next((one for one in ("axial_rope(k_rope=2)", "axial_rope") if (backbone, one) in part.models), None)
        of = lambda position, backbone=backbone: (backbone, position)
        yield Claim("thesis, table 4.1", of("rpb"), of("none"))
        yield Claim("thesis, table 4.1", of(axial), of("rpb"))
        for fraction in _FRACTIONS[1:]:
            yield Claim("thesis, table 4.3: a part of the channels is enough", of(fraction), of(_FRACTIONS[0]), equal=True)
        yield Claim("thesis, tables 4.2 and 4.3: heads may share angles", of("axial_rope(shared=True)"), of(axial), equal=True)
        # Figure 4 is about ViT, which has APE, and 5 about Swin, which has RPB.
        figure, table = (5, "rpb") if backbone in ("swin", "nat") else (4, "ape")
        for position in ("rope2d", "rope_mixed"):
            for side in (*smaller, *larger):
                yield Claim(f"Heo et al., figure {figure}", of(position), of(table), side)
        for side in (*smaller, None, *larger):
            yield Claim(f"Heo et al., figure {figure}", of("rope_mixed"), of("rope2d"), side)
        for side in smaller:
            yield Claim("Heo et al., figure 6 and table 5", of("rope_mixed+ape"), of("rope_mixed"), side)
        for side in larger:
            yield Claim("Heo et al., figure 6 and table 5", of("rope_mixed"), of("rope_mixed+ape"), side)
        if figure == 5:
            for side in (*smaller, None, *larger):
                yield Claim("Heo et al., figure 6", of("rope_mixed"), of("rope_mixed+rpb"), side)
        for inner in ("ape", "sincos1d", "sincos2d"):
            yield Claim("LaPE, CIFAR-10" if name == "cifar10" else "LaPE, inner embeddings of DeiT-Ti", of(f"lape({inner})"), of(inner))
    epochs = "" if name == "cat" else ", there after ten epochs"
    yield Claim(f"CAT, table 1{epochs}", ("cat", None), ("cat_vit", None))
    yield Claim(f"CAT, table 4{epochs}", ("cat", None), ("cat_no_imprint", None))


def start(command: list[str], core: int | None) -> subprocess.Popen:
    """Starts a run, on one core where one is named."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if core is not None:  # at once, before it has threads: XLA makes as many as it may use cores
        os.sched_setaffinity(process.pid, {core})
    return process


def train(commands: dict[str, list[str]], cores: Sequence[int | None], minutes: float, done: Callable[[], None]) -> list[str]:
    """Runs commands, as many at a time as there are cores, until the time is up; what runs then is stopped, and saves what it has.

    Args:
        commands: by the names under which they are announced.
        cores: on which they run, one each; a single None for one at a time, on all.
        minutes: after which nothing more is started.
        done: called after each that has ended.

    Returns:
        what failed, with its status. The others are not kept from running by it.
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
                running[waiting[0]] = (start(commands[waiting[0]], free[-1]), free.pop())
                print(f"{len(commands) - len(waiting) + 1} of {len(commands)}: {waiting.pop(0)}", flush=True)
            if time.monotonic() >= end:
                for process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
                while running:  # whatever their status: they were asked to stop
                    running.popitem()[1][0].wait()
                done()
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
    return failed


def collect(run: Run, workdir: pathlib.Path) -> list[dict]:
    """What a run reached, for each of its seeds; nothing where it is not finished."""
    path = workdir / "results.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["eval"]
    kept = lambda row: {key: row[key] for key in ("resolution", "top1", "count")}
    of_seed = {seed: [kept(row) for row in rows if row.get("seed", run.seeds[0]) == seed] for seed in run.seeds}
    return [{"backbone": run.backbone, "position": run.position, "seed": seed, "eval": of_one} for seed, of_one in of_seed.items()]


def earlier(out: pathlib.Path | None, part: str, flags: list[str], images: str) -> list[dict]:
    """What an earlier call has written.

    Raises:
        SystemExit: it is of another benchmark or part, of other flags, or of images of another name.
    """
    if out is None or not out.exists():
        return []
    result = json.loads(out.read_text())
    if result["benchmark"] != "evidence":
        raise SystemExit(f"{out} holds a result of {result['benchmark']}: name another file")
    of = result["settings"]
    on = of.get("data", images)  # the first results did not say
    if (of["part"], of["flags"], on) != (part, flags, images):
        raise SystemExit(f"{out} holds runs of part {of['part']} with flags {of['flags']} on {on}: name another file")
    return result["runs"]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t); not a number with a single value."""
    if len(values) == 1:
        return values[0], math.nan
    return statistics.mean(values), stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def accuracies(found: list[dict], backbone: str, position: str | None, resolution: int | None) -> dict[int, float]:
    """Top-1 accuracy in percent of a (backbone, scheme), by seed."""
    values = {}
    for run in found:
        if (run["backbone"], run["position"]) == (backbone, position):
            rows = run["eval"][:1] if resolution is None else [x for x in run["eval"] if x["resolution"] == [resolution, resolution]]
            values |= {run["seed"]: 100 * rows[0]["top1"]} if rows else {}
    return values


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of a claim.

    Attributes:
        difference: in points of accuracy, mean over seeds.
        half_width: of its 95 % interval.
        seeds: how many both sides have.
        verdict: in words.
    """

    difference: float
    half_width: float
    seeds: int
    verdict: str


def judge(claim: Claim, found: list[dict]) -> Judged | None:
    """The difference of a claim's two sides over the seeds that both have, and what it says; None without two seeds."""
    better, worse = (accuracies(found, *side, claim.resolution) for side in (claim.better, claim.worse))
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return None
    mean, half = interval([better[seed] - worse[seed] for seed in seeds])
    if claim.equal:
        verdict = "a difference" if abs(mean) > half else "no difference seen"
    else:
        verdict = "shown" if mean > half else "the opposite" if mean < -half else "not shown"
    return Judged(mean, half, len(seeds), verdict)


def sides(claim: Claim) -> str:
    """What a claim compares, for a person."""
    better, worse = (f"`{backbone}`" + (f" with `{position}`" if position else "") for backbone, position in (claim.better, claim.worse))
    where = "" if claim.resolution is None else f" at {claim.resolution} px"
    return f"{better} {'equal to' if claim.equal else 'above'} {worse}{where}"


def main(argv: list[str]) -> None:
    """Trains, collects, judges."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--data", type=pathlib.Path, required=True, help="the official files' folder of Fashion-MNIST, or an .npz file")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/evidence"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long; the same command goes on")
    parser.add_argument("--seeds", type=int, nargs="+", help="unless the part's own")
    parser.add_argument("--backbones", nargs="+", help="train these alone")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write, after every run")
    parser.epilog = "What stands behind -- are flags of all runs, which then have workdirs of their own: `... -- --config.epochs=0.1`."
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser.parse_args(own)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is for the runs
    part = PARTS[args.part]
    seeds = args.seeds or list(part.seeds)
    if part.together and seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise SystemExit(f"--seeds {' '.join(map(str, seeds))}: part {args.part} trains them in one run: let them follow each other")
    runs = part.runs(seeds)
    if unknown := set(args.backbones or ()) - {run.backbone for run in runs}:
        raise SystemExit(f"--backbones {' '.join(sorted(unknown))}: part {args.part} has {', '.join({run.backbone: 0 for run in runs})}")
    found = earlier(args.out, args.part, flags, args.data.name)
    key = lambda one: (one["backbone"], one["position"], one["seed"])
    finished = lambda run: {(run.backbone, run.position, seed) for seed in run.seeds} <= set(map(key, found))

    def keep() -> None:
        for run in runs:
            if not finished(run):
                found.extend(one for one in collect(run, args.workdir / part.folder(run, flags)) if one not in found)
        settings = {"part": args.part, "seeds": seeds, "flags": flags, "data": args.data.name}
        complete = all(map(finished, runs))
        write(record("evidence", settings, cores=len(os.sched_getaffinity(0)), complete=complete, runs=found), args.out)

    file = args.workdir / f"{part.name}.npz"
    if not file.exists() and not args.data.exists():
        raise SystemExit(f"--data {args.data} does not exist")
    images = file if file.exists() else part.images(args.data, file)
    todo = [run for run in runs if not finished(run) and run.backbone in (args.backbones or [run.backbone])]
    commands = {part.folder(run, flags): part.command(run, images, args.workdir, flags) for run in todo}
    failed = train(commands, [None] if part.together else sorted(os.sched_getaffinity(0)), args.minutes, keep)
    keep()
    for claim in claims(args.part):
        if judged := judge(claim, found):
            print(f"{sides(claim)}: {judged.difference:+.1f} +- {judged.half_width:.1f} points, {judged.verdict} ({claim.source})")
    left = sum(not finished(run) for run in runs)
    print(f"{len(runs) - left} of {len(runs)} runs are finished" + (": the same command goes on" if left else ""))
    if failed:
        raise SystemExit("; ".join(failed))
