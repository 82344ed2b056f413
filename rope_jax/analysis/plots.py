"""Pictures. matplotlib is imported inside the functions, so that nothing else needs it."""

import importlib.util
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from rope_jax.analysis.attention import token_at
from rope_jax.analysis.differences import Difference
from rope_jax.evaluate.results import Row, main_score, score_name
from rope_jax.files import write_file

# Okabe and Ito's palette, which colour-blind readers and black-and-white prints can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def accuracy_against_resolution(
    runs: Mapping[str, Sequence[Row]], path: pathlib.Path
) -> pathlib.Path | None:
    """Draws the main score, as top-1 accuracy, over test resolution, one line per run.

    Resolutions that are not square stand at the square root of their area. A grey band marks the
    training resolution.

    Args:
        runs: name -> rows as in `results.json`, the training resolution first.
        path: of the PNG file.

    Returns:
        The path, or None if matplotlib is not installed.
    """
    if not available():
        return None
    figure, axes = _axes(7.2, 4.2)
    ticks = {}
    for number, (name, rows) in enumerate(runs.items()):
        points = sorted((_side(row), 100 * row[main_score(row)]) for row in rows)
        axes.plot(*zip(*points, strict=True), label=name, **_style(number))
        axes.axvline(_side(rows[0]), color="0.85", linewidth=8, zorder=0)
        for row in rows:
            height, width = row["resolution"]
            ticks[_side(row)] = str(width) if height == width else f"{height}x{width}"
    axes.set_xticks(list(ticks), ticks.values())
    first = next(iter(runs.values()))[0]
    title = f"{first['dataset']} {first['split']}, {first['count']:,} images"
    x = "test resolution (pixels; grey: training resolution)"
    _label(axes, title, x, f"{score_name(first)} (%)")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return _save(figure, path)


def _side(row: Row) -> float:
    return math.sqrt(row["resolution"][0] * row["resolution"][1])


def differences(
    found: Sequence[Difference], path: pathlib.Path, *, base: str, score: str = "top-1 accuracy"
) -> pathlib.Path:
    """Draws differences in a score as points with their intervals, a colour per resolution.

    Args:
        found: from `paired_differences`.
        path: of the PNG file.
        base: name of the group from which they differ.
        score: its name.
    """
    names = list(dict.fromkeys(one.name for one in found))
    sizes = list(dict.fromkeys(one.size for one in found))
    figure, axes = _axes(7.2, 1.2 + 0.16 * len(names) * (len(sizes) + 1))
    for number, size in enumerate(sizes):
        own = [one for one in found if one.size == size]
        heights = [names.index(one.name) + 0.8 * ((number + 0.5) / len(sizes) - 0.5) for one in own]
        means = np.array([100 * one.mean for one in own])
        bounds = np.array([(one.low, one.high) for one in own], float)  # NaN for None
        reach = np.abs(100 * bounds.T - means)
        style = {"linestyle": "none", "capsize": 2, "linewidth": 1.2} | _style(number)
        label = f"{size[0]}x{size[1]}"
        axes.errorbar(means, heights, xerr=reach, label=label, **style)
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    title = f"Difference from {base} (95 % intervals)"
    _label(axes, title, f"{score}, percentage points", "")
    figure.legend(loc="outside right center", frameon=False, fontsize=9, title="pixels")
    return _save(figure, path)


def values_by_layer(
    values: Sequence[Float[np.ndarray, " _"]], path: pathlib.Path, *, label: str, title: str
) -> pathlib.Path:
    """Draws one value per head over the layers: the mean as a line, heads as dots.

    Args:
        values: an array [N] for each layer.
        path: of the PNG file.
        label: of the vertical axis, with the unit.
        title: of the picture.
    """
    figure, axes = _axes(7.2, 3.8)
    layers = range(1, len(values) + 1)
    axes.plot(layers, [np.mean(heads) for heads in values], **_style(0))
    dots = {"linestyle": "none", "marker": ".", "markersize": 4, "alpha": 0.35}
    for layer, heads in zip(layers, values, strict=True):
        axes.plot([layer] * len(heads), heads, color=_colour(0), **dots)
    axes.set_xticks(layers)
    _label(axes, title, "layer (line: mean of the heads; dots: heads)", label)
    return _save(figure, path)


def lines(
    curves: Mapping[str, tuple[Any, Any]],
    path: pathlib.Path,
    *,
    x: str,
    y: str,
    title: str,
    **scales: str,
) -> pathlib.Path:
    """Draws curves.

    Args:
        curves: name -> (horizontal, vertical), two sequences of numbers of equal length.
        path: of the PNG file.
        x, y: labels of the axes, with units.
        title: of the picture.
        **scales: xscale="log", yscale="log".
    """
    figure, axes = _axes(7.2, 3.8)
    for number, (name, curve) in enumerate(curves.items()):
        alone = "." if len(curve[0]) == 1 else ""  # a line through one point is invisible
        axes.plot(*curve, color=_colour(number), label=name, linewidth=1.3, marker=alone)
    axes.set(**scales)
    _label(axes, title, x, y)
    axes.legend(frameon=False, fontsize=9)
    return _save(figure, path)


