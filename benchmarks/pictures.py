"""Draws the pictures of the README from the results: `python -m benchmarks pictures`, or `make tables`.

Each belongs to the newest result of one part of `python -m benchmarks evidence`, whose checksum it carries: a test fails where a picture
is of another one. Accuracies are means over seeds, with their 95 % intervals.
"""

import argparse
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.evidence import accuracies, interval
from benchmarks.tables import ROOT, Result, newest, read_results
from rope_jax.analysis.plots import COLOURS, MARKERS

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # the name of the text in a PNG file


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        file: its name in docs/images.
        part: of the evidence.
        says: what it shows, for readers who do not see it, and its title.
        draw: (axes, result) -> None.
    """

    file: str
    part: str
    says: str
    draw: Callable[[Any, Result], None]


def over_resolutions(axes: Any, result: Result, backbone: str, schemes: tuple[str, ...]) -> None:
    """Accuracy over resolution, a line for each scheme."""
    trained, means = None, []
    for number, scheme in enumerate(scheme for scheme in schemes if accuracies(result["runs"], backbone, scheme, None)):
        runs = [run for run in result["runs"] if (run["backbone"], run["position"]) == (backbone, scheme)]
        trained, *_ = sides = [row["resolution"][0] for row in runs[0]["eval"]]
        points = [(side, *interval(list(accuracies(runs, backbone, scheme, side).values()))) for side in sorted(sides)]
        side, mean, half = zip(*points, strict=True)
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        axes.errorbar(side, mean, half, label=scheme, capsize=2, elinewidth=0.8, **style)
        axes.set_xticks(side)
        means += mean
    if trained:
        axes.axvline(trained, color="0.9", linewidth=8, zorder=0)
        axes.set_ylim(max(min(means) - 8, 0), min(max(means) + 8, 100))  # of two seeds intervals may be wider than that
    axes.set_xlabel("test resolution (pixels; grey: training resolution)")


def by_backbone(axes: Any, result: Result, schemes: tuple[str, ...]) -> None:
    """Accuracy where models were trained: a group of bars for each backbone, from the least to the most accurate of them upwards."""
    backbones = [name for name in dict.fromkeys(run["backbone"] for run in result["runs"]) if _has(result, name, schemes)]
    width, lowest = 0.8 / len(schemes), []
    for number, scheme in enumerate(schemes):
        found = [interval(list(accuracies(result["runs"], name, scheme, None).values())) for name in backbones]
        places = [place + (number - (len(schemes) - 1) / 2) * width for place in range(len(backbones))]
        means, halves = zip(*found, strict=True)
        axes.bar(places, means, width, yerr=halves, label=scheme, color=COLOURS[number], capsize=2, error_kw={"elinewidth": 0.8})
        lowest += [mean - half for mean, half in found]
    axes.set_ylim(bottom=max(0, min(lowest) - 2))
    axes.set_xticks(range(len(backbones)), backbones)


def _has(result: Result, backbone: str, schemes: tuple[str, ...]) -> bool:
    """Whether every scheme has as many seeds as another, and more than one."""
    counts = {len(accuracies(result["runs"], backbone, scheme, None)) for scheme in schemes}
    return len(counts) == 1 and min(counts) > 1


_CURVES = ("none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope(k_rope=2)", "axial_rope", "rope_mixed+ape", "lape(ape)")
_BARS = ("none", "rpb", "axial_rope")
PICTURES = {
    picture.file: picture
    for picture in (
        Picture(
            "resolutions.png",
            "vit",
            "A small ViT on 10,000 images of Fashion-MNIST: accuracy by scheme and resolution",
            lambda axes, result: over_resolutions(axes, result, "vit", _CURVES),
        ),
        Picture(
            "backbones.png",
            "backbones",
            "Small backbones on 10,000 images of Fashion-MNIST: accuracy by scheme",
            lambda axes, result: by_backbone(axes, result, _BARS),
        ),
        *(
            Picture(
                f"tiny_imagenet_{backbone}.png",
                "tiny_imagenet",
                f"{name} on 50 classes of Tiny-ImageNet: accuracy by scheme and resolution",
                lambda axes, result, backbone=backbone: over_resolutions(axes, result, backbone, _CURVES),
            )
            for backbone, name in (("vit", "A small ViT"), ("swin", "A small Swin"), ("nat", "A small NAT"))
        ),
    )
}


def result_of(picture: Picture, results: list[Result]) -> Result | None:
    """What a picture is drawn from: the newest result of its part, where it has two seeds of anything."""
    result = newest(results, "evidence", part=picture.part)
    return result if result and len({run["seed"] for run in result["runs"]}) > 1 else None


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
    picture.draw(axes, result)
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
