"""Compares finished runs on one page.

    python -m rope_jax.analysis.report WORKDIR [WORKDIR ...] [--out=FOLDER] [--analyse]

Writes report.html, which needs no other file and no network, its pictures, and comparison.txt. Runs
that differ only in their seed share a row, with the mean and its 95 % confidence interval; so do
the seeds of one workdir.
"""

import collections
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rope_jax.analysis import expected, plots
from rope_jax.analysis.differences import differences_table, paired_differences
from rope_jax.analysis.intervals import student, wilson
from rope_jax.analysis.page import paragraph, picture, table, to_html
from rope_jax.analysis.runs import (
    Groups,
    RunResults,
    group_runs,
    read_runs,
    rows_at,
    size_text,
    sizes_of,
)
from rope_jax.arguments import command_parser
from rope_jax.config import ConfigError, differences
from rope_jax.evaluate.results import (
    CLASS_SCORES,
    SCORES,
    SHARES,
    Row,
    class_names,
    class_score,
    main_score,
    score_name,
)
from rope_jax.text import format_table

# Pictures of `python -m rope_jax.analysis`, by file name, with captions. A name begins with that of
# the analysis.
_PICTURES = {
    "attention_distance": "mean distance of attention in tokens, by layer",
    "attention_entropy": "entropy of attention in nats, by layer",
    "maps": "attention of one token on an image, by layer",
    "fourier": "a point reconstructed from the frequencies of the rotation",
    "decay": "how scores fall with distance",
    "learned": "learned frequencies before and after training",
    "correlation": "cosine similarity of one position with all others, by layer",
}
_ANALYSES = dict.fromkeys(name.partition("_")[0] for name in _PICTURES)


def _scores(rows: Sequence[Row]) -> list[float]:
    """The main score of each row."""
    return [row[main_score(row)] for row in rows]


def _percent(share: float | None) -> str:
    """A share in percent; None, where there is nothing to score, as a dash."""
    return "-" if share is None else f"{100 * share:.1f}"


def percent(rows: Sequence[Row]) -> str:
    """Mean of the main score in percent."""
    return f"{100 * np.mean(_scores(rows)):.1f}"


def percent_with_interval(rows: Sequence[Row]) -> str:
    """The main score in percent with its interval: over images for one row, else over seeds.

    A mean over classes of a single row has none.
    """
    if len(rows) > 1:
        low, high = np.clip(student(_scores(rows)), 0, 1)
    elif main_score(rows[0]) in SHARES:
        low, high = wilson(*_scores(rows), rows[0]["count"])
    else:
        return percent(rows)
    return f"{percent(rows)} [{100 * low:.1f}, {100 * high:.1f}]"


