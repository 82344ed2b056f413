"""Models from files: a run's checkpoint, or initial weights for another run."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from rope_jax.config import Config, ConfigError, blame, differences, resolve_stored
from rope_jax.config.settings import DataConfig
from rope_jax.data.sources import MEMORY
from rope_jax.names import plugins
from rope_jax.names.notation import parse
from rope_jax.names.options import convert
from rope_jax.system.files import read_json, warn
from rope_jax.system.sharding import make_mesh, replicate, with_shardings
from rope_jax.tasks import seeds
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.setup import create
from rope_jax.weights import Preprocessing, export_state_dict
from rope_jax.weights import create as without_runs
from rope_jax.weights.files import WeightsFile
from rope_jax.weights.load import load_weights
from rope_jax.weights.metadata import Metadata
from rope_jax.weights.own import OWN
from rope_jax.weights.released import ReleasedWeights, find_weights, open_listed


def _like[F: Callable[..., Any]](function: F) -> Callable[[Callable[..., Any]], F]:
    """Wraps a function (`functools.wraps`), so that type checkers see the signature."""
    return functools.wraps(function)


@_like(without_runs.create_model)
def create_model(
    name: str | os.PathLike,
    *,
    pretrained: bool | str | os.PathLike | WeightsFile | ReleasedWeights = False,
    **settings: Any,
) -> nnx.Module:
    """Extends `rope_jax.weights.create.create_model` to workdirs of runs."""
    if pretrained in (False, name) and without_runs.names_weights(os.fspath(name)):
        weights = _open_run(name)
        if isinstance(weights, WeightsFile):
            name, pretrained = weights.description.name, weights
    elif isinstance(pretrained, str | os.PathLike):
        pretrained = _open_run(pretrained)
    return without_runs.create_model(name, pretrained=pretrained, **settings)


def load_checkpoint(
    path: str, *, step: int | None = None, ema: bool | None = None, seed: int | None = None
) -> tuple[nnx.Module, Config]:
    """Loads a model from a run's checkpoint.

    >>> import dataclasses, tempfile
    >>> from rope_jax.config import resolve
    >>> config = resolve(
    ...     {
    ...         "model": {"num_classes": 10, "options": "depth=1,width=16,heads=2"},
    ...         "data": {"image_size": 8},
    ...     }
    ... )
    >>> trained, workdir = create(config), pathlib.Path(tempfile.mkdtemp())
    >>> with Checkpoints(workdir / "checkpoints") as checkpoints:  # as a run does
    ...     state = {"params": nnx.to_pure_dict(nnx.state(trained, nnx.Param))}
    ...     checkpoints.save(1, state, about={"config": dataclasses.asdict(config)})
    >>> model, config = load_checkpoint(str(workdir))
    >>> config.model.name, model.head.kernel.shape
    ('vit_digits', (16, 10))

    Args:
        path: the run's workdir.
        step: of the checkpoint; None for the newest valid one.
        ema: True for the averaged weights, False for the current ones; None for those that the run
            evaluates (`eval.ema`). Batch statistics are the running ones either way.
        seed: of the model, in a run that trained several seeds at once; None for the first.

    Returns:
        The model, and the run's config (for several seeds, that of a run with this seed alone);
        settings that may change later, such as the path of images, are those of the last command.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: ema=True for a run without averages; an unknown seed; a damaged checkpoint; a
            plug-in of the run that cannot be imported.
        ConfigError: the checkpoint holds settings of another version.
    """
    model, config, _ = read_checkpoint(path, step=step, ema=ema, seed=seed)
    return model, config


def read_checkpoint(
    path: str, *, step: int | None = None, ema: bool | None = None, seed: int | None = None
) -> tuple[nnx.Module, Config, int]:
    """The model and config of `load_checkpoint`, and the checkpoint's step."""
    folder = pathlib.Path(path) / "checkpoints"
    if not folder.is_dir():
        problem = "is not a folder" if os.path.exists(path) else "does not exist"
        problem = "holds no checkpoints" if os.path.isdir(path) else problem
        raise FileNotFoundError(f"{path} {problem}; pass the WORKDIR of a run of rope_jax train")
    with Checkpoints(folder) as checkpoints:
        step = _valid_step(checkpoints, path, step)
        entries = checkpoints.about(step)
        stored, where = entries.get("config"), f"checkpoint {step} of {path}"
        plugins.load(plugins.stored_names(stored), required_by=f"of the run {path}")
        config = _as_resumed(resolve_stored(stored, where), pathlib.Path(path))
        if ema and config.ema_decay is None:
            raise ValueError(
                "ema=True, but this run kept no averaged weights (--config.ema_decay): use "
                "ema=None or False"
            )
        averaged = config.averaged if ema is None else ema
        seed_config = config.single(seed)
        model = create(seed_config)
        kinds = {"ema" if averaged else "params": nnx.Param, "stats": nnx.BatchStat}
        all_states = {name: nnx.state(model, kind) for name, kind in kinds.items()}
        states = {name: nnx.to_pure_dict(state) for name, state in all_states.items() if state}
        shapes = jax.eval_shape(lambda: seeds.stack([states] * config.seeds))
        loaded = checkpoints.load(step, with_shardings(shapes, replicate(make_mesh())))
        for state in seeds.take(loaded, config.seeds, seed_config.seed - config.seed).values():
            nnx.update(model, state)
    model.preprocessing = run_preprocessing(seed_config.data, seed_config.eval.frame)
    names = tuple[str, ...] | None
    model.class_names = convert(entries.get("class_names"), names, f"class_names of {where}")
    return model, seed_config, step


