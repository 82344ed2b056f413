"""Trained models at half to three times their size, with each rule for rotary embeddings.

    python -m experiments extend runs/evidence/fashion-vit-* --out FILE.json

The rules are those of `rope_jax.positions.extension`, whatever the options of the scheme; models
without a rotation have the rule "none" only. Each workdir of the command line is evaluated on its
own test split, or on the first images of it (`--images 2000`). Rows in the file of --out are not
evaluated again: `--minutes 8` stops after eight minutes, and the same command continues.
Differences from "none" are computed per seed; intervals are 95 % (Student's t). The experiment
`evidence` does this at the end of its runs; the documentation shows the rows in its result.
"""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from benchmarks._runner import Keep
from experiments._claims import interval
from rope_jax.compilation import keep_compiled
from rope_jax.config import Config
from rope_jax.evaluate import at_resolution, evaluate_split
from rope_jax.evaluate.accuracy import on_all_devices, protocol
from rope_jax.evaluate.results import main_score
from rope_jax.evaluate.segments import side_multiple
from rope_jax.positions.extension import Extension
from rope_jax.restore import read_checkpoint
from rope_jax.sharding import make_mesh
from rope_jax.text import Call, parse
from rope_jax.training.setup import load_split

RULES = [
    "none",
    "extrapolate",
    "interpolate",
    "ntk",
    "yarn",
    "yarn(beta=4)",
    "none(log_scale=True)",
    "ntk(log_scale=True)",
]
SCALES = [0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
Size = tuple[int, int]
Row = dict[str, Any]  # run, step, seed, model, position, rule, resolution, score, count


def sizes(model: nnx.Module, scales: Sequence[float]) -> list[Size]:
    """The image sizes next to multiples of that of training, among those that the model takes."""
    least = side_multiple(model.grids)
    found = [
        tuple(max(1, round(side * scale / least)) * least for side in model.trained_size)
        for scale in scales
    ]
    return list(dict.fromkeys(found))


def rotates(model: nnx.Module) -> bool:
    """Whether a model has a scheme to which the rules apply."""
    return any(
        getattr(module, "extension", None) is not None for _, module in nnx.iter_modules(model)
    )


def rules_of(model: nnx.Module, size: Size, rules: Sequence[str]) -> list[str]:
    """The rules that may differ: at the size of training, or without a rotation, there is one."""
    every = rotates(model) and size != tuple(model.trained_size)
    return list(rules) if every else [rule for rule in rules if rule == "none"]


def whole(rule: str) -> str:
    """A rule with all its options, which replace those of the scheme.

    >>> whole("yarn(beta=4)")
    'yarn(log_scale=False,alpha=1.0,beta=4)'
    """
    (call,) = parse(rule, "rules")
    options = dataclasses.asdict(Extension()) | dict(call.options)
    del options["extend"]
    return str(Call(call.name, options=tuple(options.items())))


def seeds_of(run: pathlib.Path) -> list[int]:
    """The seeds of the models in a workdir."""
    config = json.loads((run / "config.json").read_text())
    return list(range(config["seed"], config["seed"] + config["seeds"]))


def rows_of(
    run: pathlib.Path,
    seed: int,
    rules: Sequence[str],
    scales: Sequence[float],
    count: int | None,
    found: list[Row],
) -> Iterator[Row]:
    """Evaluates one model: the rows that are not in `found`, one after the other."""
    model, config, step = read_checkpoint(str(run), seed=seed)
    about = {"run": str(run), "step": step, "seed": seed}
    about |= {"model": model.name, "position": model.notation}
    for size in sizes(model, scales):
        images = None
        for rule in rules_of(model, size, rules):
            row = about | {"rule": rule, "resolution": list(size)}
            if any(row.items() <= other.items() for other in found):
                continue
            images = first_images(config, size, count) if images is None else images
            yield row | score(model, config, images, size, rule)


def first_images(config: Config, size: Size, count: int | None) -> Any:
    """The test split of a run at a size, or its first images."""
    images = load_split(config, "test", size)
    if count is None:
        return images
    if not images.in_memory:
        raise SystemExit(f"--images {count}: {images.name} is not in memory; leave it out")
    return dataclasses.replace(images, images=images.images[:count], labels=images.labels[:count])


def score(model: nnx.Module, config: Config, images: Any, size: Size, rule: str) -> Row:
    """The main score of a model at a size and with a rule, a fraction, and its number of images."""
    copy = at_resolution(
        model,
        size,
        scale_windows=config.eval.scale_windows,
        extend=whole(rule) if rotates(model) else None,
    )
    mesh = make_mesh()
    how = protocol(images, config, copy.window_rule())
    (row,) = evaluate_split(*on_all_devices(copy, mesh), config, images, mesh, how)
    return {"score": row[main_score(row)], "count": row["count"]}


def differences(
    rows: Sequence[Row], model: str, position: str, rule: str, size: Sequence[int]
) -> list[float]:
    """A rule's scores less those of "none" in points, by seed; of "none" the scores in per cent."""
    own = {
        name: {
            (row["run"], row["seed"]): 100 * row["score"]
            for row in rows
            if (row["model"], row["position"]) == (model, position)
            and (row["rule"], row["resolution"]) == (name, list(size))
        }
        for name in ("none", rule)
    }
    if rule == "none":
        return list(own["none"].values())
    return [own[rule][key] - own["none"][key] for key in own[rule] if key in own["none"]]


def resolutions(rows: Sequence[Row]) -> list[Size]:
    """The sizes of rows, the smallest first."""
    return sorted({tuple(row["resolution"]) for row in rows})


def helping(rows: Sequence[Row], model: str, position: str) -> dict[Size, list[str]]:
    """The rules that are above "none" at each size: their intervals are above zero."""
    found: dict[Size, list[str]] = {}
    for size in resolutions(rows):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            values = differences(rows, model, position, rule, size)
            if rule != "none" and len(values) > 1:
                mean, half = interval(values)
                if mean > half:
                    found.setdefault(size, []).append(rule)
    return found


def run(
    keep: Keep,
    runs: list[pathlib.Path],
    *,
    rules: list[str] = RULES,
    scales: list[float] = SCALES,
    images: int | None = None,
    minutes: float = math.inf,
    out: pathlib.Path | None = None,
) -> None:
    """Evaluates trained models with every rule at every scale.

    Args:
        keep: saves the result.
        runs: workdirs of runs
        rules: rules, none among them
        scales: multiples of the size of training
        images: first test images to evaluate; default: all
        minutes: time limit; the same command continues
        out: the JSON file; rows that it holds are not evaluated again.
    """
    if not runs or "none" not in rules:
        raise SystemExit("name the workdirs of runs, and rules with none among them")
    keep_compiled()
    settings = {"rules": rules, "scales": scales, "images": images}
    found, end = earlier(out, images), time.monotonic() + 60 * minutes
    for workdir, seed in [(folder, seed) for folder in runs for seed in seeds_of(folder)]:
        for row in rows_of(workdir, seed, rules, scales, images, found):
            found.append(row)
            keep(settings=settings, rows=found, complete=False)
            side = "x".join(map(str, row["resolution"]))
            told = f"{row['position']} (seed {seed}), {side} px, {row['rule']}"
            print(f"{told}: {row['score']:.1%}", flush=True)
            if time.monotonic() > end:
                print("not all rows are evaluated; run the same command again to continue")
                return
    keep(settings=settings, rows=found, complete=True)
    for model, position in dict.fromkeys((row["model"], row["position"]) for row in found):
        for (height, width), best in helping(found, model, position).items():
            print(f"{model}, {position}, {height}x{width} px: above none: {', '.join(best)}")


def earlier(out: pathlib.Path | None, images: int | None) -> list[Row]:
    """The rows in the file of an earlier call, which must be of as many images."""
    if out is None or not out.exists():
        return []
    result = json.loads(out.read_text())
    if result["benchmark"] != "extend":
        raise SystemExit(f"{out} holds a result of {result['benchmark']}: use another file")
    if result["settings"]["images"] != images:
        before = result["settings"]["images"]
        raise SystemExit(f"{out} holds rows of --images {before}, not {images}: use another file")
    return result["rows"]
