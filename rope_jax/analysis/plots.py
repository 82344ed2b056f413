"""Pictures. matplotlib is imported inside the functions, so that nothing else needs it."""

import importlib.util
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

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ticks = set()
    for number, (name, rows) in enumerate(runs.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        square = sorted((row["resolution"][0], row["top1"]) for row in rows if row["resolution"][0] == row["resolution"][1])
        axes.plot([x for x, _ in square], [100 * y for _, y in square], label=name, **style)
        for row in rows:
            height, width = row["resolution"]
            if height != width:
                axes.plot((height * width) ** 0.5, 100 * row["top1"], linestyle="none", fillstyle="none", **style)
                axes.annotate(
                    f"{height}x{width}",
                    ((height * width) ** 0.5, 100 * row["top1"]),
                    fontsize=7,
                    xytext=(4, -8),
                    textcoords="offset points",
                )
        ticks |= {x for x, _ in square}
    trained = {tuple(rows[0]["resolution"]) for rows in runs.values()}
    for height, width in trained:
        axes.axvline((height * width) ** 0.5, color="0.8", linewidth=6, zorder=0)
    axes.set_xticks(sorted(ticks))
    first = next(iter(runs.values()))[0]
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.set_title(f"{first['dataset']} {first['split']}, {first['count']:,} images", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path
