"""Trains several positional schemes, or options of a model, on the same images and compares them.

    python -m rope_jax.compare --path=IMAGES --positions=ape,rope_mixed,axial_rope --seeds=3
    python -m rope_jax.compare --config=digits --positions=none,ape,rope_mixed --seeds=3
    python -m rope_jax.compare --path=IMAGES --model=cat_5 "--options=imprint=none|paper|tanh"

The recipe, by default `own_images`, is trained with every scheme, with every combination of options
and with every seed; its other settings are given as --config.KEY=VALUE. The same command resumes
interrupted runs and trains only missing ones. It ends with accuracies at all resolutions, the
differences from the first combination with their intervals, and a page: report.html. Several seeds
are trained in one step where the images are held in memory and are augmented on the device,
otherwise one after the other.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib

import jax
from flax import nnx

from rope_jax import data
from rope_jax.analysis.comparison_page import print_report
from rope_jax.analysis.runs import differing_options, group_runs, read_runs
from rope_jax.commands.arguments import Argument, command_parser
from rope_jax.commands.exits import exit_at_once, exit_statuses
from rope_jax.config import (
    Config,
    ConfigError,
    blame,
    load_recipe,
    resolve,
    with_arguments,
)
from rope_jax.data.device_batches import loader_on_device
from rope_jax.models.registry import find_model
from rope_jax.names import plugins
from rope_jax.names.notation import assignments, items
from rope_jax.names.options import Count
from rope_jax.names.text import image_pair
from rope_jax.runs import run
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.sharding import start_devices
from rope_jax.training.setup import Split, complete, create, load_split

_POSITIONS = "ape,rope_mixed,axial_rope"


def command() -> None:
    """Calls `main` with `sys.argv`, and ends the process."""
    args = _parse(None)
    with exit_at_once():
        _compare(args)


def main(arguments: list[str] | None = None) -> None:
    """Trains the missing runs, prints the tables, and writes the report."""
    _compare(_parse(arguments))


def _compare(args: argparse.Namespace) -> None:
    with exit_statuses(str(args.out), distributed=False):
        keep_compiled()
        with blame("JAX_PLATFORMS"):
            start_devices()
        planned = plan(args)
        options = differing_options([config.model.options for config in planned.values()])
        for number, (workdir, config) in enumerate(planned.items(), 1):
            seeds = f"seed {config.seed}" if config.seeds == 1 else f"{config.seeds} seeds"
            label = ", ".join([config.model.position, *options[number - 1], seeds])
            print(f"\n[{number}/{len(planned)}] {label}: {workdir}")
            run.train(config, workdir)
        print()
        groups = group_runs([result for workdir in planned for result in read_runs(workdir)])
        print_report(groups, args.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("rope_jax.compare", __doc__)
    add = parser.add_argument
    add("--path", help="of the images: a folder with train/CLASS and val/CLASS, or an .npz file")
    add("--config", help="recipe by name or file, with its arguments; default: own_images")
    add("--model", help="one of rope_jax.list_models(); default: the recipe's")
    add(
        "--positions",
        help="schemes, comma-separated; the others are compared with the first; default: "
        f"{_POSITIONS}; with --options, the scheme of the recipe or, if it names none, of the "
        "model",
    )
    add(
        "--options",
        default="",
        help="options of the model and their alternatives, as in depth=4|8,heads=2|4, of which "
        "every combination is trained with each scheme",
    )
    add("--seeds", type=Argument(Count), default=3, help="runs of each combination")
    add(
        "--resolutions",
        help="evaluated after the training resolution: 160,224x320; default: the recipe's",
    )
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/compare"), help="folder of the runs")
    args, args.settings = parser.parse_with_settings(arguments)
    return args


def plan(args: argparse.Namespace) -> dict[pathlib.Path, Config]:
    """The folders of the runs of a comparison, in the order of training, and their settings.

    Raises:
        ConfigError: settings, schemes and images that cannot be combined.
    """
    if args.config is None and args.path is None:
        raise ConfigError("--path is missing: the folder of the images, or name a --config")
    if "seeds" in args.settings:
        raise ConfigError("--config.seeds is not a setting of a comparison: use --seeds")
    rows = {name: _config(args, *name) for name in _combinations(args)}
    configs = {  # by the end of the folder's name
        "-".join(filter(None, [config.model.position, options])): config
        for (_, options), config in rows.items()
    }
    if len(configs) < max(2, len(rows)):
        given = f"--options={args.options}" if args.positions is None else ""
        raise ConfigError(
            f"{given or f'--positions={args.positions}'} has nothing to compare: name two or more "
            "schemes, or alternatives of --options as in depth=4|8, and leave out "
            "--config.model.position, which replaces schemes"
        )
    first = next(iter(configs.values()))
    images = load_split(first, "train")
    for config in configs.values():
        nnx.eval_shape(lambda config=config: create(complete(config, images)))
    on_device = args.settings.get("data.on_device")
    if args.seeds > 1 and on_device is None:
        on_device = not first.data.more_sizes and _fit_on_device(images, first.data.augment)
    if args.seeds > 1 and on_device:  # all seeds of a row are trained in one step
        return {
            args.out / f"{name}-seeds{args.seeds}": dataclasses.replace(
                config,
                data=dataclasses.replace(config.data, on_device=True),
                seeds=args.seeds,
            )
            for name, config in configs.items()
        }
    return {  # the folder of seed 0 has the name of the row
        args.out / (name + (f"-{seed}" if seed else "")): dataclasses.replace(
            config, seed=seed, seeds=1
        )
        for seed in range(first.seed, first.seed + args.seeds)
        for name, config in configs.items()
    }


def _combinations(args: argparse.Namespace) -> list[tuple[str | None, str]]:
    """Position (None for that of the recipe) and options of every row, without repetitions."""
    positions: list[str | None] = [None]
    if args.positions is not None or not args.options:
        positions = [*items(args.positions or _POSITIONS)]
    with blame("--options"):
        alternatives = assignments(args.options, "option")
    pieces = [
        [f"{name}={value.strip()}" for value in values.split("|")]
        for name, values in alternatives.items()
    ]
    options = [",".join(row) for row in itertools.product(*pieces)]
    return list(dict.fromkeys(itertools.product(positions, options)))


def _config(args: argparse.Namespace, position: str | None, options: str) -> Config:
    """The settings of the first run of a row.

    `--path` and `--model` become settings, because a comma would end an argument of the recipe.
    """
    arguments = {} if position is None else {"position": position}
    with blame("--config"):
        recipe = with_arguments(args.config or "own_images", **arguments)
    changes = {"data.path": args.path, "model.name": args.model}
    if args.path is not None and args.path.endswith(".npz"):
        changes["data.source"] = "npz"
    if args.resolutions is not None:
        with blame("--resolutions"):
            changes["eval.resolutions"] = tuple(map(image_pair, args.resolutions.split(",")))
    overrides = {name: value for name, value in changes.items() if value is not None}
    config = resolve(load_recipe(recipe, overrides | args.settings))
    with blame("--config.plugins"):
        plugins.load(config.plugins, required_by="of the recipe")
    with blame("--config.model.name"):
        position = config.model.position or find_model(config.model.name).position
    model = dataclasses.replace(config.model, position=position)
    if options:
        with blame("--options"):
            merged = assignments(f"{model.options},{options}", "option")
        text = ",".join(f"{name}={value}" for name, value in merged.items())
        model = dataclasses.replace(model, options=text)
    return dataclasses.replace(config, model=model)


def _fit_on_device(images: Split, augment: str) -> bool:
    """Checks if images can be augmented on the device and take at most half of its memory."""
    try:
        loader_on_device(data.split_augment(augment).loader, images)
    except ValueError:
        return False
    devices = jax.local_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:  # a CPU, whose devices share the memory
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)
    return images.images.nbytes <= limit / 2
