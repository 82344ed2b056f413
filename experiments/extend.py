"""Trained models at half to three times their size, with each rule for rotary embeddings.

    python -m experiments extend runs/evidence/vit-* --out experiments/results/extend_cpu.json

The rules are those of `rope_jax.positions.extension`; "none" is that of the scheme. Each workdir of
the command line is evaluated on its own test split, models without a rotation with "none" only.
Rows in the file of --out are not evaluated again: `--minutes 8` stops after eight minutes, and the
same command continues. Differences from "none" are computed per seed; intervals are 95 %
(Student's t).
"""

import json
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from benchmarks._runner import Keep
from experiments._claims import interval
from rope_jax.config import Config
from rope_jax.evaluate import at_resolution, evaluate_split
from rope_jax.evaluate.accuracy import on_all_devices, protocol
from rope_jax.evaluate.results import main_score
from rope_jax.evaluate.segments import side_multiple
from rope_jax.restore import read_checkpoint
from rope_jax.sharding import make_mesh
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
Row = dict[str, Any]  # run, step, model, position, seed, rule, scale, resolution, score


def sizes(model: nnx.Module, scales: Sequence[float]) -> dict[float, tuple[int, int]]:
    """The image size of each scale that is next to it among those that the model takes."""
    least = side_multiple(model.grids)
    return {
        scale: tuple(max(1, round(side * scale / least)) * least for side in model.trained_size)
        for scale in scales
    }


def rules_of(model: nnx.Module, scale: float, rules: Sequence[str]) -> list[str]:
    """The rules that may differ: at the size of training, or without a rotation, there is one."""
    rotary = any(getattr(m, "extension", None) is not None for _, m in nnx.iter_modules(model))
    return list(rules) if rotary and scale != 1 else [rule for rule in rules if rule == "none"]


def seeds_of(run: pathlib.Path) -> list[int]:
    """The seeds of the models in a workdir."""
    config = json.loads((run / "config.json").read_text())
    return list(range(config["seed"], config["seed"] + config["seeds"]))


def rows_of(
    run: pathlib.Path, seed: int, rules: Sequence[str], scales: Sequence[float], found: list[Row]
) -> Iterator[Row]:
    """Evaluates one model: the rows that are not in `found`, one after the other."""
    model, config, step = read_checkpoint(str(run), seed=seed)
    about = {"run": str(run), "step": step, "seed": seed}
    about |= {"model": model.name, "position": model.notation}
    for scale, size in sizes(model, scales).items():
        images = None
        for rule in rules_of(model, scale, rules):
            row = about | {"rule": rule, "scale": scale, "resolution": list(size)}
            if any(row.items() <= other.items() for other in found):
                continue
            images = load_split(config, "test", size) if images is None else images
            yield row | {"score": score(model, config, images, size, rule)}


def score(
    model: nnx.Module, config: Config, images: Any, size: tuple[int, int], rule: str
) -> float:
    """The main score of a model, a fraction, at a size and with a rule."""
    copy = at_resolution(
        model,
        size,
        scale_windows=config.eval.scale_windows,
        extend=None if rule == "none" else rule,
    )
    mesh = make_mesh()
    how = protocol(images, config, copy.window_rule())
    (row,) = evaluate_split(*on_all_devices(copy, mesh), config, images, mesh, how)
    return row[main_score(row)]


def differences(
    rows: Sequence[Row], model: str, position: str, rule: str, scale: float
) -> list[float]:
    """A rule's scores less those of "none" in points, by seed; of "none" the scores in per cent."""
    own = {
        name: {
            (row["run"], row["seed"]): 100 * row["score"]
            for row in rows
            if (row["model"], row["position"]) == (model, position)
            and (row["rule"], row["scale"]) == (name, scale)
        }
        for name in ("none", rule)
    }
    if rule == "none":
        return list(own["none"].values())
    return [own[rule][key] - own["none"][key] for key in own[rule] if key in own["none"]]


def helping(rows: Sequence[Row], model: str, position: str) -> dict[float, list[str]]:
    """The rules that are above "none" at each scale: their intervals are above zero."""
    found: dict[float, list[str]] = {}
    for scale in sorted({row["scale"] for row in rows}):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            values = differences(rows, model, position, rule, scale)
            if rule != "none" and len(values) > 1:
                mean, half = interval(values)
                if mean > half:
                    found.setdefault(scale, []).append(rule)
    return found


def run(
    keep: Keep,
    runs: list[pathlib.Path],
    *,
    rules: list[str] = RULES,
    scales: list[float] = SCALES,
    minutes: float = math.inf,
    out: pathlib.Path | None = None,
) -> None:
    """Evaluates trained models with every rule at every scale.

    Args:
        keep: saves the result.
        runs: workdirs of runs
        rules: rules, none among them
        scales: multiples of the size of training
        minutes: time limit; the same command continues
        out: the JSON file; rows that it holds are not evaluated again.
    """
    if not runs or "none" not in rules:
        raise SystemExit("name the workdirs of runs, and rules with none among them")
    found, end = earlier(out), time.monotonic() + 60 * minutes
    for workdir, seed in [(folder, seed) for folder in runs for seed in seeds_of(folder)]:
        for row in rows_of(workdir, seed, rules, scales, found):
            found.append(row)
            keep(settings={"rules": rules, "scales": scales}, rows=found)
            told = (
                f"{row['position']} (seed {seed}), {row['scale']:g} times the size, {row['rule']}"
            )
            print(f"{told}: {row['score']:.1%}", flush=True)
            if time.monotonic() > end:
                print("not all rows are evaluated; run the same command again to continue")
                return
    for model, position in dict.fromkeys((row["model"], row["position"]) for row in found):
        for scale, best in helping(found, model, position).items():
            print(f"{model}, {position}, {scale:g} times the size: above none: {', '.join(best)}")


def earlier(out: pathlib.Path | None) -> list[Row]:
    """The rows in the file of an earlier call."""
    if out is None or not out.exists():
        return []
    result = json.loads(out.read_text())
    if result["benchmark"] != "extend":
        raise SystemExit(f"{out} holds a result of {result['benchmark']}: use another file")
    return result["rows"]
