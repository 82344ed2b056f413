"""Which positional scheme is best on these images? Trains each and compares them.

    python -m rope_jax.compare --path=IMAGES --positions=ape,rope_mixed,axial_rope --seeds=3
    python -m rope_jax.compare --config=digits --positions=none,ape,rope_mixed --seeds=3

The recipe, by default `own_images`, is trained with every scheme and seed; its other settings are
given as --config.KEY=VALUE. The same command resumes what was interrupted and trains only what is
missing. It ends with accuracies at all resolutions, the differences from the first scheme with
their intervals, and a page: report.html. Several seeds are trained in one step where the images are
held in memory and are augmented on the device, otherwise one after the other.
"""

import argparse
import dataclasses
import pathlib

from rope_jax import data, run
from rope_jax.analysis.report import print_report
from rope_jax.analysis.runs import group_runs, read_runs
from rope_jax.arguments import Number, command_parser
from rope_jax.command import exit_statuses
from rope_jax.compilation import keep_compiled
from rope_jax.config import Config, ConfigError, blame, load_recipe, resolve, with_arguments
from rope_jax.data.device_batches import DeviceBatches
from rope_jax.models.registry import find_model
from rope_jax.text import image_pair, items, literal
from rope_jax.training.setup import load_split


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run of the comparison: its folder and its settings."""

    workdir: pathlib.Path
    config: Config


def main(arguments: list[str] | None = None) -> None:
    """Trains what is missing, prints the tables, and writes the report."""
    asked = _parse(arguments)
    with exit_statuses(str(asked.out), distributed=False):
        keep_compiled()
        planned = plan(asked)
        for number, one in enumerate(planned, 1):
            config = one.config
            seeds = f"seed {config.seed}" if config.seeds == 1 else f"{config.seeds} seeds"
            print(f"\n[{number}/{len(planned)}] {config.model.position}, {seeds}: {one.workdir}")
            run.train(config, one.workdir)
        print()
        groups = group_runs([found for one in planned for found in read_runs(one.workdir)])
        print_report(groups, asked.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("rope_jax.compare", __doc__)
    add = parser.add_argument
    add("--path", help="of the images: a folder with train/CLASS and val/CLASS, or an .npz file")
    add("--config", help="recipe by name or file, with its arguments; default: own_images")
    add("--model", help="one of rope_jax.list_models(); default: the recipe's")
    schemes = "schemes, comma-separated; the others are compared with the first"
    add("--positions", default="ape,rope_mixed,axial_rope", help=schemes)
    add("--seeds", type=Number(int, low=1), default=3, help="runs of each scheme")
    add(
        "--resolutions", help="evaluated after that of training: 160,224x320; default: the recipe's"
    )
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/compare"), help="folder of the runs")
    asked, rest = parser.parse_known_args(arguments)
    asked.settings = {}
    for word in rest:
        name, equals, value = word.removeprefix("--config.").partition("=")
        if not word.startswith("--config.") or not equals:
            parser.error(f"unexpected argument {word!r}; settings are written --config.key=value")
        asked.settings[name] = literal(value)
    return asked


def plan(asked: argparse.Namespace) -> list[Planned]:
    """The runs of a comparison, in the order of training.

    Raises:
        ConfigError: a setting, a scheme or the images do not go together.
    """
    if asked.config is None and asked.path is None:
        raise ConfigError("--path is missing: the folder of the images, or name a --config")
    configs = [_config(asked, position) for position in dict.fromkeys(items(asked.positions))]
    if len(configs) < 2:
        raise ConfigError(f"--positions={asked.positions} has nothing to compare: name two or more")
    if asked.seeds > 1 and _fits_the_device(configs[0]):
        return [_together(asked, config) for config in configs]
    seeds = range(configs[0].seed, configs[0].seed + asked.seeds)
    return [_alone(asked, config, seed) for seed in seeds for config in configs]


def _together(asked: argparse.Namespace, config: Config) -> Planned:
    """All seeds of a scheme, trained in one step."""
    images = dataclasses.replace(config.data, on_device=True)
    config = dataclasses.replace(config, data=images, seeds=asked.seeds)
    return Planned(asked.out / f"{config.model.position}-seeds{asked.seeds}", config)


def _alone(asked: argparse.Namespace, config: Config, seed: int) -> Planned:
    """One seed of a scheme; the folder of seed 0 has the name of the scheme."""
    name = config.model.position + (f"-{seed}" if seed else "")
    return Planned(asked.out / name, dataclasses.replace(config, seed=seed))


def _config(asked: argparse.Namespace, position: str) -> Config:
    """The settings of the first run of a scheme."""
    recipe, given = asked.config or "own_images", {"position": position}
    if asked.config is None:
        source = "folder" if pathlib.Path(asked.path).is_dir() else "npz"
        given |= {"path": asked.path, "source": source}
        given |= {} if asked.model is None else {"model": asked.model}
    with blame("--config"):
        raw = load_recipe(with_arguments(recipe, **given)).to_dict()
    changes = dict(asked.settings)
    if asked.config is not None and asked.path is not None:
        changes["data.path"] = asked.path
    if asked.config is not None and asked.model is not None:
        changes["model.name"] = asked.model
    if asked.resolutions is not None:
        with blame("--resolutions"):
            changes["eval.resolutions"] = tuple(map(image_pair, asked.resolutions.split(",")))
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        if section and not isinstance(raw.get(section), dict):
            raise ConfigError(f"--config.{name} is not a setting: see --config.help of training")
        (raw[section] if section else raw)[key] = value
    config = resolve(raw)
    with blame("--model"):
        find_model(config.model.name)
    return config


def _fits_the_device(config: Config) -> bool:
    """Whether the training images can be kept on the device, with the recipe's augmentation."""
    images = load_split(config, "train")
    loader = data.split_augment(config.data.augment).loader
    try:
        DeviceBatches(images, batch_size=1, seed=0, augment=loader)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
