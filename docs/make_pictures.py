"""Draws the pictures of the documentation: `python -m docs.make_pictures`, or `make tables`.

Each picture shows the newest result of one part of `python -m experiments evidence`, whose checksum
is stored in the picture: those of another result are drawn anew. Accuracies are means over seeds
with 95 % intervals.
"""

import hashlib
import io
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks._runner import Result
from docs.results import ROOT, newest, read_results
from experiments._claims import accuracies, claims, interval, judge, sides
from rope_jax.analysis.plots import COLOURS, MARKERS

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # key of the text field in a PNG file
_AXIAL = ["axial_rope(k_rope=2)", "axial_rope"]
CURVES = ["none", "ape", "rpb", "rope2d", "rope_mixed", *_AXIAL, "rope_mixed+ape", "lape(ape)"]
VERDICTS = {"shown": COLOURS[0], "refuted": COLOURS[1], "not shown": "0.6"}
Curves = dict[str, dict[int, list[float]]]  # by name: accuracies of all seeds, by side in pixels


def by_scheme(figure: Figure, result: Result, part: str) -> None:
    """Plots accuracy over resolution, with a curve per scheme of a ViT."""
    runs, curves = result["runs"], {}
    measured = [row["resolution"][0] for row in runs[0]["eval"]]
    for scheme in CURVES:
        found = {side: accuracies(runs, "vit", scheme, side) for side in sorted(measured)}
        if all(found.values()):
            curves[scheme] = {side: list(values.values()) for side, values in found.items()}
    axes = figure.add_subplot()
    plot(axes, curves, measured[0])
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")
    axes.set_ylabel("top-1 accuracy (%), 95 % interval over seeds")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)


def by_rule(figure: Figure, result: Result, part: str) -> None:
    """Plots accuracy over resolution, with a plot per scheme and a curve per rule of `extend`.

    At the training resolution all rules are the same; rules with options are left out.
    """
    schemes: dict[str, Curves] = {}
    for run in result["runs"]:
        trained = run["eval"][0]["resolution"]
        for row in run.get("rules", []):
            alike = row["resolution"] == trained
            for rule in ("none", "extrapolate", "interpolate", "ntk", "yarn"):
                if rule == row["rule"] or alike:
                    curve = schemes.setdefault(run["position"], {}).setdefault(rule, {})
                    curve.setdefault(row["resolution"][0], []).append(100 * row["score"])
    plots = figure.subplots(1, len(schemes), sharey=True)
    for axes, (scheme, curves) in zip(plots, schemes.items(), strict=True):
        plot(axes, curves, trained[0])
        axes.set_title(scheme, fontsize=9)
        axes.tick_params("x", labelsize=7, labelrotation=90)
    figure.supxlabel("test resolution (pixels; grey: training resolution)", fontsize=9)
    plots[0].set_ylabel("top-1 accuracy (%), 95 % interval")
    handles, labels = plots[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)


def plot(axes: Any, curves: Curves, trained: int) -> None:
    """Plots curves over sides, aside from each other so that intervals do not overlap."""
    for number, (label, curve) in enumerate(curves.items()):
        sides = sorted(curve)
        mean, half = zip(*(interval(curve[side]) for side in sides), strict=True)
        aside = (number - (len(curves) - 1) / 2) * (sides[-1] - sides[0]) / 130
        axes.errorbar(
            [side + aside for side in sides],
            mean,
            half,
            label=label,
            capsize=2,
            elinewidth=0.8,
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=5,
        )
    axes.set_xticks(sides)
    axes.axvline(trained, color="0.9", linewidth=7, zorder=0)
    axes.grid(alpha=0.3, axis="y")


def of_claims(figure: Figure, result: Result, part: str) -> None:
    """Plots the difference of each claim with its interval, and where that has to be above.

    Differences at other sizes than that of training are much larger, and have a plot of their own.
    """
    found = list(claims(part))
    groups = [[x for x in found if (x.resolution is None) == trained] for trained in (True, False)]
    plots = figure.subplots(len(groups), height_ratios=[*map(len, groups)])
    for axes, group in zip(plots, groups, strict=True):
        for place, claim in enumerate(group):
            verdict = judge(claim, result["runs"], len(result["settings"]["seeds"]))
            style = {"color": VERDICTS[verdict.verdict], "marker": "o", "markersize": 4}
            axes.errorbar(verdict.difference, place, xerr=verdict.half_width, capsize=2, **style)
            axes.plot([-claim.margin] * 2, [place - 0.5, place + 0.5], color="0.4", linewidth=1)
        labels = [sides(claim).replace("`", "").replace(" with ", ", ") for claim in group]
        axes.set_yticks(range(len(group)), labels, fontsize=7)
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.grid(alpha=0.3, axis="x")
    for name, colour in VERDICTS.items():
        plots[0].plot([], [], color=colour, marker="o", linestyle="none", label=name)
    plots[-1].set_xlabel(
        "difference in points, 95 % interval over seeds; shown if right of the grey line",
        fontsize=9,
    )
    figure.legend(loc="outside right center", frameon=False, fontsize=9)


class Picture(NamedTuple):
    """One picture.

    Attributes:
        file: file name in docs/images.
        part: part of the evidence experiment.
        title: title, also used as alternative text.
        draw: draws a result of this part.
        height: in inches.
    """

    file: str
    part: str
    title: str
    draw: Callable[[Figure, Result, str], None]
    height: float = 4.0


PICTURES = [
    Picture(
        "fashion.png",
        "fashion",
        "A small ViT on Fashion-MNIST: accuracy by scheme and resolution",
        by_scheme,
    ),
    Picture(
        "fashion_crops.png",
        "fashion_crops",
        "A small ViT on Fashion-MNIST, trained on random crops",
        by_scheme,
    ),
    Picture("claims.png", "fashion", "The papers' claims on Fashion-MNIST", of_claims, 7.9),
    Picture("rules.png", "fashion", "Rotary embeddings beyond the size of training", by_rule),
]


def checksum(result: Result) -> str:
    """SHA-256 of what the runs of a result have found."""
    return hashlib.sha256(json.dumps(result["runs"], sort_keys=True).encode()).hexdigest()


def is_of(path: pathlib.Path, result: Result) -> bool:
    """Whether a picture is there and was drawn from a result."""
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get(CHECKSUM) == checksum(result)


def stale(results: Sequence[Result]) -> list[tuple[Picture, Result]]:
    """The pictures that are not of these results, and their results."""
    of = {x: newest(results, "evidence", part=x.part)[0] for x in PICTURES}
    return [(x, result) for x, result in of.items() if not is_of(FOLDER / x.file, result)]


def main() -> None:
    """Draws the pictures that are not up to date."""
    for picture, result in stale(read_results()):
        figure = Figure(figsize=(7.2, picture.height), dpi=100, layout="constrained")
        picture.draw(figure, result, picture.part)
        figure.suptitle(picture.title, fontsize=10)
        figure.savefig(drawn := io.BytesIO())
        text = PngInfo()
        text.add_text(CHECKSUM, checksum(result))
        # A palette makes the file a third as large.
        image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(FOLDER / picture.file, pnginfo=text)
        print(f"drawn: {picture.file}")


if __name__ == "__main__":
    main()
