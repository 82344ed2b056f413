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

from benchmarks._runner import Result
from docs.results import ROOT, newest, read_results
from experiments._claims import Claim, accuracies, claims, interval, judge, sides
from rope_jax.analysis.plots import COLOURS, MARKERS

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # key of the text field in a PNG file
_AXIAL = ["axial_rope(k_rope=2)", "axial_rope"]
CURVES = ["none", "ape", "rpb", "rope2d", "rope_mixed", *_AXIAL, "rope_mixed+ape", "lape(ape)"]
POINTS = ("none", "rpb", "axial_rope")
BACKBONES, CLAIMS = "all backbones", "claims"
VERDICTS = {"shown": COLOURS[0], "refuted": COLOURS[1], "not shown": "0.6"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        file: file name in docs/images.
        part: part of the evidence experiment.
        title: title, also used as alternative text.
        shows: the backbone of a plot of accuracy over resolution, with a curve per scheme of
            CURVES; BACKBONES for the accuracy of all backbones with the schemes of POINTS; CLAIMS
            for the difference of every claim.
    """

    file: str
    part: str
    title: str
    shows: str


_FASHION = "10,000 images of Fashion-MNIST: accuracy by scheme"
_TINY = "50 classes of Tiny-ImageNet: accuracy by scheme and resolution"
PICTURES = [
    Picture("resolutions.png", "vit", f"A small ViT on {_FASHION} and resolution", "vit"),
    Picture("backbones.png", "backbones", f"Small backbones on {_FASHION}", BACKBONES),
    Picture(
        "fashion.png",
        "fashion",
        "A small ViT on Fashion-MNIST: accuracy by scheme and resolution",
        "vit",
    ),
    Picture("claims.png", "fashion", "The papers' claims on Fashion-MNIST", CLAIMS),
    Picture("tiny_imagenet_vit.png", "tiny_imagenet", f"A small ViT on {_TINY}", "vit"),
    Picture("tiny_imagenet_swin.png", "tiny_imagenet", f"A small Swin on {_TINY}", "swin"),
    Picture("tiny_imagenet_nat.png", "tiny_imagenet", f"A small NAT on {_TINY}", "nat"),
]


def shown(picture: Picture, result: Result) -> list[Any]:
    """Returns the schemes, backbones or claims to draw.

    Schemes and claims need several seeds; backbones need the same number of seeds for each of
    POINTS.
    """
    if picture.shows == CLAIMS:
        return [claim for claim in claims(picture.part) if judge(claim, result["runs"])]

    def seeds(backbone: str, scheme: str) -> int:
        return len(accuracies(result["runs"], backbone, scheme, None))

    if picture.shows != BACKBONES:
        return [scheme for scheme in CURVES if seeds(picture.shows, scheme) > 1]
    backbones = []
    for backbone in dict.fromkeys(run["backbone"] for run in result["runs"]):
        counts = {seeds(backbone, scheme) for scheme in POINTS}
        if len(counts) == 1 and min(counts) > 1:
            backbones.append(backbone)
    return backbones


def result_of(picture: Picture, results: Sequence[Result]) -> Result | None:
    """Returns the newest result of a picture's part, or None if there is nothing to draw."""
    result = newest(results, "evidence", part=picture.part)
    return result if result and shown(picture, result) else None


def over_resolutions(axes: Any, result: Result, backbone: str, schemes: Sequence[str]) -> None:
    """Plots accuracy over resolution, with a curve per scheme."""
    means = []
    for number, scheme in enumerate(schemes):
        runs = [x for x in result["runs"] if (x["backbone"], x["position"]) == (backbone, scheme)]
        trained, *_ = all_sides = [row["resolution"][0] for row in runs[0]["eval"]]
        sides = sorted(all_sides)
        values = [accuracies(runs, backbone, scheme, side).values() for side in sides]
        mean, half = zip(*(interval(list(x)) for x in values), strict=True)
        # Shifted a little, so that intervals do not overlap.
        aside = (number - (len(schemes) - 1) / 2) * (sides[-1] - sides[0]) / 130
        axes.errorbar(
            [side + aside for side in sides],
            mean,
            half,
            label=scheme,
            capsize=2,
            elinewidth=0.8,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
        )
        means += mean
    axes.set_xticks(sides)
    axes.axvline(trained, color="0.9", linewidth=8, zorder=0)
    # Limits ignore the intervals, which are wide for two seeds.
    axes.set_ylim(max(min(means) - 8, 0), min(max(means) + 8, 100))
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")


def by_backbone(axes: Any, result: Result, backbones: Sequence[str]) -> None:
    """Plots accuracy at the training resolution, with a group of points per backbone."""
    for number, scheme in enumerate(POINTS):
        values = [accuracies(result["runs"], name, scheme, None).values() for name in backbones]
        mean, half = zip(*(interval(list(x)) for x in values), strict=True)
        places = [place + 0.2 * (number - (len(POINTS) - 1) / 2) for place in range(len(backbones))]
        style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": "none"}
        axes.errorbar(places, mean, half, label=scheme, capsize=3, elinewidth=1, **style)
    axes.set_xticks(range(len(backbones)), backbones)


def of_claims(axes: Any, result: Result, found: Sequence[Claim]) -> None:
    """Plots the difference of each claim with its interval; grey: where it has to be above."""
    for place, claim in enumerate(found):
        verdict = judge(claim, result["runs"])
        style = {"color": VERDICTS[verdict.verdict], "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(verdict.difference, place, xerr=verdict.half_width, **style)
        axes.plot([-claim.margin] * 2, [place - 0.5, place + 0.5], color="0.4", linewidth=1)
    for name, colour in VERDICTS.items():
        axes.plot([], [], color=colour, marker="o", linestyle="none", label=name)
    labels = [sides(claim).replace("`", "").replace(" with ", ", ") for claim in found]
    axes.set_yticks(range(len(found)), labels, fontsize=7)
    axes.set_ylim(len(found) - 0.5, -0.5)


def checksum(result: Result) -> str:
    """Name and SHA-256 of the file of a result."""
    path = ROOT / result["file"]
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def draw(picture: Picture, result: Result, folder: pathlib.Path) -> None:
    """Draws a picture and writes it to a folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = shown(picture, result)
    height = 1.2 + 0.17 * len(found) if picture.shows == CLAIMS else 4.0
    figure = Figure(figsize=(7.2, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if picture.shows == CLAIMS:
        of_claims(axes, result, found)
        axes.set_xlabel("difference in points, 95 % interval over seeds; grey line: to be above")
    else:
        if picture.shows == BACKBONES:
            by_backbone(axes, result, found)
        else:
            over_resolutions(axes, result, picture.shows, found)
        axes.set_ylabel("top-1 accuracy (%), 95 % interval over seeds")
    figure.suptitle(picture.title, fontsize=10)
    axes.grid(alpha=0.3, axis="x" if picture.shows == CLAIMS else "y")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / picture.file, dpi=100, metadata={CHECKSUM: checksum(result)})


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
