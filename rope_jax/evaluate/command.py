"""Scores of a model at any list of resolutions, on a run's test split or a set of files.

    python -m rope_jax.evaluate runs/digits --resolutions=8,12,16
    python -m rope_jax.evaluate --model=deit_s16 --weights=deit_s.safetensors --dataset=real \
        --images=ILSVRC2012_val --resolutions=224,384
    python -m rope_jax.evaluate runs/upernet --scales=0.5,0.75,1,1.25,1.5,1.75 --flip
    python -m rope_jax.evaluate --model=WEIGHTS --dataset=ade20k --images=ADEChallengeData2016

Each resolution is written to a row of `evaluations.json` as soon as it is evaluated; existing rows
are not evaluated again.

Segmentation is scored at the size at which labels are stored. Images of a set in memory are seen as
they are, others are resized to a short side of the resolution and seen through windows of that
size. A picture beside the rows, predictions_512x512.png, shows the first images, their labels and
the predictions.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import pathlib
import sys
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data
from rope_jax.arguments import Number, command_parser
from rope_jax.config import ConfigError, blame, in_one_line
from rope_jax.data.images.crops import INTERPOLATIONS
from rope_jax.evaluate.accuracy import (
    Row,
    at_resolution,
    evaluate_files,
    evaluate_split,
    on_all_devices,
    protocol,
)
from rope_jax.evaluate.pictures import draw_pictures
from rope_jax.evaluate.results import (
    add_evaluation,
    class_table,
    results_table,
    usable_evaluations,
)
from rope_jax.evaluate.segments import Views, segment_split, side_multiple
from rope_jax.loading import LoadedModel, add_model_arguments, load_model
from rope_jax.models.pretrained import Preprocessing
from rope_jax.sharding import (
    from_first_process,
    make_mesh,
    replicated,
    share,
    start_devices,
    use_mesh,
)
from rope_jax.tasks import task_of
from rope_jax.text import image_pair
from rope_jax.training.kernels import kernels_of_run
from rope_jax.training.setup import load_split

_MASKS = ("ade20k", "masks")  # sets whose pixels have classes


def main(arguments: list[str] | None = None) -> None:
    """Evaluates, prints and records.

    >>> main(["runs/none"])
    Traceback (most recent call last):
    SystemExit: rope_jax.evaluate: runs/none holds no checkpoints; pass the --workdir of a run ...
    """
    asked = _parse(arguments)
    try:
        start_devices()
        _evaluate(asked)
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"rope_jax.evaluate: {in_one_line(error)}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("rope_jax.evaluate", __doc__)
    add_model_arguments(parser)
    add, share = parser.add_argument, Number(float, above=0, high=1)
    sets = (*data.EVALUATION_SETS, *_MASKS)
    add("--dataset", choices=sets, help="default: test split of the WORKDIR's data")
    add("--images", help="folder of the dataset")
    add("--resolutions", help="224,384,224x320; the training resolution is the default")
    add("--crop", type=share, help="share of the resized image to keep; default: the weights' or 1")
    add("--interpolation", choices=sorted(INTERPOLATIONS), help="default: the weights'")
    add(
        "--scale_windows",
        action=argparse.BooleanOptionalAction,
        help="Swin: windows of 1/32 of the image; default: as the WORKDIR's config, or not",
    )
    add("--rpb_shrink", choices=("bicubic", "crop"), help="rpb: resizing to a smaller map")
    add("--scales", type=_scales, help="segmentation: 0.5,1,1.5, of the images, averaged")
    add("--flip", action="store_true", help="segmentation: average with flipped images, too")
    add("--window", help="segmentation: pixels that the model sees at once, 512, 512x768 or whole")
    stride = "segmentation: pixels from window to window; default: two thirds of the window"
    add("--stride", type=Number(int, low=1), help=stride)
    add("--pictures", type=Number(int, low=0), default=4, help="images in predictions_*.png")
    in_step = "in a step; default: 128 images, or 16 windows of a segmentation"
    add("--batch_size", type=Number(int, low=1), help=in_step)
    add("--out", type=pathlib.Path, help="default: evaluations.json in the WORKDIR, or here")
    return parser.parse_args(arguments)


def _scales(text: str) -> tuple[float, ...]:
    return tuple(map(Number(float, above=0, high=16), text.split(",")))


def _check(asked: argparse.Namespace, has_split: bool, segments: bool) -> None:
    """Rejects incompatible arguments."""
    given = [name for name in ("scales", "flip", "window", "stride") if getattr(asked, name)]
    if given and not segments:
        raise ConfigError(
            f"--{given[0]} is for models that segment images, and this one classifies them: leave "
            "it out"
        )
    if asked.dataset is not None and segments != (asked.dataset in _MASKS):
        fitting = ", ".join(_MASKS if segments else data.EVALUATION_SETS)
        raise ConfigError(
            f"--dataset={asked.dataset} is of another task than the model: use one of {fitting}"
        )
    if (asked.dataset is None) != (asked.images is None) or not (asked.dataset or has_split):
        raise ConfigError(
            "name --dataset and the folder of its --images; only a WORKDIR has a test split of "
            "its own"
        )
    if (asked.dataset is None or segments) and (asked.crop or asked.interpolation):
        raise ConfigError(
            "--crop and --interpolation are of --images that are classified: others are prepared "
            "as in training"
        )


def _evaluate(asked: argparse.Namespace) -> None:
    about = load_model(asked)
    if asked.scale_windows is None:
        asked.scale_windows = about.config is not None and about.config.eval.scale_windows
    segments = about.model.task == "segmentation"
    _check(asked, about.config is not None, segments)
    given = {name: getattr(asked, name) for name in ("crop", "interpolation")}
    preprocessing = dataclasses.replace(
        about.preprocessing, **{name: value for name, value in given.items() if value is not None}
    )
    sizes = [about.image_size]
    if asked.resolutions:
        sizes = [image_pair(text) for text in asked.resolutions.split(",")]
    out = asked.out or pathlib.Path(asked.workdir or ".") / "evaluations.json"
    workdir = None if asked.workdir is None else pathlib.Path(asked.workdir)
    with kernels_of_run(about.config, workdir):
        rows = _evaluate_sizes(asked, about, preprocessing, sizes, out)
    if share()[0] == 0:
        print(f"{about.title}, {about.weights}\n{rows[0]['dataset']}: {rows[0]['protocol']}\n")
        print(results_table(rows))
        if segments:
            print(f"\n{class_table(rows)}")
        print(f"\nrows: {out}")


def _evaluate_sizes(
    asked: argparse.Namespace,
    about: LoadedModel,
    preprocessing: Preprocessing,
    sizes: list[tuple[int, int]],
    out: pathlib.Path,
) -> list[Row]:
    """The row of each size: from the file, or evaluated and added to it."""
    segments, found = about.model.task == "segmentation", None
    if asked.dataset is not None and not segments:
        found = data.EvaluationSet(asked.dataset, asked.images)
    mesh, rows, first = make_mesh(), [], share()[0] == 0
    for size in sizes:
        identity = _identity(asked, about, size)
        if segments:
            images = _images(asked, about, size)
            views = _views(asked, images)
            blocks = about.model.blocks and list(about.model.blocks)
            identity |= {"head": about.model.head_notation, "blocks": blocks}
            identity |= {"images": asked.images, "views": str(views)}
        if found is not None:
            how = json.loads(json.dumps(dataclasses.asdict(preprocessing)))
            identity |= {"images": asked.images} | how
        rows_before = usable_evaluations(out) if first else []
        row = next((row for row in rows_before if row["asked"] == identity), None)
        if from_first_process(row is None):
            options = {"scale_windows": asked.scale_windows, "rpb_shrink": asked.rpb_shrink}
            if segments:
                row = _segment(asked, about, images, views, preprocessing, mesh, out.parent)
            elif found is None:
                model = at_resolution(about.model, size, **options)
                row = _own_split(about, model, size, asked.batch_size or 128, mesh)
            else:
                model = at_resolution(about.model, size, **options)
                row = evaluate_files(
                    model,
                    found,
                    size,
                    preprocessing,
                    mesh,
                    batch_size=asked.batch_size or 128,
                    windows=model.window_rule(),
                    poll=functools.partial(_show_progress, len(found.labels)),
                )
                print(file=sys.stderr)
            packages = ("rope_jax", "jax", "flax", "numpy", "pillow")
            versions = {name: importlib.metadata.version(name) for name in packages}
            row |= {"asked": identity, "versions": versions}
            if first:
                add_evaluation(out, row)
        rows.append(row)
    return rows


def _identity(
    asked: argparse.Namespace, about: LoadedModel, size: tuple[int, int]
) -> dict[str, Any]:
    """The settings that identify a row; rows with equal settings are not evaluated again."""
    config = about.config
    identity = {
        "model": about.name,
        "position": about.position,
        "weights": about.weights,
        "step": about.step,
        "options": config.model.options if config else asked.options,
        "dtype": config.dtype if config else asked.dtype or "float32",
        "resolution": list(size),
        "dataset": asked.dataset or config.data.source,
        "windows": "scaled" if asked.scale_windows else "kept",
        "rpb_shrink": asked.rpb_shrink,
        "resizing": "whole image",  # of rows without it, pixels of some sizes differed
    }
    if about.sha256 is not None:  # other weights may replace these under the same name
        identity["sha256"] = about.sha256
    if config is not None:
        identity["seed"] = config.seed
    return identity


def _images(
    asked: argparse.Namespace, about: LoadedModel, size: tuple[int, int]
) -> data.Images | data.Streamed:
    """The images of --dataset, or of the run's test split, for a segmentation."""
    if asked.dataset is None:
        return load_split(about.config, "test", size)
    return data.load(asked.dataset, asked.images, "test", size)


