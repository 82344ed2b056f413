"""Draws the pictures of the documentation: `python -m docs.make_pictures`, or `make tables`.

Each picture shows a result of experiments/results, whose checksum is stored in the picture. A
picture of another result is drawn again. Scores are means over seeds with 95 % intervals.
claims.png and rules.png, of a finished experiment, are kept as they are.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks._runner import Result
from benchmarks.evidence import SEEDS
from docs.results import ROOT, newest, read_results
from rope_jax.analysis.intervals import student
from rope_jax.analysis.runs import Size
from rope_jax.evaluate.curves import RESOLUTION, WIDTH, draw_by_resolution, picture
from rope_jax.evaluate.results import main_score, row_task

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # key of the text field in a PNG file
_AXIAL = ["axial_rope(k_rope=2)", "axial_rope"]
CURVES = ("none", "ape", "rpb", "rope2d", "rope_mixed", *_AXIAL, "rope_mixed+ape", "lape(ape)")
_BOTH = ["ape", "rope2d", "rope_mixed"]  # of the same colours in both pictures
# Without axial_rope(k_rope=1), which is 20 to 35 points lower and would hide the differences.
TINY_CURVES = (*_BOTH, "none", "rpb", "axial_rope", "axial_rope(k_rope=8)")
INTERPOLATED_CURVES = (*_BOTH, "rope2d(extend=interpolate)", "rope_mixed(extend=interpolate)")
Curves = dict[str, dict[Size, list[float]]]  # by name: accuracies of all seeds, by resolution


def draw_by_scheme(figure: Figure, result: Result, schemes: Sequence[str] = CURVES) -> None:
    """Plots the score over resolution, with a curve per scheme of a ViT.

    As in the tables, seeds that test a claim again are left out.
    """
    measured: Curves = {scheme: {} for scheme in schemes}
    for run in result["runs"]:
        is_vit, is_first = run.get("backbone", "vit") == "vit", run["seed"] < SEEDS
        if is_vit and is_first and run["position"] in measured:
            for row in run["eval"]:
                scores = measured[run["position"]].setdefault(tuple(row["resolution"]), [])
                scores.append(100 * row[main_score(row)])
    curves = {scheme: curve for scheme, curve in measured.items() if curve}
    task = row_task(result["runs"][0]["eval"][0])
    label = f"{task.score_name} (%), 95 % interval over seeds"
    plot(figure.add_subplot(xlabel=RESOLUTION, ylabel=label), curves)


def plot(axes: Axes, curves: Curves) -> None:
    """Plots the mean over seeds and its interval."""
    means = {
        name: {size: student(values) for size, values in curve.items()}
        for name, curve in curves.items()
    }
    draw_by_resolution(axes, means)


class Picture(NamedTuple):
    """One picture.

    Attributes:
        file: file name in docs/images.
        experiment: whose newest result it shows.
        settings: of this result.
        title: title, also used as alternative text.
        draw: draws a result.
        height: in inches.
    """

    file: str
    experiment: str
    settings: Mapping[str, str]
    title: str
    draw: Callable[[Figure, Result], None]
    height: float = 4.2


PICTURES = [
    Picture(
        "scenes.png",
        "scenes",
        {},
        "Segmentation with a small ViT: mIoU by scheme and resolution",
        draw_by_scheme,
    ),
    Picture(
        "tiny_imagenet.png",
        "evidence",
        {"part": "tiny_imagenet"},
        "A small ViT on 20 classes of Tiny-ImageNet, trained on random crops",
        functools.partial(draw_by_scheme, schemes=TINY_CURVES),
        4.8,
    ),
    Picture(
        "tiny_interpolated.png",
        "evidence",
        {"part": "tiny_imagenet"},
        "The same ViT with interpolated positions",
        functools.partial(draw_by_scheme, schemes=INTERPOLATED_CURVES),
        4.8,
    ),
    Picture(
        "fashion.png",
        "evidence",
        {"part": "fashion"},
        "A small ViT on Fashion-MNIST: accuracy by scheme and resolution",
        draw_by_scheme,
    ),
    Picture(
        "fashion_crops.png",
        "evidence",
        {"part": "fashion_crops"},
        "A small ViT on Fashion-MNIST, trained on random crops",
        draw_by_scheme,
    ),
]


def checksum(result: Result) -> str:
    """SHA-256 of the runs in a result."""
    return hashlib.sha256(json.dumps(result["runs"], sort_keys=True).encode()).hexdigest()


def is_current(path: pathlib.Path, result: Result) -> bool:
    """Checks whether a picture exists and was drawn from a result."""
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get(CHECKSUM) == checksum(result)


def stale(results: Sequence[Result]) -> list[tuple[Picture, Result]]:
    """Pictures that were not drawn from these results, and their results."""
    latest = [(x, newest(results, x.experiment, x.settings)[0]) for x in PICTURES]
    return [(x, result) for x, result in latest if not is_current(FOLDER / x.file, result)]


def main() -> None:
    """Draws the pictures that are not up to date."""
    for spec, result in stale(read_results()):
        path = FOLDER / spec.file
        with picture(path, spec.title, (WIDTH, spec.height), below=True, dpi=140) as figure:
            spec.draw(figure, result)
        text = PngInfo()
        text.add_text(CHECKSUM, checksum(result))
        # A palette makes the file a third as large.
        image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(path, pnginfo=text)
        print(f"drawn: {spec.file}")


if __name__ == "__main__":
    main()
