"""The papers' claims on real images: small models on a part of Fashion-MNIST, with every scheme and three seeds, and what their order says.

    python -m benchmarks evidence vit --data FOLDER --out benchmarks/results/evidence_vit_cpu.json
    python -m benchmarks evidence backbones --data FOLDER --out benchmarks/results/evidence_backbones_cpu.json

FOLDER holds the official files of Fashion-MNIST. Trains each (backbone, scheme, seed) by the command that a user would type, as many at a
time as there are cores, one core each. What an earlier call left in the workdir is taken up: `--minutes 8` stops after eight minutes, and
the same command goes on. The result holds what is finished. Differences are taken seed by seed; their intervals are 95 % (Student's t).
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from scipy import stats

from benchmarks._record import record, write
from rope_jax import data

TRAINING, TEST = 10_000, 5_000
SEEDS = (0, 1, 2)
_LAPE = [scheme for inner in ("ape", "sincos1d", "sincos2d") for scheme in (inner, f"lape({inner})")]
_FRACTIONS = [f"axial_rope(k_rope={k})" for k in (1, 2, 4, 8)]
VIT = ["none", *_LAPE, "rpb", "rope2d", "rope_mixed", *_FRACTIONS, "axial_rope(shared=True)", "rope_mixed+ape", "rope_mixed+rpb"]
_BASIC = ["none", "rpb", "axial_rope"]
PARTS: dict[str, list[tuple[str, str | None]]] = {
    "vit": [("vit", position) for position in VIT],
    "backbones": [
        *((backbone, position) for backbone in ("swin", "nat", "dinat", "cct") for position in _BASIC),
        *(("cat", position) for position in (None, "none", "axial_rope")),
        ("cat_no_imprint", None),
        ("cat_vit", None),
    ],
}


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


def claims() -> Iterator[Claim]:
    """Every claim that the runs can test."""
    for backbone in ("vit", "swin", "nat", "dinat", "cct"):
        axial = "axial_rope(k_rope=2)" if backbone == "vit" else "axial_rope"
        yield Claim("thesis, table 4.1", (backbone, "rpb"), (backbone, "none"))
        yield Claim("thesis, table 4.1", (backbone, axial), (backbone, "rpb"))
    for fraction in _FRACTIONS[1:]:
        yield Claim("thesis, tables 4.2 and 4.3: a part of the channels is enough", ("vit", fraction), ("vit", _FRACTIONS[0]), equal=True)
    for position in ("rope2d", "rope_mixed"):
        for resolution in (12, 16, 28, 32):
            yield Claim("Heo et al., figures 4 and 5", ("vit", position), ("vit", "ape"), resolution)
    for resolution in (12, 16):
        yield Claim("Heo et al., table 5", ("vit", "rope_mixed+ape"), ("vit", "rope_mixed"), resolution)
    for inner in ("ape", "sincos1d", "sincos2d"):
        yield Claim("LaPE, inner embeddings of DeiT-Ti", ("vit", f"lape({inner})"), ("vit", inner))
    yield Claim("CAT, table 1", ("cat", None), ("cat_vit", None))
    yield Claim("CAT, table 4", ("cat", None), ("cat_no_imprint", None))


def prepare(folder: pathlib.Path, workdir: pathlib.Path) -> pathlib.Path:
    """Writes the part of Fashion-MNIST that is used into one file, once: the first images of either split."""
    path = workdir / "fashion_mnist.npz"
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for split, count in (("train", TRAINING), ("test", TEST)):
            images = data.load("idx", str(folder), split)
            arrays |= {f"{split}_images": images.images[:count, :, :, 0], f"{split}_labels": images.labels[:count]}
        temporary = path.with_name("incomplete.npz")
        np.savez(temporary, **arrays)
        temporary.replace(path)
    return path


def folder_of(run: tuple[str, str | None, int]) -> str:
    """The name of a run's workdir."""
    backbone, position, seed = run
    return f"{backbone}-{position or 'default'}-{seed}"


