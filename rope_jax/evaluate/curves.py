"""Pictures of scores over resolution, and the common parts of all pictures with axes.

matplotlib is imported inside the functions, so that nothing else needs it.
"""

import contextlib
import importlib.util
import io
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rope_jax.evaluate.results import Row, main_score, row_task
from rope_jax.names.text import size_text
from rope_jax.system.files import write_file

# Okabe and Ito's palette, which colour-blind readers and black-and-white prints can distinguish,
# with a brown in place of its yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F5F00")
MARKERS = list("osD^vPX*")
_STYLE = {
    "axes.labelsize": 10,
    "axes.prop_cycle": f"cycler(color={COLOURS}, marker={MARKERS})",
    "axes.titlesize": 9,
    "errorbar.capsize": 2,
    "figure.labelsize": 10,
    "figure.titlesize": 11,
    "grid.alpha": 0.3,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.markersize": 5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
RESOLUTION = "test resolution (pixels; grey: training resolution)"
WIDTH = 5.4  # inches of a picture: text of 10 points can be read where it is 390 pixels wide


def available() -> bool:
    """Checks whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def picture(
    path: pathlib.Path,
    title: str,
    size: tuple[float, float],
    *,
    legend: str | None = None,
    below: bool = False,
    dpi: int = 150,
) -> Iterator[Any]:
    """Yields a matplotlib figure, and writes it to a PNG file at the end.

    Labelled curves of the first diagram are listed in a legend on the right, or below.

    Args:
        path: of the PNG file.
        title: of the picture.
        size: (width, height) in inches.
        legend: title of the legend.
        below: whether the legend is below, in place of a label of the whole figure.
        dpi: pixels per inch.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title)
        yield figure
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if labels:
            columns = max(1, int(10 * size[0] / (6 + max(map(len, labels))))) if below else 1
            place = "outside lower center" if below else "outside right center"
            figure.legend(handles, labels, loc=place, title=legend, ncols=columns)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=dpi)
    write_file(path, content.getvalue())


@contextlib.contextmanager
def diagram(
    path: pathlib.Path,
    title: str,
    x: str,
    y: str,
    *,
    height: float = 3.8,
    legend: str | None = None,
) -> Iterator[Any]:
    """The axes of a picture with one diagram; `x` and `y` are their labels, with units."""
    with picture(path, title, (WIDTH, height), legend=legend, below=True) as figure:
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        axes.grid()
        yield axes


def accuracy_against_resolution(
    runs: Mapping[str, Sequence[Row]], path: pathlib.Path
) -> pathlib.Path | None:
    """Draws the main score, as top-1 accuracy, over test resolution, one line per run.

    Args:
        runs: name -> rows as in `results.json`, the training resolution first.
        path: of the PNG file.

    Returns:
        The path, or None if matplotlib is not installed.
    """
    if not available():
        return None
    first = next(iter(runs.values()))[0]
    curves = {
        name: {tuple(row["resolution"]): (100 * row[main_score(row)],) for row in rows}
        for name, rows in runs.items()
    }
    title = f"{first['dataset']} {first['split']}, {first['count']:,} images"
    with diagram(path, title, RESOLUTION, f"{row_task(first).score_name} (%)", height=4.2) as axes:
        draw_by_resolution(axes, curves)
    return path


def draw_by_resolution(
    axes: Any,
    curves: Mapping[str, Mapping[tuple[int, int], Sequence[float]]],
) -> None:
    """Draws scores over test resolution, one line per name.

    Resolutions that are not square are placed at the square root of their area, and named above
    their points. A grey band marks the training resolution.

    Args:
        axes: of matplotlib.
        curves: name -> resolution, that of training first -> (score, half the width of its
            interval), or (score,) alone.
    """
    highest: dict[tuple[int, int], float] = {}
    for name, curve in curves.items():
        sides = {size: math.sqrt(math.prod(size)) for size in curve}
        points = sorted((sides[size], *point) for size, point in curve.items())
        axes.errorbar(*np.transpose(points), label=name, elinewidth=0.8)
        axes.axvline(next(iter(sides.values())), color="0.85", linewidth=8, zorder=0)
        highest |= {size: max(sum(x), highest.get(size, 0.0)) for size, x in curve.items()}
    axes.margins(y=0.1)
    axes.set_xticks(sorted({h for h, w in highest if h == w}))
    for (h, w), top in highest.items():
        if h != w:
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axes.annotate(size_text((h, w)), (math.sqrt(h * w), top), **above, fontsize=8)
