"""Pictures. matplotlib is imported inside the functions, so that nothing else needs it."""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from rope_jax.analysis.attention import token_at
from rope_jax.analysis.comparison import Estimates
from rope_jax.analysis.intervals import Estimate
from rope_jax.evaluate.curves import COLOURS, WIDTH, diagram, picture
from rope_jax.names.text import size_text


@contextlib.contextmanager
def _panels(
    path: pathlib.Path,
    title: str,
    names: Sequence[str],
    *,
    columns: int,
    panel: tuple[float, float],
    margins: tuple[float, float],
) -> Iterator[list[Any]]:
    """The axes of a picture with a panel for each name, in rows of `columns`; sizes in inches."""
    across = min(columns, len(names))
    down = -(-len(names) // across)
    size = max(panel[0] * across + margins[0], 4.0), panel[1] * down + margins[1]
    with picture(path, title, size) as figure:
        all_axes = [figure.add_subplot(down, across, number + 1) for number in range(len(names))]
        for axes, name in zip(all_axes, names, strict=True):
            axes.set_title(name)
        yield all_axes


def differences(
    estimates: Estimates, path: pathlib.Path, *, base: str, score: str = "top-1 accuracy"
) -> None:
    """Draws differences in a score as points with their intervals, one colour per resolution.

    Args:
        estimates: from `paired_differences`.
        path: of the PNG file.
        base: name of the group from which they differ.
        score: its name.
    """
    sizes = list(dict.fromkeys(size for by_size in estimates.values() for size in by_size))
    title, x = f"Difference from {base} (95 % intervals)", f"{score}, percentage points"
    height = 1.8 + 0.18 * len(estimates) * (len(sizes) + 1)
    with diagram(path, title, x, "", height=height, legend="pixels") as axes:
        for number, size in enumerate(sizes):
            shown = [by_size.get(size, Estimate(math.nan)) for by_size in estimates.values()]
            mean, low, high = 100 * np.transpose(shown)
            places = np.arange(len(shown)) + 0.8 * ((number + 0.5) / len(sizes) - 0.5)
            axes.errorbar(
                mean,
                places,
                xerr=(mean - low, high - mean),
                label=size_text(size),
                linestyle="none",
                linewidth=1.2,
            )
        axes.axvline(0, color="0.4", linewidth=1)
        axes.set_yticks(range(len(estimates)), estimates)
        axes.set_ylim(len(estimates) - 0.5, -0.5)


def values_by_layer(
    values: Sequence[Float[np.ndarray, " _"]], path: pathlib.Path, *, label: str, title: str
) -> None:
    """Draws one value per head over the layers: the mean as a line, heads as dots.

    Args:
        values: an array [N] for each layer.
        path: of the PNG file.
        label: of the vertical axis, with the unit.
        title: of the picture.
    """
    layers = range(1, len(values) + 1)
    with diagram(path, title, "layer (line: mean of the heads; dots: heads)", label) as axes:
        axes.plot(layers, [np.mean(heads) for heads in values])
        for layer, heads in zip(layers, values, strict=True):
            axes.plot([layer] * len(heads), heads, ".", color=COLOURS[0], markersize=4, alpha=0.35)
        axes.set_xticks(layers)


def lines(
    curves: Mapping[str, tuple[Any, Any]],
    path: pathlib.Path,
    *,
    x: str,
    y: str,
    title: str,
    yscale: str = "linear",
) -> None:
    """Draws curves.

    Args:
        curves: name -> (horizontal, vertical), two sequences of numbers of equal length.
        path: of the PNG file.
        x, y: labels of the axes, with units.
        title: of the picture.
        yscale: "linear" or "log".
    """
    with diagram(path, title, x, y) as axes:
        for name, curve in curves.items():
            marker = "." if len(curve[0]) == 1 else ""  # a line through one point is invisible
            axes.plot(*curve, label=name, linewidth=1.3, marker=marker)
        axes.set_yscale(yscale)


Panels = Mapping[str, Mapping[str, Mapping[Any, Any]]]  # model -> scheme -> x -> y


def curves_by_panel(
    panels: Panels,
    printed: Panels,
    path: pathlib.Path,
    *,
    title: str,
    x: str,
    y: str,
    yscale: str = "linear",
    zero: bool = False,
    columns: int = 3,
) -> None:
    """Draws a panel for each model with a line for each scheme, and published points dashed.

    Args:
        panels: a model's lines, each a scheme's numbers by their place on the x axis.
        printed: the same of published numbers, drawn in the same colours.
        path: of the PNG file.
        title: of the picture.
        x, y: labels of the axes, with units.
        yscale: "linear" or "log".
        zero: draw a line at zero.
        columns: panels in a row.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    with _panels(
        path, title, list(panels), columns=columns, panel=(3.2, 3.0), margins=(1.9, 0.7)
    ) as all_axes:
        for axes, (panel, curves) in zip(all_axes, panels.items(), strict=True):
            for name in names:
                style = {"color": colours[name], "linewidth": 1.3}
                points = sorted(curves.get(name, {}).items())
                style["marker"] = "" if len(points) > 50 else "o"
                axes.plot(*_columns(points), label=name, **style)
                dashed = {"linestyle": "--", "markerfacecolor": "none"}
                axes.plot(
                    *_columns(sorted(printed.get(panel, {}).get(name, {}).items())),
                    **style | dashed,
                )
            axes.grid()
            axes.set_yscale(yscale)
            lines = (*curves.values(), *printed.get(panel, {}).values())
            if 0 < len(places := {x for line in lines for x in line}) <= 12:
                axes.set_xticks(sorted(places), [f"{x:g}" for x in sorted(places)], fontsize=6)
            if zero:
                axes.axhline(0, color="0.4", linewidth=1)
        axes.figure.supxlabel(x)
        axes.figure.supylabel(y)


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    return tuple(zip(*points, strict=True)) or ((), ())


def categories(
    rows: Mapping[str, Sequence[str]],
    names: Sequence[str],
    path: pathlib.Path,
    *,
    title: str,
    x: str,
) -> None:
    """Draws rows of cells that are coloured by what they are.

    Args:
        rows: name -> the category of each cell.
        names: of the categories, in the order of the legend.
        path: of the PNG file.
        title: of the picture.
        x: label of the horizontal axis.
    """
    colours = dict(zip(names, ("0.85", *COLOURS), strict=False))
    with diagram(path, title, x, "", height=1.4 + 0.45 * len(rows)) as axes:
        for number, cells in enumerate(rows.values()):
            for name in names:
                places = [place for place, cell in enumerate(cells) if cell == name]
                axes.bar(
                    places,
                    [0.8] * len(places),
                    bottom=number - 0.4,
                    width=0.95,
                    color=colours[name],
                    label=name if number == 0 else None,
                )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.grid(visible=False)


def panels(
    maps: Mapping[str, Float[np.ndarray, "_ _"]],
    path: pathlib.Path,
    *,
    title: str,
    label: str,
    mark: Sequence[tuple[int, int]] | Literal["middle"] | None = "middle",
    columns: int = 6,
) -> None:
    """Draws maps of values in [-1, 1] side by side, with one colour bar.

    Args:
        maps: name -> [H, W].
        path: of the PNG file.
        title: of the picture.
        label: of the colour bar.
        mark: (row, column) of the token that is marked on each map, "middle" for (H // 2, W // 2)
            of all; None for no mark.
        columns: panels in a row.
    """
    with _panels(
        path, title, list(maps), columns=columns, panel=(1.55, 1.75), margins=(0.9, 0.4)
    ) as all_axes:
        for number, (axes, values) in enumerate(zip(all_axes, maps.values(), strict=True)):
            image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
            if mark is not None:
                middle = (values.shape[0] // 2, values.shape[1] // 2)
                row, column = middle if mark == "middle" else mark[number]
                axes.plot(column, row, marker="+", color="black", markersize=7)
            axes.set_axis_off()
        axes.figure.colorbar(image, ax=all_axes, fraction=0.05, aspect=25, label=label)


def overlays(
    image: UInt8[np.ndarray, "H W 3"],
    maps: Mapping[str, Float[np.ndarray, "_ _"]],
    path: pathlib.Path,
    *,
    title: str,
    place: tuple[float, float] | None,
) -> None:
    """Draws an image, then each map over the image, relative to its largest value.

    Args:
        image: [H, W, 3].
        maps: name -> [h, w], of any size.
        path: of the PNG file.
        title: of the picture.
        place: (y, x) as fractions of height and width. A cross marks the centre of the token there;
            on the image, that of the first map's token. None for no mark.
    """
    height, width = image.shape[:2]
    panel = (1.9, 1.9 * height / width + 0.25)
    with _panels(
        path, title, ["image", *maps], columns=5, panel=panel, margins=(0.9, 0.4)
    ) as all_axes:
        first = next(iter(maps.values()))
        for number, (axes, values) in enumerate(
            zip(all_axes, [first, *maps.values()], strict=True)
        ):
            rows, columns = values.shape
            placement = {
                "extent": (-0.5, columns - 0.5, rows - 0.5, -0.5),  # in tokens
                "aspect": height / rows * columns / width,
            }
            axes.imshow(image, **placement)
            if number > 0:
                colours = {"cmap": "inferno", "alpha": 0.65, "vmin": 0, "vmax": 1}
                relative = values / max(values.max(), np.finfo(np.float32).tiny)
                drawn = axes.imshow(relative, interpolation="bilinear", **colours, **placement)
            if place is not None:
                row, column = token_at(place, values.shape)
                axes.plot(column, row, "+", color="cyan", markersize=9, markeredgewidth=2)
            axes.set_axis_off()
        axes.figure.colorbar(
            drawn, ax=all_axes, fraction=0.05, aspect=25, label="weight / largest of the map"
        )


def costs(
    added: Mapping[str, tuple[int | None, int | None]], path: pathlib.Path, *, title: str
) -> None:
    """Draws the parameters and operations that each scheme adds to a model, as bars.

    Args:
        added: scheme -> (parameters, operations per image); None where they are not counted.
        path: of the PNG file.
        title: of the picture.
    """
    with picture(path, title, (WIDTH, 1.1 + 0.3 * len(added))) as figure:
        all_axes = figure.subplots(1, 2, sharey=True)
        labels = ("added parameters", "added operations per image")
        for axes, label, numbers in zip(
            all_axes, labels, np.transpose(list(added.values())), strict=True
        ):
            bars = axes.barh(list(added), [number or 0 for number in numbers], color=COLOURS[0])
            axes.bar_label(
                bars,
                ["not counted" if number is None else f"{number:,}" for number in numbers],
                padding=3,
                fontsize=7,
            )
            axes.margins(x=0.3)
            axes.set_xlabel(label)
        all_axes[0].invert_yaxis()


def frequencies_before_and_after(
    before: Float[np.ndarray, "layers N 2 R"],
    after: Float[np.ndarray, "layers N 2 R"],
    path: pathlib.Path,
    *,
    title: str,
) -> None:
    """Draws frequencies before and after training, one panel per layer.

    Args:
        before, after: [layers, N, (y, x), R], radians per token.
        path: of the PNG file.
        title: of the picture.
    """
    names = [f"layer {layer + 1}" for layer in range(len(after))]
    reach = 1.05 * max(abs(before).max(), abs(after).max())
    with _panels(path, title, names, columns=4, panel=(2.1, 2.1), margins=(1.2, 0.6)) as all_axes:
        for axes, old, new in zip(all_axes, before, after, strict=True):
            for freqs, marker, colour, label in (
                (old, ".", "0.6", "before"),
                (new, "x", COLOURS[1], "after"),
            ):
                y, x = np.moveaxis(freqs, 1, 0).reshape(2, -1)
                axes.plot(x, y, marker, color=colour, markersize=3.5, label=label)
            axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.figure.supxlabel("x, radians per token")
        axes.figure.supylabel("y, radians per token")
