"""Pictures. matplotlib is imported inside the functions, so that nothing else needs it."""

import importlib.util
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"


def accuracy_against_resolution(runs: Mapping[str, Sequence[dict[str, Any]]], path: pathlib.Path) -> pathlib.Path | None:
    """Draws top-1 accuracy over test resolution, one line per run, the training resolution marked.

    Args:
        runs: name -> rows as in `results.json`; the first row of a run is its training resolution. Square resolutions are joined by the
            line; others are single markers at the square root of their area.
        path: the PNG file to write.

    Returns:
        The path, or None where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    side = lambda row: math.sqrt(row["resolution"][0] * row["resolution"][1])
    is_square = lambda row: row["resolution"][0] == row["resolution"][1]
    for number, (name, rows) in enumerate(runs.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        square = sorted((side(row), 100 * row["top1"]) for row in rows if is_square(row))
        if square:
            axes.plot(*zip(*square, strict=True), label=name, **style)
        for row in rows:
            if not is_square(row):
                axes.plot(side(row), 100 * row["top1"], linestyle="none", fillstyle="none", **style)
    every = [row for rows in runs.values() for row in rows]
    for size in {tuple(row["resolution"]) for row in every if not is_square(row)}:
        at = math.sqrt(size[0] * size[1])
        axes.annotate(f"{size[0]}x{size[1]}", (at, 1.01), xycoords=("data", "axes fraction"), fontsize=7, ha="center")
    for trained in {side(rows[0]) for rows in runs.values()}:
        axes.axvline(trained, color="0.85", linewidth=8, zorder=0)
    axes.set_xticks(sorted({side(row) for row in every if is_square(row)}))
    first = every[0]
    axes.set_xlabel("test resolution (pixels; grey: training resolution; hollow: not square)")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.set_title(f"{first['dataset']} {first['split']}, {first['count']:,} images", fontsize=10, pad=12)
    axes.grid(alpha=0.3)
    if any(map(is_square, every)):
        figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path
