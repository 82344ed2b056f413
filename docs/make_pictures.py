"""Draws the pictures of the documentation: `python -m docs.make_pictures`, or `make tables`.

Each picture shows a result of experiments/results, whose checksum is stored in the picture. A
picture of another result is drawn again. Scores are means over seeds with 95 % intervals.
"""

import functools
import hashlib
import json
import pathlib
import re
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
from rope_jax.evaluate.curves import COLOURS, RESOLUTION, WIDTH, draw_by_resolution, picture
from rope_jax.evaluate.results import main_score, score_name

FOLDER = ROOT / "docs" / "images"
CHECKSUM = "Results"  # key of the text field in a PNG file
_AXIAL = ["axial_rope(k_rope=2)", "axial_rope"]
CURVES = ("none", "ape", "rpb", "rope2d", "rope_mixed", *_AXIAL, "rope_mixed+ape", "lape(ape)")
# Without axial_rope(k_rope=1), which is 20 to 35 points lower and would hide the differences.
TINY_CURVES = ("none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope", "axial_rope(k_rope=8)")
_INTERPOLATED = ["rope2d(extend=interpolate)", "rope_mixed(extend=interpolate)"]
INTERPOLATED_CURVES = ("ape", "rope2d", "rope_mixed", *_INTERPOLATED)
VERDICTS = {"shown": COLOURS[0], "refuted": COLOURS[1], "not shown": "0.6"}
TRAINED, MARGIN = "as trained", 0.5  # points by which a model may be worse that is "as good"
VERDICT = re.compile(rf"({TRAINED}|\d+ px): (\S+) ± (\S+), ([a-z ]+)")
RULES = ("none", "extrapolate", "interpolate", "ntk", "yarn")
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
    label = f"{score_name(result['runs'][0]['eval'][0])} (%), 95 % interval over seeds"
    plot(figure.add_subplot(xlabel=RESOLUTION, ylabel=label), curves)


def draw_by_rule(figure: Figure, result: Result) -> None:
    """Plots accuracy over resolution, with a plot per scheme and a curve per rule of `extend`.

    At the training resolution all rules are the same; rules with options are left out.
    """
    schemes: dict[str, Curves] = {}
    for run in result["runs"]:
        trained = tuple(run["eval"][0]["resolution"])
        for row in run.get("rules", []):
            curves = schemes.setdefault(run["position"], {rule: {trained: []} for rule in RULES})
            size = tuple(row["resolution"])
            for rule in RULES if size == trained else {row["rule"]} & curves.keys():
                curves[rule].setdefault(size, []).append(100 * row["score"])
    plots = figure.subplots(-(-len(schemes) // 2), 2, sharex=True, sharey=True)
    for axes, (scheme, curves) in zip(plots.flat, schemes.items(), strict=True):
        plot(axes, curves)
        axes.set_title(scheme, fontsize=9)
        axes.tick_params("x", labelrotation=90)
    for axes in plots[:, 0]:
        axes.set_ylabel("top-1 (%), 95 % interval")
    for axes in plots[-1]:
        axes.set_xlabel("pixels; grey: training")


def plot(axes: Axes, curves: Curves) -> None:
    """Plots the mean over seeds and its interval."""
    means = {
        name: {size: student(values) for size, values in curve.items()}
        for name, curve in curves.items()
    }
    draw_by_resolution(axes, means)


def draw_claims(figure: Figure, result: Result) -> None:
    """Plots the difference of each claim with its interval, and the threshold of the claim.

    They are those of the result's table of verdicts, in tenths of a point; schemes without a model
    are those of the ViT.
    Differences beyond the training resolution are much larger, and have a separate plot.
    """
    points = [
        (claim.replace("`", "").replace("vit with ", "").replace(" with ", ", "), *verdict.groups())
        for claim, _, verdicts in result["tables"][1]["rows"]
        for verdict in VERDICT.finditer(verdicts)
    ]
    groups = [[x for x in points if (x[1] == TRAINED) == trained] for trained in (True, False)]
    plots = figure.subplots(len(groups), height_ratios=[*map(len, groups)])
    for axes, group in zip(plots, groups, strict=True):
        for place, (claim, _, difference, half_width, verdict) in enumerate(group):
            style = {"color": VERDICTS[verdict], "marker": "o", "markersize": 4}
            axes.errorbar(float(difference), place, xerr=float(half_width), **style)
            threshold = -MARGIN if " as good as " in claim else 0.0
            axes.vlines(threshold, place - 0.5, place + 0.5, color="0.4", linewidth=1)
        labels = [claim + (f" at {at}" if at != TRAINED else "") for claim, at, *_ in group]
        axes.set_yticks(range(len(group)), labels, fontsize=7)
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.grid(axis="x")
    for name, colour in VERDICTS.items():
        plots[0].plot([], [], "o", color=colour, label=name)
    plots[-1].set_xlabel("difference in points, 95 % interval", fontsize=9)


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
    Picture(
        "claims.png",
        "evidence",
        {"part": "fashion"},
        "The papers' claims on Fashion-MNIST",
        draw_claims,
        7.9,
    ),
    Picture(
        "rules.png",
        "evidence",
        {"part": "fashion"},
        "Rotary embeddings beyond the training resolution",
        draw_by_rule,
        6.0,
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