def comparison(
    groups: Groups, cell: Callable[[Sequence[Row]], str]
) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a table of groups by resolutions, that of training first.

    Args:
        groups: from `group_runs`.
        cell: rows of one group at one resolution -> text.
    """
    sizes = sizes_of(_all_runs(groups))
    body = []
    for name, group in groups.items():
        found = [rows_at(group, size) for size in sizes]
        body.append([name, *(cell(rows) if rows else "-" for rows in found)])
    return ["position", *map(size_text, sizes)], body


def _all_runs(groups: Groups) -> list[RunResults]:
    return [run for group in groups.values() for run in group]


def sections(groups: Groups, out: pathlib.Path) -> dict[str, list[str]]:
    """The sections of the page; draws its pictures into the folder `out`."""
    runs = _all_runs(groups)
    found = {
        "Accuracy": _accuracy(groups, out),
        "Differences": _differences(groups, out),
        "Training": _training(groups, out),
        "Beside the papers": _papers(groups),
        "Classes": _classes(groups),
        "Further evaluations": _evaluations(runs),
        "Attention and position": _analyses(runs, out),
        "Runs": _runs(runs),
    }
    return {heading: blocks for heading, blocks in found.items() if blocks}


def _drawn(
    draw: Callable[..., pathlib.Path], caption: str, *given: Any, **options: Any
) -> list[str]:
    """The picture that a function of `plots` draws; none without matplotlib."""
    return [picture(draw(*given, **options), caption)] if plots.available() else []


def _accuracy(groups: Groups, out: pathlib.Path) -> list[str]:
    """Table and picture of accuracy at each resolution."""
    first = _all_runs(groups)[0].rows[0]
    what, seeds = score_name(first), "Student's t over runs with several seeds"
    single = main_score(first) in SHARES
    alone = ", Wilson's over images for a single run" if single else "; a single run has none"
    text = (
        f"{_sentence(what)} in percent ({first['dataset']} {first['split']}, "
        f"{first['count']:,} images). The first resolution is that of training. Of several "
        f"evaluation crops the first counts; the others are below. Intervals are of 95 %: "
        f"{seeds}{alone}."
    )
    header, body = comparison(groups, percent_with_interval)
    counts = [str(len(group)) for group in groups.values()]
    body = [[name, count, *cells] for (name, *cells), count in zip(body, counts, strict=True)]
    means = {}
    for name, group in groups.items():
        found = [rows_at(group, size) for size in sizes_of(group)]
        means[name] = [
            rows[0] | {main_score(rows[0]): float(np.mean(_scores(rows)))} for rows in found
        ]
    caption = f"{what} over test resolution, a line per scheme, training resolution in grey"
    return [
        paragraph(text),
        *(paragraph(f"Not alike: {note}") for note in unlike(groups)),
        table([header[0], "seeds", *header[1:]], body),
        *_drawn(plots.accuracy_against_resolution, caption, means, out / "comparison.png"),
    ]


def _sentence(name: str) -> str:
    """The name of a score at the start of a sentence."""
    return name[0].upper() + name[1:]


def unlike(groups: Groups) -> list[str]:
    """What else than the position differs from the first row: settings, and the steps of training.

    Returns:
        One sentence for each row that differs.
    """
    (name, (first, *_)), *others = groups.items()
    sentences = []
    for label, (run, *_) in others:
        allowed = ("model.position", "seed")
        changed = differences(first.config, run.config, allowed)
        if run.step != first.step:
            changed.append(f"steps: {first.step:,} -> {run.step:,}")
        if changed:
            sentences.append(f"{name} -> {label}: {'; '.join(changed)}.")
    return sentences


def _differences(groups: Groups, out: pathlib.Path) -> list[str]:
    """Table and picture of the differences in accuracy from the first row."""
    found = paired_differences(groups)
    if not found:
        return []
    base, first = next(iter(groups)), _all_runs(groups)[0].rows[0]
    what, score = score_name(first), main_score(first)
    single = "Newcombe's over images, as if each run had been tested on images of its own"
    text = (
        f"Difference in {what} from {base}, in percentage points, with intervals of 95 %: of "
        "several seeds Student's t over the differences of equal seeds, for these test images; of "
        f"one seed {single if score in SHARES else 'none'}. They are not widened for the number of "
        "comparisons."
    )
    caption, path = f"difference in {what} from {base}, with intervals", out / "differences.png"
    return [
        paragraph(text),
        table(*differences_table(found)),
        *_drawn(plots.differences, caption, found, path, base=base, score=what),
    ]


def _training(groups: Groups, out: pathlib.Path) -> list[str]:
    """Loss over steps, and speed, of the first seed of each group."""
    metrics = {name: group[0].metrics for name, group in groups.items() if group[0].metrics}
    if not metrics:
        return []
    curves, body = {}, []
    for name, lines in metrics.items():
        losses = [line["loss"] for line in lines]
        curves[name] = [line["step"] for line in lines], losses
        speeds = [line["images_per_second"] for line in lines if "images_per_second" in line]
        speed = f"{np.median(speeds):,.0f}" if speeds else "-"
        body.append((name, f"{lines[-1]['step']:,}", f"{losses[-1]:.4f}", speed))
    caption, title = "training loss over steps, a line per scheme", "Training loss (first seeds)"
    axes = {"x": "step", "y": "training loss", "title": title}
    return [
        *_drawn(plots.lines, caption, curves, out / "loss.png", **axes),
        table(("position", "steps", "last loss", "images per second (median)"), body),
    ]


def _papers(groups: Groups) -> list[str]:
    """Accuracy beside the papers' numbers for the same model, scheme, data and resolution."""
    body = []
    for group in groups.values():
        model = group[0].config.model
        for size in sizes_of(group):
            rows = rows_at(group, size)
            numbers = expected.find(
                model=model.name,
                position=model.position,
                dataset=rows[0]["dataset"],
                resolution=list(size),
            )
            own = (model.name, model.position, size_text(size), percent_with_interval(rows))
            body += [(*own, f"{entry['top1']:.2f}", entry["source"]) for entry in numbers]
    if not body:
        return []
    text = paragraph("Accuracy in percent, for the same model, scheme and resolution.")
    return [text, table(("model", "position", "resolution", "ours", "paper", "source"), body)]


def _classes(groups: Groups) -> list[str]:
    """The score of each class at the training resolution, of the first seeds.

    Nothing, unless all are evaluated by the same score on the same classes.
    """
    rows = {name: group[0].rows[0] for name, group in groups.items()}
    first = next(iter(rows.values()))
    if (score := class_score(first)) is None:
        return []
    names = class_names(first)
    if any(score not in row or class_names(row) != names for row in rows.values()):
        return []
    columns = [[_percent(x) for x in row[score]] for row in rows.values()]
    text = paragraph(f"{_sentence(CLASS_SCORES[score])} in percent, at the training resolution.")
    return [text, table(("class", *rows), list(zip(names, *columns, strict=True)))]