def _views(asked: argparse.Namespace, images: data.Images | data.Streamed) -> Views:
    """The views that were asked for; by default windows of the size of evaluation, or the whole
    images of a set in memory."""
    scales = asked.scales or (1.0,)
    window = asked.window or ("whole" if images.in_memory else None)
    if window == "whole":
        if asked.stride is not None:
            raise ConfigError("--stride is from window to window: name a --window, or leave it out")
        return Views(scales, asked.flip)
    with blame("--window"):
        size = images.size if window is None else image_pair(window)
    if asked.stride is not None and asked.stride > min(size):
        raise ConfigError(
            f"--stride={asked.stride} leaves out pixels between windows of {size[0]}x{size[1]}: "
            f"use at most {min(size)}"
        )
    return Views(scales, asked.flip, size, asked.stride or max(1, 2 * min(size) // 3))


def _check_class_names(model: nnx.Module, images: data.Images | data.Streamed) -> None:
    """Rejects images of other classes than the model's, where both are known."""
    if model.class_names is None or images.class_names is None:
        return
    for label, (own, there) in enumerate(
        itertools.zip_longest(model.class_names, images.class_names)
    ):
        if own != there:
            raise ConfigError(
                f"the model has other classes than {images.name}: label {label} is {own!r} for the "
                f"model and {there!r} in the images: use images of the same classes"
            )


def _segment(
    asked: argparse.Namespace,
    about: LoadedModel,
    images: data.Images | data.Streamed,
    views: Views,
    preprocessing: Preprocessing,
    mesh: Mesh,
    folder: pathlib.Path,
) -> Row:
    """The row of a segmentation, and its picture in `folder`."""
    _check_class_names(about.model, images)
    graph, weights = nnx.split(about.model)
    options = {"scale_windows": asked.scale_windows, "rpb_shrink": asked.rpb_shrink}

    def apply(weights: Any, windows: Array) -> Array:
        with use_mesh(mesh):
            model = nnx.merge(graph, weights)
            return at_resolution(model, windows.shape[1:3], **options)(windows)

    if views.window is not None:
        with blame("--window"):
            about.model.grids(views.window)
    found = segment_split(
        apply,
        jax.device_put(weights, replicated(mesh)),
        images,
        views,
        mean=preprocessing.mean,
        std=preprocessing.std,
        batch_size=asked.batch_size or 16,
        multiple=side_multiple(about.model.grids),
        mesh=mesh,
        pictures=asked.pictures,
        bad_images="error" if about.config is None else about.config.data.bad_images,
        poll=functools.partial(_show_progress, len(images.labels)),
    )
    first = share()[0] == 0
    if first:
        print(file=sys.stderr)
    if first and found.pictures:
        path = folder / f"predictions_{'x'.join(map(str, images.size))}.png"
        draw_pictures(found.pictures, images.class_names, images.classes, path)
        print(f"picture: {path}")
    windows = about.model.window_rule(scaled=asked.scale_windows)
    how = "; ".join(filter(None, (found.row["protocol"], windows)))
    return found.row | {"protocol": how}


def _show_progress(total: int, images: int) -> None:
    if share()[0] == 0:
        print(f"\r{images:,} of {total:,} images", end="", file=sys.stderr, flush=True)


def _own_split(
    about: LoadedModel, model: nnx.Module, size: tuple[int, int], batch_size: int, mesh: Mesh
) -> Row:
    """The row of the run's own test split."""
    config = about.config
    options = dataclasses.replace(config.eval, batch_size=batch_size)
    apply, weights = on_all_devices(model, mesh)
    config = dataclasses.replace(config, eval=options)
    images = load_split(config, "test", size)
    how = protocol(images, config, model.window_rule())
    (row,) = evaluate_split(apply, weights, config, images, mesh, how, task=task_of(model))
    return row
