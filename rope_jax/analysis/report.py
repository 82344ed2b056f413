"""Compares finished runs on one page: `python -m rope_jax.analysis.report WORKDIR [WORKDIR ...] [--out=FOLDER] [--analyse]`.

Writes report.html, which needs no other file and no network, report.md with its pictures beside it, and comparison.txt. Runs that differ in
their seed alone are one row, with the mean and its 95 % confidence interval; a workdir of several seeds holds several of them.
"""

import argparse
import base64
import collections
import dataclasses
import html
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rope_jax.analysis import expected, plots
from rope_jax.config import Config, ConfigError, from_json
from rope_jax.evaluate import read_evaluations, read_results
from rope_jax.members import config_of, metrics_of, seeds
from rope_jax.metrics import format_table, read_metrics
from rope_jax.models.registry import find_model

Row = dict[str, Any]
# What `python -m rope_jax.analysis` leaves in a workdir -> what a reader who cannot see it should know of it.
_PICTURES = {
    "attention_distance": "mean distance of attention in tokens, by layer",
    "attention_entropy": "entropy of attention in nats, by layer",
    "maps": "where attention of one token goes on an image, by layer",
    "fourier": "what the frequencies of the rotation reconstruct of one place",
    "decay": "how scores fall with distance",
    "learned": "learned frequencies before and after training",
    "correlation": "cosine similarity of one position with all others, by layer",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left in its workdir; of several seeds at once, what one of them left.

    Attributes:
        workdir: where it is.
        config: its settings, with the position that a model has by itself where they name none.
        step: that was evaluated.
        rows: of `results.json`: the training resolution first.
        others: of `evaluations.json`.
        metrics: of `metrics.jsonl`.
    """

    workdir: pathlib.Path
    config: Config
    step: int
    rows: Sequence[Row]
    others: Sequence[Row]
    metrics: Sequence[dict[str, Any]]


def read_runs(workdir: pathlib.Path) -> list[Run]:
    """Reads a workdir: a run for each of its seeds. FileNotFoundError says what to do where it has no results."""
    results = read_results(workdir)
    if results is None:
        raise FileNotFoundError(f"{workdir} has no results.json; run rope_jax.main with --workdir={workdir} to its end first")
    config = from_json((workdir / "config.json").read_text())
    model = dataclasses.replace(config.model, position=config.model.position or find_model(config.model.name).position)
    config = dataclasses.replace(config, model=model)
    metrics, others = read_metrics(workdir / "metrics.jsonl"), read_evaluations(workdir / "evaluations.json")
    if config.seeds == 1:
        return [Run(workdir, config, results["step"], results["eval"], others, metrics)]
    return [
        Run(
            workdir,
            config_of(config, seed),
            results["step"],
            [row for row in results["eval"] if row["seed"] == seed],
            [row for row in others if row["asked"].get("seed", config.seed) == seed],
            [metrics_of(line, seed) for line in metrics],
        )
        for seed in seeds(config)
    ]


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed alone, under the name of what distinguishes them: model and position, or the workdir, too.

    Raises:
        ValueError: two runs differ in nothing.
    """
    alike: dict[Config, list[Run]] = {}
    for run in runs:
        group = alike.setdefault(dataclasses.replace(run.config, seed=0), [])
        if same := [other.workdir for other in group if other.config.seed == run.config.seed]:
            raise ValueError(f"{same[0]} and {run.workdir} hold the same run, of seed {run.config.seed}: leave one of them out")
        group.append(run)
    models = {config.model.name for config in alike}
    named: dict[str, list[Run]] = {}
    for config, members in alike.items():
        position = config.model.position
        name = position if len(models) == 1 else f"{config.model.name}, {position}"
        longer = (name, f"{name} ({members[0].workdir.name})", f"{name} ({members[0].workdir})")
        named[next(name for name in longer if name not in named)] = members
    return named


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` images (Wilson's score interval)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def student(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of at least two shares (Student's t), cut to where shares can be."""
    from scipy.special import stdtrit

    mean, count = float(np.mean(values)), len(values)
    half = float(stdtrit(count - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return max(mean - half, 0.0), min(mean + half, 1.0)


def accuracy(rows: Sequence[Row]) -> str:
    """Top-1 in percent with its interval: of one row over images, of several over runs."""
    mean = float(np.mean([row["top1"] for row in rows]))
    low, high = wilson(mean, rows[0]["count"]) if len(rows) == 1 else student([row["top1"] for row in rows])
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def sizes_of(runs: dict[str, list[Run]]) -> list[tuple[int, int]]:
    """All resolutions, in the order in which they were asked for."""
    return list(dict.fromkeys(tuple(row["resolution"]) for members in runs.values() for run in members for row in run.rows))


def rows_at(members: Sequence[Run], size: tuple[int, int]) -> list[Row]:
    """The rows of runs at one resolution."""
    return [row for run in members for row in run.rows if tuple(row["resolution"]) == size]


def comparison(runs: dict[str, list[Run]], cell: Callable[[Sequence[Row]], str]) -> list[tuple[str, ...]]:
    """Header and one row per group, one column per resolution; the first is that of training."""
    sizes = sizes_of(runs)
    table = [("position", *(f"{height}x{width}" for height, width in sizes))]
    for name, members in runs.items():
        found = [rows_at(members, size) for size in sizes]
        table.append((name, *(cell(rows) if rows else "-" for rows in found)))
    return table


@dataclasses.dataclass(frozen=True)
class Table:
    """A header and rows."""

    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A file and what stands in its place for those who cannot see it."""

    path: pathlib.Path
    text: str


Block = str | Table | Picture
Section = tuple[str, list[Block]]


def sections(runs: dict[str, list[Run]], out: pathlib.Path) -> list[Section]:
    """What the page says, and the pictures that it shows, which are drawn into `out`."""
    members = [run for group in runs.values() for run in group]
    first = members[0]
    counted = f"{first.rows[0]['dataset']} {first.rows[0]['split']}, {first.rows[0]['count']:,} images"
    intervals = "Intervals are of 95 %: Student's t over runs with several seeds, Wilson's over images for a single run."
    found: list[Section] = []
    counts = ["seeds", *(str(len(group)) for group in runs.values())]
    table = [(row[0], count, *row[1:]) for row, count in zip(comparison(runs, accuracy), counts, strict=True)]
    blocks: list[Block] = [f"Top-1 accuracy in percent ({counted}). The first resolution is that of training. {intervals}", Table(table)]
    means = {name: [_mean(group, size) for size in sizes_of(runs) if rows_at(group, size)] for name, group in runs.items()}
    if picture := plots.accuracy_against_resolution(means, out / "comparison.png"):
        blocks.append(Picture(picture, "top-1 accuracy over test resolution, a line per scheme, training resolution marked in grey"))
    found.append(("Accuracy", blocks))
    found += [section for section in (_training(runs, out), _papers(runs), _others(members), _analyses(members, out)) if section[1]]
    settings: list[Block] = [Table([("workdir", "model", "position", "seed", "step"), *map(_settings, members)])]
    protocols = dict.fromkeys(row["protocol"] for run in members for row in run.rows)
    found.append(("Runs", [*settings, *(f"Protocol: {protocol}." for protocol in protocols)]))
    return found


def _mean(group: Sequence[Run], size: tuple[int, int]) -> Row:
    rows = rows_at(group, size)
    return rows[0] | {"top1": float(np.mean([row["top1"] for row in rows]))}


def _settings(run: Run) -> tuple[str, ...]:
    model = run.config.model
    return run.workdir.name, model.name, model.position, str(run.config.seed), f"{run.step:,}"


def _training(runs: dict[str, list[Run]], out: pathlib.Path) -> Section:
    """Loss over steps, and speed."""
    blocks: list[Block] = []
    curves = {name: group[0].metrics for name, group in runs.items() if group[0].metrics}
    if curves and plots.available():
        lines = {name: ([line["step"] for line in metrics], [line["loss"] for line in metrics]) for name, metrics in curves.items()}
        path = plots.lines(lines, out / "loss.png", x="step", y="training loss", title="Training loss (first seed of each row)")
        blocks.append(Picture(path, "training loss over steps, a line per scheme"))
    cells = [("position", "last loss", "images per second (median)")]
    for name, metrics in curves.items():
        speeds = [line["images_per_second"] for line in metrics if "images_per_second" in line]
        cells.append((name, f"{metrics[-1]['loss']:.4f}", f"{np.median(speeds):,.0f}" if speeds else "-"))
    return "Training", [*blocks, Table(cells)] if curves else []


def _papers(runs: dict[str, list[Run]]) -> Section:
    """Ours beside what papers report of the same model, scheme, data and resolution."""
    cells = [("model", "position", "resolution", "ours", "paper", "source")]
    for group in runs.values():
        for size in sizes_of({"": group}):
            rows, model = rows_at(group, size), group[0].config.model
            wanted = {"model": model.name, "position": model.position, "dataset": rows[0]["dataset"], "resolution": list(size)}
            for entry in expected.find(**wanted):
                cells.append((model.name, model.position, _by(size), accuracy(rows), f"{entry['top1']:.2f}", entry["source"]))
    note = "Accuracy in percent beside what the papers report of the same model, scheme and resolution."
    return "Beside the papers", [note, Table(cells)] if len(cells) > 1 else []


def _others(runs: Sequence[Run]) -> Section:
    """What `python -m rope_jax.evaluate` has measured of the runs."""
    several = collections.Counter(run.workdir for run in runs)
    cells = [("workdir", "data", "resolution", "top-1", "top-5", "protocol")]
    for run in runs:
        for row in run.others:
            top1, top5 = accuracy([row]), f"{100 * row['top5']:.1f}"
            name = f"{run.workdir.name}, seed {run.config.seed}" if several[run.workdir] > 1 else run.workdir.name
            cells.append((name, row["dataset"], _by(row["resolution"]), top1, top5, row["protocol"]))
    return "Further evaluations", [Table(cells)] if len(cells) > 1 else []


def _analyses(runs: Sequence[Run], out: pathlib.Path) -> Section:
    """The pictures of `python -m rope_jax.analysis` that lie in the workdirs."""
    blocks: list[Block] = []
    runs = list({run.workdir: run for run in runs}.values())  # seeds of one workdir share its pictures
    labels = [run.workdir.name for run in runs]
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
        for name, text in _PICTURES.items():
            if (picture := run.workdir / f"{name}.png").exists():
                copy = out / f"{label if labels.count(label) == 1 else f'{label}_{number}'}_{name}.png"
                if copy != picture:
                    copy.write_bytes(picture.read_bytes())
                blocks.append(Picture(copy, f"{run.config.model.name} with {run.config.model.position}: {text}"))
    return "What the models do with position", blocks


def _by(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption { color: #555; font-size: 0.9rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 16rem; }
"""


def to_html(title: str, found: Sequence[Section]) -> str:
    """One page that needs nothing else."""
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>",
    ]
    for heading, blocks in found:
        lines.append(f"<h2>{html.escape(heading)}</h2>")
        lines += map(_block_html, blocks)
    return "\n".join([*lines, "</body>\n</html>\n"])


def _block_html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Picture):
        source = base64.b64encode(block.path.read_bytes()).decode()
        text = html.escape(block.text, quote=True)
        return f'<figure><img src="data:image/png;base64,{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'
    head, *rows = block.rows
    cells = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
    body = "\n".join(cells(row, "td") for row in rows)
    return f'<div class="table"><table>\n<thead>{cells(head, "th")}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def to_markdown(title: str, found: Sequence[Section]) -> str:
    """The same in Markdown, with the pictures as files beside it."""
    lines = [f"# {title}"]
    for heading, blocks in found:
        lines.append(f"## {heading}")
        for block in blocks:
            if isinstance(block, Table):
                head, *rows = block.rows
                cells = [head, ["---"] * len(head), *rows]
                lines.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells))
            else:
                lines.append(block if isinstance(block, str) else f"![{block.text}]({block.path.name})")
    return "\n\n".join(lines) + "\n"


def analyse(run: Run) -> None:
    """Makes the pictures of `python -m rope_jax.analysis` that the run's scheme has, in its workdir."""
    from rope_jax.analysis.__main__ import main as command

    for name in ("attention", "maps", "fourier", "decay", "learned", "correlation"):
        try:
            command([name, str(run.workdir)])
        except SystemExit as refused:  # this scheme or model has no such picture: the reason is shown
            print(refused, file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Reads the workdirs and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m rope_jax.analysis.report", description=__doc__.split("\n")[0])
    parser.add_argument("workdirs", nargs="+", type=pathlib.Path, help="of finished runs of rope_jax.main")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write to; default: the parent of the first workdir")
    parser.add_argument("--analyse", action="store_true", help="first make the analysis pictures of the first run of each row")
    asked = parser.parse_args(arguments)
    try:
        runs = group_runs([run for workdir in dict.fromkeys(asked.workdirs) for run in read_runs(workdir)])  # named twice is no second seed
    except (OSError, ValueError, ConfigError) as error:
        sys.exit(f"report: {error}")
    if asked.analyse:
        for members in runs.values():
            analyse(members[0])
    out = asked.out or asked.workdirs[0].parent
    out.mkdir(parents=True, exist_ok=True)
    head, *body = comparison(runs, lambda rows: f"{100 * float(np.mean([row['top1'] for row in rows])):.1f}")
    table = format_table(head, body)
    (out / "comparison.txt").write_text(table + "\n")
    title = "Positional schemes compared: " + ", ".join(dict.fromkeys(run.config.model.name for group in runs.values() for run in group))
    found = sections(runs, out)
    (out / "report.html").write_text(to_html(title, found))
    (out / "report.md").write_text(to_markdown(title, found))
    print(f"top-1 accuracy (%) at test resolution; trained at the first one\n\n{table}\n\ntable: {out / 'comparison.txt'}")
    if plots.available():
        print(f"picture: {out / 'comparison.png'}")
    else:
        print("no pictures: matplotlib is not installed (pip install 'rope_jax[plot]')")
    print(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