def _evaluations(runs: Sequence[RunResults]) -> list[str]:
    """Results with further crops, and of `python -m rope_jax.evaluate`."""
    seeds_of = collections.Counter(run.workdir for run in runs)
    body, first = [], runs[0].rows[0]
    _, *others = titles = [score for score in SCORES if score in first]
    for run in runs:
        seed = f", seed {run.config.seed}" if seeds_of[run.workdir] > 1 else ""
        for row in run.listed:
            accuracies = [_percent(row[score]) for score in others]
            accuracies = percent_with_interval([row]), *accuracies
            size = size_text(row["resolution"])
            name = f"{run.workdir.name}{seed}"
            body.append((name, row["dataset"], size, *accuracies, row["protocol"]))
    header = ("workdir", "data", "resolution", *(SCORES[score] for score in titles), "protocol")
    return [table(header, body)] if body else []


def _analyses(runs: Sequence[RunResults], out: pathlib.Path) -> list[str]:
    """The pictures of `python -m rope_jax.analysis` in the workdirs, copied into `out`."""
    of_workdir = {run.workdir: run.config.model for run in runs}
    names = collections.Counter(workdir.name for workdir in of_workdir)
    blocks = []
    for number, (workdir, model) in enumerate(of_workdir.items(), 1):
        label = workdir.name if names[workdir.name] == 1 else f"{workdir.name}_{number}"
        for name, caption in _PICTURES.items():
            drawn, copy = workdir / f"{name}.png", out / f"{label}_{name}.png"
            if drawn.exists():
                copy.write_bytes(drawn.read_bytes())
                blocks.append(picture(copy, f"{model.name} with {model.position}: {caption}"))
    return blocks


def _runs(runs: Sequence[RunResults]) -> list[str]:
    """The runs and the protocols of their evaluation."""
    body = []
    for run in runs:
        model, seed = run.config.model, str(run.config.seed)
        body.append((run.workdir.name, model.name, model.position, seed, f"{run.step:,}"))
    protocols = dict.fromkeys(row["protocol"] for run in runs for row in run.rows)
    header = ("workdir", "model", "position", "seed", "step")
    return [table(header, body), *(paragraph(f"Protocol: {how}.") for how in protocols)]


def analyse(run: RunResults) -> None:
    """Draws all pictures of `python -m rope_jax.analysis` that the run's scheme has."""
    from rope_jax.analysis.__main__ import main as command

    for name in _ANALYSES:
        try:
            command([name, str(run.workdir)])
        except SystemExit as error:  # no such picture of this scheme or model: show the reason
            print(error, file=sys.stderr)


def write_report(groups: Groups, out: pathlib.Path) -> str:
    """Writes comparison.txt, report.html and its pictures.

    Returns:
        The content of comparison.txt: accuracies, and differences from the first row.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = format_table(*comparison(groups, percent))
    text += "".join(f"\nnot alike: {note}" for note in unlike(groups))
    if found := paired_differences(groups):
        title = f"difference from {next(iter(groups))} in percentage points [95 % interval]"
        text += f"\n\n{title}\n\n{format_table(*differences_table(found))}"
    (out / "comparison.txt").write_text(text + "\n")
    models = dict.fromkeys(run.config.model.name for run in _all_runs(groups))
    title = f"Positional schemes compared: {', '.join(models)}"
    (out / "report.html").write_text(to_html(title, sections(groups, out)))
    return text


def main(arguments: list[str] | None = None) -> None:
    """Reads the workdirs and writes the report."""
    parser = command_parser("rope_jax.analysis.report", __doc__)
    add, path = parser.add_argument, pathlib.Path
    add("workdirs", nargs="+", type=path, help="of finished runs of rope_jax.main")
    add("--out", type=path, help="folder to write to; default: the parent of the first workdir")
    add("--analyse", action="store_true", help="first draw the pictures of each row's first run")
    parsed = parser.parse_args(arguments)
    workdirs = dict.fromkeys(parsed.workdirs)  # a workdir given twice is not a second seed
    try:
        groups = group_runs([run for workdir in workdirs for run in read_runs(workdir)])
        require_one_score(groups)
    except (OSError, ValueError, ConfigError) as error:
        sys.exit(f"report: {error}")
    if parsed.analyse:
        for group in groups.values():
            analyse(group[0])
    print_report(groups, parsed.out or parsed.workdirs[0].parent)


def require_one_score(groups: Groups) -> None:
    """Raises ValueError if runs of different tasks are to be compared."""
    names = {score_name(run.rows[0]): run.workdir for run in _all_runs(groups)}
    if len(names) > 1:
        (one, here), (other, there), *_ = names.items()
        raise ValueError(
            f"{here} was evaluated by {one} and {there} by {other}: compare runs of one task"
        )


def print_report(groups: Groups, out: pathlib.Path) -> None:
    """Writes the report, and prints its table and the names of its files."""
    text = write_report(groups, out)
    what = score_name(_all_runs(groups)[0].rows[0])
    print(f"{what} (%) at test resolution; trained at the first one\n\n{text}\n")
    print(f"table: {out / 'comparison.txt'}")
    if plots.available():
        print(f"picture: {out / 'comparison.png'}")
    else:
        print("no pictures: matplotlib is not installed (pip install 'rope_jax[plot]')")
    print(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
