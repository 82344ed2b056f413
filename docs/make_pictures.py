"""Draws the pictures of the documentation: `python -m docs.make_pictures`, or `make tables`.

Each picture shows the newest result of one part of `python -m experiments evidence`. The checksum
of the result is stored in the picture, so that a test can check whether it is up to date.
Accuracies are means over seeds with 95 % intervals. --all also redraws pictures that are up to
date.
"""

import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks._runner import Result
from docs.extend import rows_of
from docs.results import ROOT, newest, read_results
from experiments._claims import Claim, accuracies, claims, interval, judge, sides, trained_size
from rope_jax.analysis.plots import COLOURS, MARKERS

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # key of the text field in a PNG file
_AXIAL = ["axial_rope(k_rope=2)", "axial_rope"]
CURVES = ["none", "ape", "rpb", "rope2d", "rope_mixed", *_AXIAL, "rope_mixed+ape", "lape(ape)"]
CLAIMS, RULES = "claims", "rules"
VERDICTS = {"shown": COLOURS[0], "refuted": COLOURS[1], "not shown": "0.6"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        file: file name in docs/images.
        part: part of the evidence experiment.
        title: title, also used as alternative text.
        shows: the backbone of a plot of accuracy over resolution, with a curve per scheme of
            CURVES; CLAIMS for the difference of every claim; RULES for the accuracy with each rule
            of the experiment `extend`, without those that have options.
    """

    file: str
    part: str
    title: str
    shows: str


_TINY = "50 classes of Tiny-ImageNet: accuracy by scheme and resolution"
PICTURES = [
    Picture(
        "fashion.png",
        "fashion",
        "A small ViT on Fashion-MNIST: accuracy by scheme and resolution",
        "vit",
    ),
    Picture(
        "fashion_crops.png",
        "fashion_crops",
        "A small ViT on Fashion-MNIST, trained on random crops",
        "vit",
    ),
    Picture("claims.png", "fashion", "The papers' claims on Fashion-MNIST", CLAIMS),
    Picture("rules.png", "fashion", "Rotary embeddings beyond the size of training", RULES),
    Picture("tiny_imagenet_vit.png", "tiny_imagenet", f"A small ViT on {_TINY}", "vit"),
    Picture("tiny_imagenet_swin.png", "tiny_imagenet", f"A small Swin on {_TINY}", "swin"),
    Picture("tiny_imagenet_nat.png", "tiny_imagenet", f"A small NAT on {_TINY}", "nat"),
]


def shown(picture: Picture, result: Result) -> list[Any]:
    """Returns the schemes or claims to draw: those that have all seeds."""
    runs, wanted = result["runs"], len(result["settings"]["seeds"])
    if picture.shows == CLAIMS:
        return [claim for claim in claims(picture.part) if judge(claim, runs, wanted)]
    if picture.shows == RULES:
        return list(dict.fromkeys(row["position"] for row in rows_of(result)))
    return [x for x in CURVES if len(accuracies(runs, picture.shows, x, None)) == wanted]


def result_of(picture: Picture, results: Sequence[Result]) -> Result | None:
    """Returns the newest result of a picture's part, or None if there is nothing to draw."""
    result = newest(results, "evidence", part=picture.part)
    return result if result and shown(picture, result) else None


def by_scheme(figure: Any, result: Result, backbone: str, schemes: Sequence[str]) -> None:
    """Plots accuracy over resolution, with a curve per scheme."""
    axes, means = figure.add_subplot(), []
    first = next(run for run in result["runs"] if run["backbone"] == backbone)
    sides = sorted(row["resolution"][0] for row in first["eval"])
    trained, _ = trained_size(result["runs"], backbone)
    for number, scheme in enumerate(schemes):
        values = [list(accuracies(result["runs"], backbone, scheme, x).values()) for x in sides]
        means += curve(axes, sides, values, scheme, number, len(schemes))
    axes.set_xticks(sides)
    axes.axvline(trained, color="0.9", linewidth=8, zorder=0)
    # Limits ignore the intervals, which are wide for two seeds.
    axes.set_ylim(max(min(means) - 8, 0), min(max(means) + 8, 100))
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")
    axes.set_ylabel("top-1 accuracy (%), 95 % interval over seeds")


def by_rule(figure: Any, result: Result, schemes: Sequence[str]) -> None:
    """Plots accuracy over resolution, with a plot per scheme and a curve per rule."""
    rows = [row for row in rows_of(result) if "(" not in row["rule"]]
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    trained, _ = trained_size(result["runs"], rows[0]["model"])
    plots = figure.subplots(1, len(schemes), sharey=True, squeeze=False)[0]
    for axes, scheme in zip(plots, schemes, strict=True):
        own = [row for row in rows if row["position"] == scheme]
        sides = sorted({row["resolution"][0] for row in own})
        for number, rule in enumerate(rules):
            # At the size of training all rules are the same.
            at = [(side, "none" if side == trained else rule) for side in sides]
            values = [
                [100 * x["score"] for x in own if (x["resolution"][0], x["rule"]) == place]
                for place in at
            ]
            curve(axes, sides, values, rule if axes is plots[0] else None, number, len(rules))
        axes.set_title(scheme, fontsize=9)
        axes.set_xticks(sides)
        axes.tick_params("x", labelsize=7, labelrotation=90)
        axes.axvline(trained, color="0.9", linewidth=6, zorder=0)
    figure.supxlabel("test resolution (pixels; grey: training resolution)", fontsize=9)
    plots[0].set_ylabel("top-1 accuracy (%), 95 % interval")


def curve(
    axes: Any,
    sides: Sequence[int],
    values: Sequence[Sequence[float]],
    label: str | None,
    number: int,
    count: int,
) -> list[float]:
    """Plots one of several curves over sides, and returns its means over seeds."""
    mean, half = zip(*(interval(x) for x in values), strict=True)
    # Shifted a little, so that intervals do not overlap.
    aside = (number - (count - 1) / 2) * (sides[-1] - sides[0]) / 130
    axes.errorbar(
        [side + aside for side in sides],
        mean,
        half,
        label=label,
        capsize=2,
        elinewidth=0.8,
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
    )
    return list(mean)


def of_claims(figure: Any, result: Result, found: Sequence[Claim]) -> None:
    """Plots the difference of each claim with its interval, and where that has to be above.

    Differences at other sizes than that of training are much larger, and have a plot of their own.
    """
    groups = [[x for x in found if (x.resolution is None) == trained] for trained in (True, False)]
    groups = [group for group in groups if group]
    plots = figure.subplots(len(groups), squeeze=False, height_ratios=[*map(len, groups)])[:, 0]
    for axes, group in zip(plots, groups, strict=True):
        for place, claim in enumerate(group):
            verdict = judge(claim, result["runs"])
            style = {"color": VERDICTS[verdict.verdict], "marker": "o", "markersize": 4}
            axes.errorbar(verdict.difference, place, xerr=verdict.half_width, capsize=2, **style)
            axes.plot([-claim.margin] * 2, [place - 0.5, place + 0.5], color="0.4", linewidth=1)
        labels = [sides(claim).replace("`", "").replace(" with ", ", ") for claim in group]
        axes.set_yticks(range(len(group)), labels, fontsize=7)
        axes.set_ylim(len(group) - 0.5, -0.5)
    for name, colour in VERDICTS.items():
        plots[0].plot([], [], color=colour, marker="o", linestyle="none", label=name)
    plots[-1].set_xlabel(
        "difference in points, 95 % interval over seeds; shown if right of the grey line",
        fontsize=9,
    )


def checksum(result: Result) -> str:
    """Name and SHA-256 of the file of a result."""
    path = ROOT / result["file"]
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def draw(picture: Picture, result: Result, folder: pathlib.Path) -> None:
    """Draws a picture and writes it to a folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    found = shown(picture, result)
    height = 1.6 + 0.17 * len(found) if picture.shows == CLAIMS else 4.0
    figure = Figure(figsize=(7.2, height), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if picture.shows == CLAIMS:
        of_claims(figure, result, found)
    elif picture.shows == RULES:
        by_rule(figure, result, found)
    else:
        by_scheme(figure, result, picture.shows, found)
    figure.suptitle(picture.title, fontsize=10)
    for axes in figure.axes:
        axes.grid(alpha=0.3, axis="x" if picture.shows == CLAIMS else "y")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    text = PngInfo()
    text.add_text(CHECKSUM, checksum(result))
    # A palette makes the file a third as large.
    drawn.quantize(256, dither=Image.Dither.NONE).save(folder / picture.file, pnginfo=text)


def drawn_from(path: pathlib.Path) -> str | None:
    """Returns the checksum stored in a picture; None if the file does not exist."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(CHECKSUM, "")


def stale(results: Sequence[Result]) -> list[str]:
    """Names of the pictures that are missing or out of date, or that have no result."""
    found = [(picture.file, result_of(picture, results)) for picture in PICTURES]
    expected = {file: checksum(result) for file, result in found if result}
    names = sorted(expected.keys() | {path.name for path in FOLDER.glob("*.png")})
    return [name for name in names if drawn_from(FOLDER / name) != expected.get(name)]


def main(argv: Sequence[str]) -> None:
    """Draws the pictures that are out of date."""
    results = read_results()
    of = {picture.file: (picture, result_of(picture, results)) for picture in PICTURES}
    for name in list(of) if "--all" in argv else stale(results):
        picture, result = of.get(name, (None, None))
        if result:
            draw(picture, result, FOLDER)
            print(f"drawn: {name}")
        elif (FOLDER / name).exists():
            print(f"{name} has no result: delete the file")


if __name__ == "__main__":
    main(sys.argv[1:])
