"""Scores of a model at any list of resolutions, on a run's test split or a set of files.

    python -m rope_jax.evaluate runs/digits --resolutions=8,12,16
    python -m rope_jax.evaluate --model=deit_s16 --weights=deit_s.safetensors --dataset=real \\
        --images=ILSVRC2012_val --resolutions=224,384
    python -m rope_jax.evaluate runs/upernet --scales=0.5,0.75,1,1.25,1.5,1.75 --flip
    python -m rope_jax.evaluate --model=WEIGHTS --dataset=ade20k --images=ADEChallengeData2016

Each resolution is written to a row of `evaluations.json` as soon as it is evaluated; existing rows
are not evaluated again.

Segmentation is scored at the size at which labels are stored. Images of a set in memory are seen as
they are, others are resized to a short side of the resolution and seen through windows of that
size. A picture beside the rows, predictions_512x512.png, shows the first images, their labels and
the predictions.

Detection is scored at the size of the stored images. Those that differ in size keep their aspect:
--resolutions=800x1333 fits each image into these pixels, portrait or landscape; without it, images
are resized as in the evaluation of the WORKDIR's run, or fit into 800x1333.
"""

import argparse
import dataclasses
import functools
import pathlib
from typing import Annotated, Any

from rope_jax.commands.arguments import Argument, CommandParser, add_model_arguments, command_parser
from rope_jax.config import ConfigError, blame
from rope_jax.config.settings import EvalConfig
from rope_jax.data.images.crops import INTERPOLATIONS
from rope_jax.evaluate.accuracy import rules
from rope_jax.evaluate.evaluation import Evaluation
from rope_jax.evaluate.results import class_score, class_table, read_evaluations, results_table
from rope_jax.names.options import Count, CountOrZero, Range, Share
from rope_jax.names.text import image_pair
from rope_jax.runs.loading import LoadedModel, load_model
from rope_jax.system.sharding import make_mesh, share, start_devices
from rope_jax.tasks import TASKS, Task, task_of
from rope_jax.training.kernels import kernels_of_run


