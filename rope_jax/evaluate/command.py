"""Accuracy of a model at any list of resolutions, on a run's test split or a set of files.

    python -m rope_jax.evaluate runs/digits --resolutions=8,12,16
    python -m rope_jax.evaluate --model=deit_s16 --weights=deit_s.safetensors --dataset=real \
        --images=ILSVRC2012_val --resolutions=224,384

Each resolution is written to a row of `evaluations.json` as soon as it is evaluated; existing rows
are not evaluated again.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from rope_jax import data
from rope_jax.arguments import Number, command_parser
from rope_jax.config import ConfigError, in_one_line
from rope_jax.data.images.crops import INTERPOLATIONS
from rope_jax.evaluate.accuracy import (
    Row,
    at_resolution,
    evaluate_files,
    evaluate_split,
    on_all_devices,
    protocol,
)
from rope_jax.evaluate.results import add_evaluation, results_table, usable_evaluations
from rope_jax.loading import LoadedModel, add_model_arguments, load_model
from rope_jax.models.pretrained import Preprocessing
from rope_jax.sharding import from_first_process, make_mesh, require_devices, share
from rope_jax.tasks import task_of
from rope_jax.text import image_pair
from rope_jax.training.kernels import kernels_of_run
from rope_jax.training.setup import load_split


def main(arguments: list[str] | None = None) -> None:
    """Evaluates, prints and records.

    >>> main(["runs/none"])
    Traceback (most recent call last):
    SystemExit: rope_jax.evaluate: runs/none holds no checkpoints; pass the --workdir of a run ...
    """
    asked = _parse(arguments)
    try:
        require_devices()
        _evaluate(asked)
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"rope_jax.evaluate: {in_one_line(error)}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("rope_jax.evaluate", __doc__)
    add_model_arguments(parser)
    add, share = parser.add_argument, Number(float, above=0, high=1)
    add("--dataset", choices=data.EVALUATION_SETS, help="default: test split of the WORKDIR's data")
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
    add("--batch_size", type=Number(int, low=1), default=128, help="images in a step")
    add("--out", type=pathlib.Path, help="default: evaluations.json in the WORKDIR, or here")
    return parser.parse_args(arguments)


def _check(asked: argparse.Namespace, has_split: bool) -> None:
    """Rejects incompatible arguments."""
    if (asked.dataset is None) != (asked.images is None) or not (asked.dataset or has_split):
        raise ConfigError(
            "name --dataset and the folder of its --images; only a WORKDIR has a test split of "
            "its own"
        )
    if asked.dataset is None and (asked.crop or asked.interpolation):
        raise ConfigError(
            "--crop and --interpolation are of --images: the test split of a WORKDIR is prepared "
            "as in training"
        )


def _evaluate(asked: argparse.Namespace) -> None:
    about = load_model(asked)
    if asked.scale_windows is None:
        asked.scale_windows = about.config is not None and about.config.eval.scale_windows
    _check(asked, about.config is not None)
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
        print(f"{results_table(rows)}\n\nrows: {out}")


def _evaluate_sizes(
    asked: argparse.Namespace,
    about: LoadedModel,
    preprocessing: Preprocessing,
    sizes: list[tuple[int, int]],
    out: pathlib.Path,
) -> list[Row]:
    """The row of each size: from the file, or evaluated and added to it."""
    found = None if asked.dataset is None else data.EvaluationSet(asked.dataset, asked.images)
    mesh, rows, first = make_mesh(), [], share()[0] == 0
    for size in sizes:
        identity = _identity(asked, about, size)
        if found is not None:
            how = json.loads(json.dumps(dataclasses.asdict(preprocessing)))
            identity |= {"images": asked.images} | how
        rows_before = usable_evaluations(out) if first else []
        row = next((row for row in rows_before if row["asked"] == identity), None)
        if from_first_process(row is None):
            model = at_resolution(
                about.model, size, scale_windows=asked.scale_windows, rpb_shrink=asked.rpb_shrink
            )
            if found is None:
                row = _own_split(about, model, size, asked.batch_size, mesh)
            else:
                row = evaluate_files(
                    model,
                    found,
                    size,
                    preprocessing,
                    mesh,
                    batch_size=asked.batch_size,
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
