"""Draws the pictures of the README from the results: `python -m benchmarks pictures`, or `make tables`.

Each belongs to the newest result of one part of `python -m benchmarks evidence`, whose checksum it carries: a test fails where a picture
is of another one. Accuracies are means over seeds, with their 95 % intervals.
"""

import argparse
import dataclasses
import hashlib
import pathlib
from typing import Any

from benchmarks.evidence import accuracies, interval
from benchmarks.tables import ROOT, Result, newest, read_results
from rope_jax.analysis.plots import COLOURS, MARKERS

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # the name of the text in a PNG file


CURVES = ("none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope(k_rope=2)", "axial_rope", "rope_mixed+ape", "lape(ape)")
POINTS = ("none", "rpb", "axial_rope")


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        file: its name in docs/images.
        part: of the evidence.
        says: what it shows, for readers who do not see it, and its title.
        backbone: whose accuracy is drawn over resolution, a line for each scheme of CURVES; None for points of all backbones, with POINTS.
    """

    file: str
    part: str
    says: str
    backbone: str | None = None


_SMALL = {"vit": "A small ViT", "swin": "A small Swin", "nat": "A small NAT"}
PICTURES = {
    picture.file: picture
    for picture in (
        Picture("resolutions.png", "vit", "A small ViT on 10,000 images of Fashion-MNIST: accuracy by scheme and resolution", "vit"),
        Picture("backbones.png", "backbones", "Small backbones on 10,000 images of Fashion-MNIST: accuracy by scheme"),
        *(
            Picture(
                f"tiny_imagenet_{backbone}.png",
                "tiny_imagenet",
                f"{name} on 50 classes of Tiny-ImageNet: accuracy by scheme and resolution",
                backbone,
            )
            for backbone, name in _SMALL.items()
        ),
    )
}


def shown(picture: Picture, result: Result) -> list[str]:
    """The schemes that get a line, or the backbones that get points: those with several seeds, and points with as many as each other."""
    seeds = lambda backbone, scheme: len(accuracies(result["runs"], backbone, scheme, None))
    if picture.backbone:
        return [scheme for scheme in CURVES if seeds(picture.backbone, scheme) > 1]
    counts = {run["backbone"]: {seeds(run["backbone"], scheme) for scheme in POINTS} for run in result["runs"]}
    return [backbone for backbone, found in counts.items() if len(found) == 1 and min(found) > 1]


def result_of(picture: Picture, results: list[Result]) -> Result | None:
    """What a picture is drawn from: the newest result of its part, where there is anything to show."""
    result = newest(results, "evidence", part=picture.part)
    return result if result and shown(picture, result) else None


def over_resolutions(axes: Any, result: Result, backbone: str, schemes: list[str]) -> None:
    """Accuracy over resolution, a line for each scheme."""
    means = []
    for number, scheme in enumerate(schemes):
        runs = [run for run in result["runs"] if (run["backbone"], run["position"]) == (backbone, scheme)]
        trained, *_ = sides = [row["resolution"][0] for row in runs[0]["eval"]]
        points = [(side, *interval(list(accuracies(runs, backbone, scheme, side).values()))) for side in sorted(sides)]
        side, mean, half = zip(*points, strict=True)
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        aside = (number - (len(schemes) - 1) / 2) * (side[-1] - side[0]) / 130  # or intervals would hide each other
        axes.errorbar([x + aside for x in side], mean, half, label=scheme, capsize=2, elinewidth=0.8, **style)
        means += mean
    axes.set_xticks(side)
    axes.axvline(trained, color="0.9", linewidth=8, zorder=0)
    axes.set_ylim(max(min(means) - 8, 0), min(max(means) + 8, 100))  # of two seeds intervals may be wider than that
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")


def by_backbone(axes: Any, result: Result, backbones: list[str]) -> None:
    """Accuracy where models were trained: a group of points for each backbone."""
    for number, scheme in enumerate(POINTS):
        found = [interval(list(accuracies(result["runs"], name, scheme, None).values())) for name in backbones]
        places = [place + 0.2 * (number - (len(POINTS) - 1) / 2) for place in range(len(backbones))]
        style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": "none"}
        axes.errorbar(places, *zip(*found, strict=True), label=scheme, capsize=3, elinewidth=1, **style)
    axes.set_xticks(range(len(backbones)), backbones)


def checksum(result: Result) -> str:
    """Name and SHA-256 of a result's file."""
    return f"{result['file']} {hashlib.sha256((ROOT / 'benchmarks' / 'results' / result['file']).read_bytes()).hexdigest()}"


def draw(picture: Picture, result: Result, folder: pathlib.Path) -> None:
    """Writes a picture into a folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if picture.backbone:
        over_resolutions(axes, result, picture.backbone, shown(picture, result))
    else:
        by_backbone(axes, result, shown(picture, result))
    axes.set_ylabel("top-1 accuracy (%), 95 % interval over seeds")
    figure.suptitle(picture.says, fontsize=10)
    axes.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / picture.file, dpi=100, metadata={CHECKSUM: checksum(result)})


def stale(results: list[Result]) -> list[str]:
    """Names of the pictures that are missing, of another result, or of none."""
    from PIL import Image

    def says(path: pathlib.Path) -> str | None:
        if not path.exists():
            return None
        with Image.open(path) as image:
            return image.info.get(CHECKSUM, "")

    expected = {name: checksum(result) for name, picture in PICTURES.items() if (result := result_of(picture, results))}
    names = sorted(expected.keys() | {path.name for path in FOLDER.glob("*.png")})
    return [name for name in names if says(FOLDER / name) != expected.get(name)]


def main(argv: list[str]) -> None:
    """Draws those that are not up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pictures", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also those that are up to date")
    args = parser.parse_args(argv)
    results = read_results()
    for name in list(PICTURES) if args.all else stale(results):
        if name in PICTURES and (result := result_of(PICTURES[name], results)):
            draw(PICTURES[name], result, FOLDER)
            print(f"drawn: {name}")
        else:
            print(f"no result for {name}" + (": delete it" if (FOLDER / name).exists() else ""))