def main(arguments: list[str] | None = None) -> None:
    """Evaluates, prints and records."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    with parser.one_line_errors():
        start_devices()
        _evaluate(asked)


def _parser() -> CommandParser:
    parser = command_parser("rope_jax.evaluate", __doc__)
    add_model_arguments(parser)
    add, share = parser.add_argument, Argument(Share)
    sets = [name for task in TASKS.values() for name in task.sets]
    add("--dataset", choices=sets, help="default: test split of the WORKDIR's data")
    add("--images", help="folder of the dataset")
    add(
        "--resolutions",
        help="224,384,224x320; default: the training resolution, or of boxes in images that differ "
        "in size the frame of the WORKDIR's evaluation or fit(short=800,long=1333)",
    )
    add("--crop", type=share, help="share of the resized image to keep; default: the weights' or 1")
    add("--interpolation", choices=sorted(INTERPOLATIONS), help="default: the weights'")
    add(
        "--scale_windows",
        action=argparse.BooleanOptionalAction,
        help="Swin: windows of 1/32 of the image; default: as the WORKDIR's config, or not",
    )
    add("--rpb_shrink", choices=("bicubic", "crop"), help="rpb: resizing to a smaller map")
    add("--extend", help="rotary: none, extrapolate, interpolate, ntk or yarn(alpha=1,beta=32)")
    add(
        "--log_scale",
        action=argparse.BooleanOptionalAction,
        help="rotary: scale logits by ln L / ln L_trained; default of these two: as the WORKDIR's "
        "config, or as the scheme",
    )
    scale = Annotated[float, Range(above=0, high=16)]
    help_text = "segmentation: 0.5,1,1.5, of the images, averaged"
    add("--scales", type=Argument(tuple[scale, ...]), help=help_text)
    add("--flip", action="store_true", help="segmentation: average with flipped images, too")
    add("--window", help="segmentation: pixels that the model sees at once, 512, 512x768 or whole")
    stride = "segmentation: pixels from window to window; default: two thirds of the window"
    add("--stride", type=Argument(Count), help=stride)
    add("--pictures", type=Argument(CountOrZero), default=4, help="images in predictions_*.png")
    add("--pycocotools", action="store_true", help="has no effect: it always scores detections")
    in_step = "in a step; default: 128 images, of a segmentation 16 windows, of a detection 16"
    add("--batch_size", type=Argument(Count), help=in_step)
    add("--out", type=pathlib.Path, help="default: evaluations.json in the WORKDIR, or here")
    return parser


def _check(asked: argparse.Namespace, has_split: bool, task: Task) -> None:
    """Rejects incompatible arguments."""
    if asked.dataset not in (None, *task.sets):
        raise ConfigError(
            f"--dataset={asked.dataset} belongs to a different task than the model: use one of "
            f"{', '.join(task.sets)}"
        )
    if (asked.dataset is None) != (asked.images is None) or not (asked.dataset or has_split):
        raise ConfigError(
            "name --dataset and the folder of its --images; only a WORKDIR has a test split of "
            "its own"
        )
    for other in TASKS.values():
        given = [name for name in other.flags if getattr(asked, name) and other is not task]
        if given:
            raise ConfigError(
                f"--{given[0]} is for models that {other.does}, and this one does not: leave it out"
            )
    if asked.dataset is None and (asked.crop or asked.interpolation):
        raise ConfigError(
            "--crop and --interpolation are of --images: a WORKDIR's test split is prepared as in "
            "training"
        )


def _evaluate(asked: argparse.Namespace) -> None:
    about = load_model(asked)
    own = EvalConfig() if about.config is None else about.config.eval
    for name, value in rules(own).items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    _check(asked, about.config is not None, task_of(about.model))
    if asked.out is not None:
        with blame("--out"):
            read_evaluations(asked.out)  # a file of another kind is not set aside
    sizes = [about.image_size]
    if asked.resolutions:
        sizes = [image_pair(text) for text in asked.resolutions.split(",")]
    given = {name: getattr(asked, name) for name in ("crop", "interpolation")}
    given = {name: value for name, value in given.items() if value is not None}
    preprocessing = dataclasses.replace(about.preprocessing, **given)
    workdir = asked.workdir and pathlib.Path(asked.workdir)
    out = asked.out or pathlib.Path(workdir or ".", "evaluations.json")
    evaluation = functools.partial(
        Evaluation,
        asked=vars(asked),
        model=about.model,
        config=about.config,
        preprocessing=preprocessing,
        mesh=make_mesh(),
        folder=out.parent,
    )
    with kernels_of_run(about.config, workdir):
        rows = [evaluation(size=size).recorded(_identity(asked, about), out) for size in sizes]
    if share()[0] == 0:
        print(f"{about.title}, {about.weights}\n{rows[0]['dataset']}: {rows[0]['protocol']}\n")
        print(results_table(rows))
        if class_score(rows[0]) is not None:
            print(f"\n{class_table(rows)}")
        print(f"\nrows: {out}")


def _identity(asked: argparse.Namespace, about: LoadedModel) -> dict[str, Any]:
    """The settings of all tasks and sizes that identify a row."""
    config = about.config
    identity = {
        "model": about.name,
        "position": about.position,
        "weights": about.weights,
        "step": about.step,
        "options": config.model.options if config else asked.options,
        "dtype": config.dtype if config else asked.dtype or "float32",
        "dataset": asked.dataset or config.data.source,
        "windows": "scaled" if asked.scale_windows else "kept",
        "rpb_shrink": asked.rpb_shrink,
        "resizing": "whole image",  # of rows without it, pixels of some sizes differed
    }
    if about.sha256 is not None:  # other weights may replace these under the same name
        identity["sha256"] = about.sha256
    if config is not None:
        identity["seed"] = config.seed
    if asked.extend is not None or asked.log_scale:
        identity |= {"extend": asked.extend, "log_scale": asked.log_scale}
    return identity
