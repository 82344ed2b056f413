"""The page that compares finished runs: tables and pictures of their scores, and their differences.

Runs that differ only in their seed share a row, with the mean and its 95 % confidence interval, as
do the seeds of one workdir.
"""

import collections
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rope_jax.analysis import plots
from rope_jax.analysis.analyses import OF_MODEL, analyse_model
from rope_jax.analysis.comparison import (
    Estimates,
    paired_differences,
    score,
    scores,
    table_by_size,
)
from rope_jax.analysis.intervals import Estimate, percent
from rope_jax.analysis.page import paragraph, picture, table, to_html
from rope_jax.analysis.runs import Groups, RunResults
from rope_jax.config import ConfigError, differences, in_one_line
from rope_jax.evaluate.curves import accuracy_against_resolution, available
from rope_jax.evaluate.results import (
    FRACTIONS,
    class_names,
    class_score,
    main_score,
    row_task,
)
from rope_jax.names.text import format_table, size_text
from rope_jax.runs.loading import load_run
from rope_jax.training.kernels import kernels_of_run

# Pictures of `python -m rope_jax.analysis`, by file name, with captions.
_PICTURES = {
    "attention_distance": "mean distance of attention in tokens, by layer",
    "attention_entropy": "entropy of attention in nats, by layer",
    "maps": "attention of one token on an image, by layer",
    "fourier": "a point reconstructed from the frequencies of the rotation",
    "decay": "how scores fall with distance",
    "learned": "learned frequencies before and after training",
    "correlation": "cosine similarity of one position with all others, by layer",
}
_OF_THE_PAPERS = ("imagenet", "cifar10", "cifar100", "coco", "ade20k")  # data sets
_BESIDE = "rope_jax reproduce --runs=WORKDIR lists these numbers beside those of the papers."


def _all_runs(groups: Groups) -> list[RunResults]:
    return [run for group in groups.values() for run in group]


def _draw_picture(
    caption: str, path: pathlib.Path, draw: Callable[..., Any], *arguments: Any, **options: Any
) -> list[str]:
    """Draws a picture by a function of `plots`; none without matplotlib."""
    if not available():
        return []
    draw(*arguments, path, **options)
    return [picture(path, caption)]


def _accuracy(groups: Groups, estimates: Estimates, out: pathlib.Path) -> list[str]:
    """Table and picture of accuracy at each resolution."""
    first = _all_runs(groups)[0].rows[0]
    label, name = row_task(first).score_name, main_score(first)
    over_images = ", Wilson's over images for a single run"
    alone = over_images if name in FRACTIONS else "; a single run has none"
    text = (
        f"{_sentence(label)} in percent ({first['dataset']} {first['split']}, "
        f"{first['count']:,} images). The first size is that of training. Of several "
        f"evaluation crops the first counts; the others are below. Intervals are 95 %: "
        f"Student's t over runs with several seeds{alone}."
    )
    (position, *sizes), rows = table_by_size(estimates, Estimate.text)
    rows = [[group, str(len(groups[group])), *cells] for group, *cells in rows]
    means = {
        group: [
            first | {"resolution": size, name: estimate.mean} for size, estimate in by_size.items()
        ]
        for group, by_size in estimates.items()
    }
    return [
        paragraph(text),
        *(paragraph(f"Other differences: {note}") for note in unlike(groups)),
        table([position, "seeds", *sizes], rows),
        *_draw_picture(
            f"{label} over test resolution, a line per scheme, training resolution in grey",
            out / "comparison.png",
            accuracy_against_resolution,
            means,
        ),
        *[paragraph(_BESIDE)][: first["dataset"] in _OF_THE_PAPERS],
    ]


def _sentence(name: str) -> str:
    """The name of a score at the start of a sentence."""
    return name[0].upper() + name[1:]


def unlike(groups: Groups) -> list[str]:
    """Differences from the first row that labels do not show: settings, and training steps.

    Returns:
        One sentence for each row that differs.
    """
    (name, (first, *_)), *others = groups.items()
    sentences = []
    for label, (run, *_) in others:
        changed = differences(
            first.config, run.config, allowed=("model.position", "model.options", "seed")
        )
        if run.step != first.step:
            changed.append(f"steps: {first.step:,} -> {run.step:,}")
        if changed:
            sentences.append(f"{name} -> {label}: {'; '.join(changed)}.")
    return sentences


def _differences(groups: Groups, estimates: Estimates, out: pathlib.Path) -> list[str]:
    """Table and picture of the differences in accuracy from the first row."""
    if not estimates:
        return []
    base, first = next(iter(groups)), _all_runs(groups)[0].rows[0]
    label = row_task(first).score_name
    single = "Newcombe's over images, as if each run had been tested on images of its own"
    text = (
        f"Difference in {label} from {base}, in percentage points, with intervals of 95 %: of "
        "several seeds Student's t over the differences of equal seeds, for these test images; of "
        f"one seed {single if main_score(first) in FRACTIONS else 'none'}. They are not widened "
        "for the number of comparisons."
    )
    return [
        paragraph(text),
        table(*_table_of_differences(estimates)),
        *_draw_picture(
            f"difference in {label} from {base}, with intervals",
            out / "differences.png",
            plots.differences,
            estimates,
            base=base,
            score=label,
        ),
    ]


def _table_of_differences(estimates: Estimates) -> tuple[list[str], list[list[str]]]:
    return table_by_size(estimates, lambda estimate: estimate.text("+"))


