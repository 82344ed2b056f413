"""Pictures. matplotlib is imported inside the functions, so that nothing else needs it."""

import importlib.util
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def accuracy_against_resolution(runs: Mapping[str, Sequence[dict[str, Any]]], path: pathlib.Path) -> pathlib.Path | None:
    """Draws top-1 accuracy over test resolution, one line per run, the training resolution marked.

    Args:
        runs: name -> rows as in `results.json`; the first row of a run is its training resolution. Square resolutions are joined by the
            line; others are single markers at the square root of their area.
        path: the PNG file to write.

    Returns:
        The path, or None where matplotlib is not installed.
    """
    if not available():
        return None
    figure = _canvas(7.2, 4.2)
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


def _canvas(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def values_by_layer(values: Mapping[str, Sequence[np.ndarray]], path: pathlib.Path, *, label: str, title: str) -> pathlib.Path:
    """Draws a number of each head over the layers: the mean as a line, heads as dots.

    Args:
        values: name -> for each layer, an array [N].
        path: the PNG file to write.
        label: of the vertical axis, with the unit.
        title: of the picture.
    """
    figure = _canvas(7.2, 3.8)
    axes = figure.add_subplot()
    for number, (name, layers) in enumerate(values.items()):
        style = _style(number)
        axes.plot(range(1, len(layers) + 1), [np.mean(heads) for heads in layers], label=name, **style)
        for layer, heads in enumerate(layers, 1):
            axes.plot([layer] * len(heads), heads, linestyle="none", marker=".", color=style["color"], alpha=0.35, markersize=4)
    axes.set_xticks(range(1, max(map(len, values.values())) + 1))
    axes.set_xlabel("layer (line: mean of the heads; dots: heads)")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path


def lines(curves: Mapping[str, tuple[Any, Any]], path: pathlib.Path, *, x: str, y: str, title: str, **scales: str) -> pathlib.Path:
    """Draws curves.

    Args:
        curves: name -> (horizontal, vertical), two sequences of numbers of one length.
        path: the PNG file to write.
        x, y: labels of the axes, with units.
        title: of the picture.
        **scales: xscale="log", yscale="log".
    """
    figure = _canvas(7.2, 3.8)
    axes = figure.add_subplot()
    for number, (name, (horizontal, vertical)) in enumerate(curves.items()):
        axes.plot(horizontal, vertical, color=COLOURS[number % len(COLOURS)], label=name, linewidth=1.3)
    axes.set(xlabel=x, ylabel=y, **scales)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path


def panels(maps: Mapping[str, np.ndarray], path: pathlib.Path, *, title: str, signed: bool = False, columns: int = 6) -> pathlib.Path:
    """Draws maps side by side, each in its own range.

    Args:
        maps: name -> [H, W].
        path: the PNG file to write.
        title: of the picture.
        signed: whether 0 is the middle of the colours, of the range [-1, 1].
        columns: maps in a row.
    """
    across = min(columns, len(maps))
    down = -(-len(maps) // across)
    figure = _canvas(max(1.55 * across, 4.0), 1.75 * down + 0.4)
    for number, (name, values) in enumerate(maps.items(), 1):
        axes = figure.add_subplot(down, across, number)
        axes.imshow(values, **({"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if signed else {"cmap": "magma"}))
        axes.set_title(name, fontsize=8)
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return path


def overlays(
    image: np.ndarray, maps: Mapping[str, np.ndarray], path: pathlib.Path, *, title: str, mark: tuple[float, float] | None
) -> pathlib.Path:
    """Draws maps over the image that they belong to, the image itself first.

    Args:
        image: uint8 [H, W, 3].
        maps: name -> [h, w], of any size.
        path: the PNG file to write.
        title: of the picture.
        mark: (y, x) to mark, as fractions of height and width, or None.
    """
    across = min(5, len(maps) + 1)
    down = -(-(len(maps) + 1) // across)
    height, width = image.shape[:2]
    figure = _canvas(1.9 * across, (1.9 * height / width + 0.25) * down + 0.4)
    for number, (name, values) in enumerate([("image", None), *maps.items()], 1):
        axes = figure.add_subplot(down, across, number)
        axes.imshow(image, extent=(0, width, height, 0))
        if values is not None:
            axes.imshow(values, cmap="inferno", alpha=0.65, extent=(0, width, height, 0), interpolation="bilinear")
        if mark is not None:
            axes.plot(mark[1] * width, mark[0] * height, marker="+", color="cyan", markersize=9, markeredgewidth=2)
        axes.set_title(name, fontsize=8)
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return path


def frequencies_before_and_after(before: np.ndarray, after: np.ndarray, path: pathlib.Path, *, title: str) -> pathlib.Path:
    """Draws where frequencies were and where training took them, one panel a layer.

    Args:
        before, after: [layers, N, (y, x), R], radians per token.
        path: the PNG file to write.
        title: of the picture.
    """
    layers = len(after)
    across = min(4, layers)
    down = -(-layers // across)
    figure = _canvas(2.1 * across + 1.2, 2.1 * down + 0.6)
    reach = 1.05 * max(abs(before).max(), abs(after).max())
    for layer in range(layers):
        axes = figure.add_subplot(down, across, layer + 1)
        for colour, marker, label, values in (("0.6", ".", "before", before), (COLOURS[1], "x", "after", after)):
            y, x = np.moveaxis(values[layer], 1, 0)
            axes.plot(x.ravel(), y.ravel(), linestyle="none", marker=marker, markersize=3.5, color=colour, label=label)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.set_title(f"layer {layer + 1}", fontsize=8)
        axes.tick_params(labelsize=6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.supxlabel("x, radians per token", fontsize=8)
    figure.supylabel("y, radians per token", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return path
