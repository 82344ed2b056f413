"""Scores of a model at any list of resolutions, on a run's test split or a set of files.

    python -m rope_jax.evaluate runs/digits --resolutions=8,12,16
    python -m rope_jax.evaluate --model=deit_s16 --weights=deit_s.safetensors --dataset=real \\
        --images=ILSVRC2012_val --resolutions=224,384
    python -m rope_jax.evaluate runs/upernet --scales=0.5,0.75,1,1.25,1.5,1.75 --flip
    python -m rope_jax.evaluate --model=WEIGHTS --dataset=ade20k --images=ADEChallengeData2016

Each resolution is written to a row of `evaluations.json` as soon as it is evaluated; existing rows
are not evaluated again.

Segmentation is scored at the size at which labels are stored. Images of a set in memory are
evaluated at their size. Others are resized so that the short side is the resolution, and evaluated
in windows of that size. A picture next to the rows, predictions_512x512.png, shows the first
images, their labels and the predictions.

Detection is scored at the size of the stored images. Images that differ in size keep their aspect:
--resolutions=800x1333 fits each image into these pixels, portrait or landscape; without it, images
are resized as in the evaluation of the WORKDIR's run, or fit into 800x1333.
"""

import argparse
import dataclasses
import pathlib
from typing import Annotated, Any

from rope_jax.commands.arguments import Argument, CommandParser, add_model_arguments, command_parser
from rope_jax.commands.weights import scores
from rope_jax.config import ConfigError, blame
from rope_jax.config.settings import EvalConfig
from rope_jax.data.images.crops import INTERPOLATIONS
from rope_jax.evaluate.accuracy import rules
from rope_jax.evaluate.evaluation import Evaluation
from rope_jax.evaluate.results import class_score, class_table, read_evaluations, results_table
from rope_jax.names.options import Count, CountOrZero, Range, Share
from rope_jax.names.text import image_pair
from rope_jax.runs.loading import LoadedModel, load_model
from rope_jax.system.sharding import make_mesh, start_devices
from rope_jax.tasks import TASKS, Task, find_task
from rope_jax.training.kernels import kernels_of_run


def main(arguments: list[str] | None = None) -> None:
    """Evaluates, prints and records."""
    parser = _parser()
    args = parser.parse_args(arguments)
    with parser.one_line_errors():
        start_devices()
        _evaluate(args)


def _parser() -> CommandParser:
    parser = command_parser("rope_jax.evaluate", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--dataset",
        choices=[name for task in TASKS.values() for name in task.sets],
        help="default: test split of the WORKDIR's data",
    )
    add("--images", help="folder of the dataset")
    add(
        "--resolutions",
        help="224,384,224x320; default: the training resolution, or of boxes in images that differ "
        "in size the frame of the WORKDIR's evaluation or fit(short=800,long=1333)",
    )
    add("--limit", type=Argument(Count), help="of the images of --images, evenly spaced")
    add(
        "--crop",
        type=Argument(Share),
        help="fraction of the resized image to keep; default: the weights', which may be a whole "
        "image of another aspect, or 1",
    )
    add("--interpolation", choices=sorted(INTERPOLATIONS), help="default: the weights'")
    add(
        "--scale_windows",
        action=argparse.BooleanOptionalAction,
        help="Swin: windows of 1/32 of the image; default: as in the WORKDIR's config, or off",
    )
    add("--rpb_shrink", choices=("bicubic", "crop"), help="rpb: resizing to a smaller map")
    add("--extend", help="rotary: none, extrapolate, interpolate, ntk or yarn(alpha=1,beta=32)")
    add(
        "--log_scale",
        action=argparse.BooleanOptionalAction,
        help="rotary: scale logits by ln L / ln L_trained; default of these two: as in the "
        "WORKDIR's config, or the scheme's",
    )
    add(
        "--scales",
        type=Argument(tuple[Annotated[float, Range(above=0, high=16)], ...]),
        help="segmentation: average over scales of the images: 0.5,1,1.5",
    )
    add("--flip", action="store_true", help="segmentation: average over flipped images, too")
    add("--window", help="segmentation: pixels that the model sees at once, 512, 512x768 or whole")
    add(
        "--stride",
        type=Argument(Count),
        help="segmentation: pixels from window to window; default: two thirds of the window",
    )
    add("--pictures", type=Argument(CountOrZero), default=4, help="images in predictions_*.png")
    add("--pycocotools", action="store_true", help="has no effect: it always scores detections")
    add(
        "--batch_size",
        type=Argument(Count),
        help="images in a step; default: 128, in detection 16, in segmentation 16 windows",
    )
    add("--out", type=pathlib.Path, help="default: evaluations.json in the WORKDIR, or here")
    return parser


