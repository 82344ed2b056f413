"""Trained models at half to three times their training size, with each rule for rotary embeddings.

    python -m experiments extend runs/compare/rope2d runs/compare/rope_mixed --out FILE.json

The rules are those of `rope_jax.positions.extension`; they replace the options of the scheme, which
must be rotary. Each workdir of the command line is evaluated on its own test split, or on its first
images (`--images 2000`). Rows in the file of --out are not evaluated again: the same command
continues one that was interrupted.
Differences from "none" are computed per seed; intervals are 95 % (Student's t).
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from benchmarks._runner import Keep, earlier_result
from rope_jax.analysis.intervals import student
from rope_jax.config import Config, resolve_stored
from rope_jax.data import Images, Streamed
from rope_jax.evaluate.accuracy import model_evaluator
from rope_jax.evaluate.results import main_score
from rope_jax.names.notation import Call, parse
from rope_jax.names.text import markdown_table
from rope_jax.positions.extension import Extension
from rope_jax.runs.restore import read_checkpoint
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import read_json
from rope_jax.tasks.dense import side_multiple
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
Table = dict[str, Any]  # columns and rows of text, and a note
Row = dict[str, Any]  # run, step, seed, model, position, rule, resolution, score, count


def sizes(model: nnx.Module, scales: Sequence[float]) -> list[Size]:
    """The image sizes closest to multiples of the training size that the model accepts."""
    least = side_multiple(model.grids)
    candidates = [
        tuple(max(1, round(side * scale / least)) * least for side in model.trained_size)
        for scale in scales
    ]
    return list(dict.fromkeys(candidates))


def spell_out(rule: str) -> str:
    """Writes a rule with all its options, which replace those of the scheme.

    >>> spell_out("yarn(beta=4)")
    'yarn(log_scale=False,alpha=1.0,beta=4)'
    """
    (call,) = parse(rule, "rules")
    options = dataclasses.asdict(Extension()) | dict(call.options)
    del options["extend"]
    return str(Call(call.name, options=tuple(options.items())))


def evaluate_run(
    run: pathlib.Path,
    seed: int,
    rules: Sequence[str],
    scales: Sequence[float],
    count: int | None,
    done: list[Row],
) -> Iterator[Row]:
    """Evaluates one model: yields the rows that are not in `done`."""
    model, config, step = read_checkpoint(str(run), seed=seed)
    identity = {"run": str(run), "step": step, "seed": seed}
    identity |= {"model": model.name, "position": model.notation}
    for size in sizes(model, scales):
        trained = size == tuple(model.trained_size)  # where all rules are the same
        rows = [
            identity | {"rule": x, "resolution": list(size)}
            for x in rules
            if x == "none" or not trained
        ]
        todo = [row for row in rows if not any(row.items() <= other.items() for other in done)]
        images = first_images(load_split(config, "test", size), count) if todo else None
        for row in todo:
            yield row | score(model, config, images, row["rule"])


def first_images(images: Images | Streamed, count: int | None) -> Images | Streamed:
    """The first images of a split; all with None."""
    if count is None:
        return images
    if not images.in_memory:
        raise SystemExit(f"--images {count}: {images.name} is not in memory; leave it out")
    return dataclasses.replace(images, images=images.images[:count], labels=images.labels[:count])


def score(model: nnx.Module, config: Config, images: Any, rule: str) -> Row:
    """Main score (a fraction) of a model on images with a rule, and the number of images."""
    windows = config.eval.scale_windows
    evaluator = model_evaluator(model, config, scale_windows=windows, extend=spell_out(rule))
    (row,) = evaluator.score(images)
    return {"score": row[main_score(row)], "count": row["count"]}


def spread(values: Sequence[float], sign: str = "") -> str:
    """Formats mean and 95 % interval; the sign may be "+".

    >>> spread([1.0, 3.0])
    '2.0 ± 12.7'
    """
    mean, half = student(values)
    return f"{mean:{sign}.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")


def rules_table(rows: Sequence[Row]) -> Table:
    """Scores with "none" by scheme and size, and the differences of the other rules from them."""
    at = sorted({tuple(row["resolution"]) for row in rows})
    scores: dict[tuple, dict] = collections.defaultdict(dict)
    for row in rows:
        key = row["model"], row["position"], row["rule"], tuple(row["resolution"])
        scores[key][row["run"], row.get("seed")] = 100 * row["score"]
    lines = []
    for model, position, rule in dict.fromkeys(key[:3] for key in scores):
        cells = []
        for size in at:
            with_rule, base = (scores[model, position, x, size] for x in (rule, "none"))
            if rule == "none":
                cells.append(spread(list(base.values())))
            elif values := [with_rule[key] - base[key] for key in with_rule if key in base]:
                mean, half = student(values)
                text = spread(values, "+")
                cells.append(f"**{text}**" if mean > half else text)
            else:
                cells.append("")
        lines.append([f"`{model}`", f"`{position}`", f"`{rule}`", *cells])
    columns = ["model", "position", "rule", *("{}x{} px".format(*size) for size in at)]
    note = (
        f"Scores (%) of {rows[0]['count']:,} test images with `none`, the schemes' own rule, and "
        "differences from it in points: mean and 95 % interval over seeds. Bold: above it, by an "
        "interval that does not contain zero; chance alone puts about one in forty there."
    )
    return {"columns": columns, "rows": lines, "note": note}


def run(
    keep: Keep,
    runs: list[pathlib.Path],
    *,
    rules: list[str] = RULES,
    scales: list[float] = SCALES,
    images: int | None = None,
    out: pathlib.Path | None = None,
) -> None:
    """Evaluates trained models with every rule at every scale.

    Args:
        keep: saves the result.
        runs: workdirs of runs
        rules: rules, none among them
        scales: multiples of the training resolution
        images: first test images to evaluate; default: all
        out: the JSON file; rows that it holds are not evaluated again.
    """
    if not runs or "none" not in rules:
        raise SystemExit("name the workdirs of runs, and rules with none among them")
    keep_compiled()
    settings = {"rules": rules, "scales": scales, "images": images}
    rows = earlier_result(out, "extend", settings).get("rows", [])
    paths = {folder: folder / "config.json" for folder in runs}
    configs = {folder: resolve_stored(read_json(path), path) for folder, path in paths.items()}
    for workdir, seed in [(x, seed) for x, config in configs.items() for seed in config.all_seeds]:
        for row in evaluate_run(workdir, seed, rules, scales, images, rows):
            rows.append(row)
            keep(settings=settings, rows=rows, complete=False, tables=[rules_table(rows)])
            side = "x".join(map(str, row["resolution"]))
            label = f"{row['position']} (seed {seed}), {side} px, {row['rule']}"
            print(f"{label}: {row['score']:.1%}", flush=True)
    table = rules_table(rows)
    keep(settings=settings, rows=rows, complete=True, tables=[table])
    print(markdown_table(table["columns"], table["rows"]))