def start(run: tuple[str, str | None, int], images: pathlib.Path, workdir: pathlib.Path, core: int, flags: list[str]) -> subprocess.Popen:
    """Starts one run on one core."""
    backbone, position, seed = run
    arguments = {"path": images, "backbone": backbone, "position": position, "seed": seed}
    recipe = "configs/evidence.py:" + ",".join(f"{key}={value}" for key, value in arguments.items() if value is not None)
    command = [sys.executable, "-m", "rope_jax.main", f"--config={recipe}", f"--workdir={workdir / folder_of(run)}", *flags]
    pinned = lambda: os.sched_setaffinity(0, {core})  # XLA makes as many threads as it may use cores
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=pinned)


def train(runs: list[tuple[str, str | None, int]], images: pathlib.Path, workdir: pathlib.Path, minutes: float, flags: list[str]) -> None:
    """Trains what is not finished, until the time is up; what runs then is stopped, and saved.

    Raises:
        RuntimeError: a run failed.
    """
    free, running, waiting = sorted(os.sched_getaffinity(0)), {}, list(runs)
    end = time.monotonic() + 60 * minutes
    try:
        while running or (waiting and time.monotonic() < end):
            for run, (process, core) in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[run]
                    free.append(core)
                    if status:
                        raise RuntimeError(f"{folder_of(run)} ended with status {status}")
            while waiting and free and time.monotonic() < end:
                running[waiting[0]] = (start(waiting[0], images, workdir, free[-1], flags), free.pop())
                print(f"{len(runs) - len(waiting) + 1} of {len(runs)}: {folder_of(waiting.pop(0))}", flush=True)
            if time.monotonic() >= end:
                for process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
                for process, _ in running.values():
                    process.wait()
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()


def collect(runs: list[tuple[str, str | None, int]], workdir: pathlib.Path) -> list[dict]:
    """What the finished runs reached."""
    found = []
    for run in runs:
        path = workdir / folder_of(run) / "results.json"
        if path.exists():
            rows = [{key: row[key] for key in ("resolution", "top1", "count")} for row in json.loads(path.read_text())["eval"]]
            found.append({"backbone": run[0], "position": run[1], "seed": run[2], "eval": rows})
    return found


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


def judge(claim: Claim, found: list[dict]) -> dict | None:
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
    return dataclasses.asdict(claim) | {"difference": mean, "half_width": half, "seeds": len(seeds), "verdict": verdict}


def sides(judged: dict) -> str:
    """What a claim compares, for a person."""
    better, worse = (
        f"`{backbone}`" + (f" with `{position}`" if position else "") for backbone, position in (judged["better"], judged["worse"])
    )
    where = "" if judged["resolution"] is None else f" at {judged['resolution']} px"
    return f"{better} {'equal to' if judged['equal'] else 'above'} {worse}{where}"


def main(argv: list[str]) -> None:
    """Trains, collects, judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks evidence", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder with the official files of Fashion-MNIST")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/evidence"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long; the same command goes on")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--flags", nargs="*", default=[], help="more flags for every run, for example --config.epochs=0.1")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    runs = [(backbone, position, seed) for seed in args.seeds for backbone, position in PARTS[args.part]]
    train(runs, prepare(args.data, args.workdir), args.workdir, args.minutes, args.flags)
    found = collect(runs, args.workdir)
    judged = [verdict for claim in claims() if (verdict := judge(claim, found))]
    for each in judged:
        print(f"{sides(each)}: {each['difference']:+.1f} +- {each['half_width']:.1f} points, {each['verdict']} ({each['source']})")
    complete = len(found) == len(runs)
    settings = {"part": args.part, "seeds": list(args.seeds), "flags": args.flags, "training": TRAINING, "test": TEST}
    figures = {"cores": len(os.sched_getaffinity(0)), "complete": complete, "runs": found, "claims": judged}
    write(record("evidence", settings, **figures), args.out)
    print(f"{len(found)} of {len(runs)} runs are finished" + ("" if complete else ": the same command goes on"))