def panels(
    maps: Mapping[str, Float[np.ndarray, "_ _"]],
    path: pathlib.Path,
    *,
    title: str,
    label: str,
    mark: tuple[int, int] | None = None,
) -> pathlib.Path:
    """Draws maps of values in [-1, 1] side by side, with one colour bar.

    Args:
        maps: name -> [H, W].
        path: of the PNG file.
        title: of the picture.
        label: of the colour bar.
        mark: (row, column) of the token that is marked on each; None for (H // 2, W // 2).
    """
    figure, every = _grid(title, list(maps), columns=6, panel=(1.55, 1.75), margins=(0.9, 0.4))
    for axes, values in zip(every, maps.values(), strict=True):
        image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        row, column = mark or (values.shape[0] // 2, values.shape[1] // 2)
        axes.plot(column, row, marker="+", color="black", markersize=7)
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=every, fraction=0.05, aspect=25)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return _save(figure, path)


def overlays(
    image: UInt8[np.ndarray, "H W 3"],
    maps: Mapping[str, Float[np.ndarray, "_ _"]],
    path: pathlib.Path,
    *,
    title: str,
    place: tuple[float, float] | None,
) -> pathlib.Path:
    """Draws an image, then each map over the image, in its own range.

    Args:
        image: [H, W, 3].
        maps: name -> [h, w], of any size.
        path: of the PNG file.
        title: of the picture.
        place: (y, x) as fractions of height and width. A cross marks the middle of the token there,
            on the image that of the first map; None for no mark.
    """
    height, width = image.shape[:2]
    panel = (1.9, 1.9 * height / width + 0.25)
    figure, every = _grid(title, ["image", *maps], columns=5, panel=panel, margins=(0.0, 0.4))
    extent = (0, width, height, 0)
    overlay = {"cmap": "inferno", "alpha": 0.65, "extent": extent, "interpolation": "bilinear"}
    cross = {"marker": "+", "color": "cyan", "markersize": 9, "markeredgewidth": 2}
    for axes, values in zip(every, [None, *maps.values()], strict=True):
        axes.imshow(image, extent=extent)
        if values is not None:
            axes.imshow(values, **overlay)
        if place is not None:
            grid = next(iter(maps.values())).shape if values is None else values.shape
            row, column = token_at(place, grid)
            middle = (column + 0.5) / grid[1] * width, (row + 0.5) / grid[0] * height
            axes.plot(*middle, **cross)
        axes.set_axis_off()
    return _save(figure, path)


def costs(
    added: Mapping[str, tuple[int | None, int | None]], path: pathlib.Path, *, title: str
) -> pathlib.Path:
    """Draws the parameters and operations that each scheme adds to a model, as bars.

    Args:
        added: scheme -> (parameters, operations per image); None where they are not counted.
        path: of the PNG file.
        title: of the picture.
    """
    figure = _figure(7.2, 1.1 + 0.3 * len(added))
    names = list(added)
    for column, label in enumerate(("parameters", "operations per image")):
        axes = figure.add_subplot(1, 2, column + 1)
        numbers = [values[column] for values in added.values()]
        bars = axes.barh(names, [number or 0 for number in numbers], color=COLOURS[0])
        texts = ["not counted" if number is None else f"{number:,}" for number in numbers]
        axes.bar_label(bars, texts, padding=3, fontsize=7)
        axes.margins(x=0.3)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8, labelleft=column == 0)
        axes.set_xlabel(f"added {label}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def frequencies_before_and_after(
    before: Float[np.ndarray, "layers N 2 R"],
    after: Float[np.ndarray, "layers N 2 R"],
    path: pathlib.Path,
    *,
    title: str,
) -> pathlib.Path:
    """Draws frequencies before and after training, one panel per layer.

    Args:
        before, after: [layers, N, (y, x), R], radians per token.
        path: of the PNG file.
        title: of the picture.
    """
    names = [f"layer {layer + 1}" for layer in range(len(after))]
    figure, every = _grid(title, names, columns=4, panel=(2.1, 2.1), margins=(1.2, 0.6))
    reach = 1.05 * max(abs(before).max(), abs(after).max())
    styles = (
        (before, {"label": "before", "marker": ".", "color": "0.6"}),
        (after, {"label": "after", "marker": "x", "color": COLOURS[1]}),
    )
    for layer, axes in enumerate(every):
        for values, style in styles:
            y, x = np.moveaxis(values[layer], 1, 0)
            axes.plot(x.ravel(), y.ravel(), linestyle="none", markersize=3.5, **style)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.tick_params(labelsize=6)
    named = axes.get_legend_handles_labels()
    figure.legend(*named, loc="outside right center", frameon=False, fontsize=9)
    figure.supxlabel("x, radians per token", fontsize=8)
    figure.supylabel("y, radians per token", fontsize=8)
    return _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _grid(
    title: str,
    names: Sequence[str],
    *,
    columns: int,
    panel: tuple[float, float],
    margins: tuple[float, float],
) -> tuple[Any, list[Any]]:
    """A figure with a panel for each name, in rows of at most so many; sizes in inches."""
    across = min(columns, len(names))
    down = -(-len(names) // across)
    figure = _figure(max(panel[0] * across + margins[0], 4.0), panel[1] * down + margins[1])
    figure.suptitle(title, fontsize=10)
    every = [figure.add_subplot(down, across, number + 1) for number in range(len(names))]
    for axes, name in zip(every, names, strict=True):
        axes.set_title(name, fontsize=8)
    return figure, every


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """A figure with one diagram."""
    figure = _figure(width, height)
    return figure, figure.add_subplot()


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_file(path, content.getvalue())
    return path


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _style(number: int) -> dict[str, Any]:
    marker = MARKERS[number % len(MARKERS)]
    return {"color": _colour(number), "marker": marker, "markersize": 5}