def _training(groups: Groups, out: pathlib.Path) -> list[str]:
    """Loss over steps, and speed, of the first seed of each group."""
    metrics = {name: group[0].metrics for name, group in groups.items() if group[0].metrics}
    if not metrics:
        return []
    curves = {
        name: ([line["step"] for line in lines], [line["loss"] for line in lines])
        for name, lines in metrics.items()
    }
    rows = [
        (name, f"{steps[-1]:,}", f"{losses[-1]:.4f}", _median_speed(metrics[name]))
        for name, (steps, losses) in curves.items()
    ]
    return [
        *_draw_picture(
            "training loss over steps, a line per scheme",
            out / "loss.png",
            plots.lines,
            curves,
            x="step",
            y="training loss",
            title="Training loss (first seeds)",
        ),
        table(("position", "steps", "last loss", "images per second (median)"), rows),
    ]


def _median_speed(lines: Sequence[dict[str, Any]]) -> str:
    speeds = [line["images_per_second"] for line in lines if "images_per_second" in line]
    return f"{np.median(speeds):,.0f}" if speeds else "-"


def _classes(groups: Groups) -> list[str]:
    """The score of each class at the training resolution, of the first seeds.

    Empty unless all runs have the same score for the same classes.
    """
    rows = {name: group[0].rows[0] for name, group in groups.items()}
    first = next(iter(rows.values()))
    comparable = lambda row: class_score(row) == by_class and class_names(row) == class_names(first)
    if (by_class := class_score(first)) is None or not all(map(comparable, rows.values())):
        return []
    name, words = by_class
    columns = [map(percent, row[name]) for row in rows.values()]
    return [
        paragraph(f"{_sentence(words)} in percent, at the training resolution."),
        table(("class", *rows), list(zip(class_names(first), *columns, strict=True))),
    ]


def _evaluations(runs: Sequence[RunResults]) -> list[str]:
    """Results with further crops, and those of `python -m rope_jax.evaluate`."""
    seed_counts = collections.Counter(run.workdir for run in runs)
    first = runs[0].rows[0]
    titles = {name: title for name, title in row_task(first).titles.items() if name in first}
    _, *others = titles
    rows = []
    for run in runs:
        seed = f", seed {run.config.seed}" if seed_counts[run.workdir] > 1 else ""
        for row in run.further_rows:
            rows.append(
                (
                    f"{run.workdir.name}{seed}",
                    row["dataset"],
                    size_text(row["resolution"]),
                    score([row]).text(),
                    *(percent(row.get(name)) for name in others),
                    row["protocol"],
                )
            )
    header = ("workdir", "data", "resolution", *titles.values(), "protocol")
    return [table(header, rows)] if rows else []


def _analyses(runs: Sequence[RunResults]) -> list[str]:
    """The pictures of `python -m rope_jax.analysis` in the workdirs."""
    models = {run.workdir: run.config.model for run in runs}
    return [
        picture(path, f"{model.name} with {model.position}: {caption}")
        for workdir, model in models.items()
        for name, caption in _PICTURES.items()
        if (path := workdir / f"{name}.png").exists()
    ]


def _runs(runs: Sequence[RunResults]) -> list[str]:
    """The runs and the protocols of their evaluation."""
    rows = [
        (run.workdir.name, model.name, model.position, str(run.config.seed), f"{run.step:,}")
        for run in runs
        for model in [run.config.model]
    ]
    protocols = dict.fromkeys(row["protocol"] for run in runs for row in run.rows)
    return [
        table(("workdir", "model", "position", "seed", "step"), rows),
        *(paragraph(f"Protocol: {protocol}.") for protocol in protocols),
    ]


def analyse(run: RunResults) -> None:
    """Draws all pictures of `analyses` that the run's scheme supports, in its workdir."""
    loaded = load_run(str(run.workdir))
    with kernels_of_run(loaded.config, run.workdir):
        for name in OF_MODEL:
            try:
                analyse_model(name, loaded, run.workdir / name)
            except (ConfigError, ValueError, OSError) as error:  # not of this scheme or model
                print(f"{name}: {in_one_line(error)}", file=sys.stderr)


def print_report(groups: Groups, out: pathlib.Path) -> None:
    """Writes comparison.txt, report.html and its pictures, and prints the table and the paths."""
    out.mkdir(parents=True, exist_ok=True)
    runs, estimates, gains = _all_runs(groups), scores(groups), paired_differences(groups)
    text = format_table(*table_by_size(estimates, lambda estimate: percent(estimate.mean)))
    text += "".join(f"\nother differences: {note}" for note in unlike(groups))
    if gains:
        title = f"difference from {next(iter(groups))} in percentage points [95 % interval]"
        text += f"\n\n{title}\n\n{format_table(*_table_of_differences(gains))}"
    (out / "comparison.txt").write_text(text + "\n")
    sections = {
        "Accuracy": _accuracy(groups, estimates, out),
        "Differences": _differences(groups, gains, out),
        "Training": _training(groups, out),
        "Classes": _classes(groups),
        "Further evaluations": _evaluations(runs),
        "Attention and position": _analyses(runs),
        "Runs": _runs(runs),
    }
    models = ", ".join(dict.fromkeys(run.config.model.name for run in runs))
    (out / "report.html").write_text(to_html(f"Positional schemes compared: {models}", sections))
    label = row_task(runs[0].rows[0]).score_name
    print(f"{label} (%) at test resolution; trained at the first one\n\n{text}\n")
    print(f"table: {out / 'comparison.txt'}")
    if available():
        print(f"picture: {out / 'comparison.png'}")
    else:
        print("no pictures: matplotlib is not installed (pip install 'rope_jax[plot]')")
    print(f"report: {out / 'report.html'}")