def _check(args: argparse.Namespace, has_split: bool, task: Task) -> None:
    """Rejects incompatible arguments."""
    if args.dataset not in (None, *task.sets):
        raise ConfigError(
            f"--dataset={args.dataset} belongs to a different task than the model: use one of "
            f"{', '.join(task.sets)}"
        )
    if (args.dataset is None) != (args.images is None) or not (args.dataset or has_split):
        raise ConfigError(
            "name --dataset and the folder of its --images; only a WORKDIR has a test split of "
            "its own"
        )
    for other in TASKS.values():
        flags = [name for name in other.flags if getattr(args, name) and other is not task]
        if flags:
            raise ConfigError(
                f"--{flags[0]} is for models that {other.does}, and this one does not: leave it out"
            )
    if args.dataset is None and (args.crop or args.interpolation or args.limit):
        raise ConfigError(
            "--crop, --interpolation and --limit are of --images: a WORKDIR's test split is "
            "evaluated whole, prepared as in training"
        )


def _evaluate(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    defaults = EvalConfig() if loaded.config is None else loaded.config.eval
    for name, value in rules(defaults).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not loaded.model.num_classes:
        raise ConfigError(
            f"{loaded.weights} has no classification head to score: train one "
            "(--config.init_from), or use rope_jax analyse"
        )
    _check(args, loaded.config is not None, find_task(loaded.model))
    if args.out is not None:
        with blame("--out"):
            read_evaluations(args.out)  # a file of another kind is not set aside
    sizes = [loaded.image_size]
    if args.resolutions:
        sizes = [image_pair(text) for text in args.resolutions.split(",")]
    overrides = {
        name: value
        for name in ("crop", "interpolation")
        if (value := getattr(args, name)) is not None
    }
    preprocessing = dataclasses.replace(loaded.preprocessing, **overrides)
    workdir = args.workdir and pathlib.Path(args.workdir)
    out = args.out or pathlib.Path(workdir or ".", "evaluations.json")
    mesh = make_mesh()
    with kernels_of_run(loaded.config, workdir):
        rows = [
            Evaluation(
                arguments=vars(args),
                model=loaded.model,
                config=loaded.config,
                preprocessing=preprocessing,
                mesh=mesh,
                folder=out.parent,
                size=size,
            ).record(_identity(args, loaded), out)
            for size in sizes
        ]
    print(f"{loaded.title}, {loaded.weights}\n{rows[0]['dataset']}: {rows[0]['protocol']}\n")
    print(results_table(rows, _published(loaded, args.dataset)))
    if class_score(rows[0]) is not None:
        print(f"\n{class_table(rows)}")
    if loaded.released is not None:
        print(f"\npublished of these weights, in percent: {scores(loaded.released)}")
    print(f"\nrows: {out}")


def _published(loaded: LoadedModel, dataset: str | None) -> dict[int, float]:
    """Published main scores of the weights by resolution, the default ones where there are two."""
    task = find_task(loaded.model)
    if loaded.released is None or dataset != task.sets[0]:
        return {}
    score = {"ap": "box_ap"}.get(name := next(iter(task.titles)), name)
    return {
        result["resolution"]: result[score] / 100
        for result in reversed(loaded.released.published)
        if {score, "resolution"} <= result.keys()
    }


def _identity(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """The settings of all tasks and sizes that identify a row."""
    config = loaded.config
    identity = {
        "model": loaded.name,
        "position": loaded.position,
        "weights": loaded.weights,
        "step": loaded.step,
        "options": config.model.options if config else args.options,
        "dtype": config.dtype if config else args.dtype or "float32",
        "dataset": args.dataset or config.data.source,
        "windows": "scaled" if args.scale_windows else "kept",
        "rpb_shrink": args.rpb_shrink,
        "resizing": "whole image",  # in rows without this key, pixels of some sizes differed
    }
    if loaded.sha256 is not None:  # other weights may replace these under the same name
        identity["sha256"] = loaded.sha256
    if config is not None:
        identity["seed"] = config.seed
    else:  # schemes extend from this size, and tables were created or first resized for it
        identity["image_size"] = list(loaded.image_size)
    if args.extend is not None or args.log_scale:
        identity |= {"extend": args.extend, "log_scale": args.log_scale}
    return identity