def _as_resumed(config: Config, workdir: pathlib.Path) -> Config:
    """The settings of the run's last command, unless config.json belongs to another training."""
    with contextlib.suppress(OSError, ValueError, ConfigError):
        newest = resolve_stored(read_json(workdir / "config.json"), workdir / "config.json")
        if not differences(config, newest):
            return newest
    return config


def _valid_step(checkpoints: Checkpoints, path: str, step: int | None) -> int:
    """The step to load, verified; by default the newest valid one."""
    if step is None:
        step = checkpoints.newest_verified()
        if step is None:
            raise FileNotFoundError(f"{path} holds no checkpoints yet")
    elif step not in checkpoints.steps():
        existing = checkpoints.steps()
        raise FileNotFoundError(f"{path} has no checkpoint of step {step}; there are {existing}")
    elif problem := checkpoints.problem(step):
        raise ValueError(f"checkpoint {step} of {path} is damaged: {problem}; leave the step out")
    return step


def start_from(model: nnx.Module, where: str, data: DataConfig) -> None:
    """Loads the weights of `--config.init_from` into a fresh model.

    Position tables are resized by their scheme's rule. A head for another number of classes keeps
    its initial weights. A warning is printed if options, schemes or the normalisation of images
    differ from those of the weights.

    Args:
        model: is changed in place.
        where: a path, a hub id or the workdir of a run, as for `pretrained` of `create_model`;
            "released" or "released:TAG" for the published weights of the model.
        data: of the run.

    Raises:
        ConfigError: there are no weights, or their names or shapes are another model's.
    """
    report = lambda message: warn(f"WARNING: {message}")
    kind, _, tag = where.partition(":")
    with blame("--config.init_from"):
        if kind == "released":
            asked = {"position": model.notation, "head": model.head_notation}
            opened = open_listed(find_weights(model.name, tag or True, **asked))
        else:
            opened = open_listed(_open_run(where))
        with opened as file:
            load_weights(model, file, new_head=True, other_model=report)
    expected = model.preprocessing
    if expected is not None and (expected.mean, expected.std) != (data.mean, data.std):
        report(
            f"the weights of {where} expect images normalised with other numbers than this run's: "
            f'--config.data.mean="{expected.mean}" --config.data.std="{expected.std}"'
        )


def run_preprocessing(data: DataConfig, frame: str) -> Preprocessing:
    """The preprocessing of a run's test images.

    >>> files = DataConfig("folder", "images")
    >>> run_preprocessing(files, "centre(crop=0.9)").crop
    0.9
    >>> run_preprocessing(files, "stretch").crop_notation
    'stretch(interpolation=bicubic)'
    >>> run_preprocessing(DataConfig("digits"), "centre").crop  # whole: these are in memory
    0.0

    Args:
        data: of the run.
        frame: `eval.frame` of the run.
    """
    (frame,) = parse(frame, "--config.eval.frame")
    options = {"crop": 1.0, "interpolation": "bicubic"}
    # Frames of images with boxes, which keep their aspect, have other options.
    options |= {name: value for name, value in frame.options if name in options}
    if frame.name == "stretch" or data.source in MEMORY:
        options["crop"] = 0.0
    return Preprocessing(data.mean, data.std, **options)


def _open_run(where: str | os.PathLike) -> str | os.PathLike | WeightsFile:
    """Opens the weights of a run's newest checkpoint; returns other paths unchanged."""
    if not os.path.isdir(where) or not os.path.isdir(os.path.join(where, "checkpoints")):
        return where
    model, _ = load_checkpoint(os.fspath(where))
    weights = export_state_dict(model, source=OWN)
    shapes = {name: (array.shape, array.dtype) for name, array in weights.items()}
    metadata = Metadata.from_json(Metadata.from_model(model, {}).to_json(), os.fspath(where))
    return WeightsFile(shapes, weights.__getitem__, OWN, metadata, os.fspath(where))
