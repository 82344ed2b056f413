"""Loads the model named on a command line: a run's checkpoint, or a model by name with weights."""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from rope_jax.config import Config, ConfigError, blame, model_overrides
from rope_jax.names.text import image_pair
from rope_jax.positions.extension import extend_rotations
from rope_jax.runs.restore import read_checkpoint, start_from
from rope_jax.system.files import file_sha256
from rope_jax.training.setup import create
from rope_jax.weights import Preprocessing, load_pretrained
from rope_jax.weights.create import create_model, names_weights
from rope_jax.weights.released import ReleasedWeights, find_listed, find_weights, open_listed

# Arguments that belong to a WORKDIR, and to --model.
_OF_RUNS = ("step",)
_OF_MODELS = (
    "position", "weights", "pretrained", "weights_dir", "source", "head", "num_classes",
    "image_size", "options", "dtype",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model and its origin.

    Attributes:
        model: with its weights.
        create: creates the model with the weights from which its training started.
        name, position: as for `create_model`.
        image_size: (height, width) in pixels, at training or creation.
        preprocessing: resizing, crop and normalisation that the weights expect.
        config: of the run that trained the model, or None.
        weights: description of the weights' origin, for reports.
        step: of the checkpoint, or None.
        sha256: of the weights file or the checkpoint's manifest, or None without either.
        released: the published weights that it has, or None.
    """

    model: nnx.Module
    create: Callable[[], nnx.Module]
    name: str
    position: str
    image_size: tuple[int, int]
    preprocessing: Preprocessing
    config: Config | None
    weights: str
    step: int | None = None
    sha256: str | None = None
    released: ReleasedWeights | None = None

    def at(self, size: tuple[int, int]) -> nnx.Module:
        """A copy for images of (height, width) pixels, by the rules of its run's evaluation."""
        model = nnx.clone(self.model)
        if self.config is not None:
            if self.config.eval.scale_windows:
                model.scale_windows()
            extend_rotations(model, self.config.eval.extend, self.config.eval.log_scale)
        model.resize(size)
        return model

    @property
    def title(self) -> str:
        """Model and scheme, for tables and pictures."""
        return f"{self.name} with {self.position}"


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    """Loads the model that arguments of `commands.arguments.add_model_arguments` name.

    Raises:
        ConfigError: the arguments name no model or two models, contradict each other, or name a
            model, checkpoint or file that does not exist or does not fit.
    """
    if (arguments.workdir is None) == (arguments.model is None):
        raise ConfigError("name either the WORKDIR of a run or a --model")
    named = arguments.workdir is None
    required, others = ("a WORKDIR", _OF_RUNS) if named else ("--model", _OF_MODELS)
    if conflicting := [name for name in others if getattr(arguments, name) not in (None, "")]:
        raise ConfigError(f"--{conflicting[0]} needs {required}: leave it out")
    if named:
        return _load_named(arguments)
    return load_run(arguments.workdir, step=arguments.step, seed=arguments.seed)


def load_run(workdir: str, *, step: int | None = None, seed: int | None = None) -> LoadedModel:
    """Loads the model of a run: of the newest checkpoint or a step, of the first seed or another.

    Raises:
        ConfigError: the folder holds no such checkpoint.
    """
    with blame("WORKDIR"):
        model, config, step = read_checkpoint(workdir, step=step, seed=seed)
    averaged = ", averaged weights (EMA)" if config.averaged else ""
    return LoadedModel(
        model,
        functools.partial(_create_untrained, config),
        model.name,
        model.notation,
        model.image_size,
        model.preprocessing,
        config,
        weights=f"{pathlib.Path(workdir)}, seed {config.seed}, step {step}{averaged}",
        step=step,
        sha256=file_sha256(f"{workdir}/checkpoints/{step}/manifest.json"),
    )


def _create_untrained(config: Config) -> nnx.Module:
    model = create(config)
    if config.init_from is not None:
        start_from(model, config.init_from, config.data)
    return model


def load_published(weights: ReleasedWeights, weights_dir: str | None = None) -> LoadedModel:
    """Loads published weights; see `rope_jax.create_model` for where they come from."""
    names = ("workdir", *_OF_RUNS, *_OF_MODELS, "seed")
    return _load_named(
        argparse.Namespace(
            **dict.fromkeys(names)
            | {"model": weights.model, "position": weights.position, "pretrained": weights.tag}
            | {"weights_dir": weights_dir, "options": ""}
        )
    )


def _load_named(arguments: argparse.Namespace) -> LoadedModel:
    if arguments.source is not None and arguments.weights is None:
        raise ConfigError(
            f"--source={arguments.source} needs --weights: name them, or leave --source out"
        )
    if arguments.weights_dir is not None and arguments.pretrained is None:
        raise ConfigError("--weights_dir needs --pretrained: add it, or leave --weights_dir out")
    if None not in (arguments.weights, arguments.pretrained):
        raise ConfigError("--weights and --pretrained name two weights: leave one out")
    for path in (arguments.model, arguments.weights):
        if path is not None and pathlib.Path(path, "checkpoints").is_dir():
            raise ConfigError(f"{path} is the workdir of a run: name it alone, without --model")
    seed, size = arguments.seed or 0, arguments.image_size
    dtype, options = jnp.dtype(arguments.dtype or "float32"), model_overrides(arguments.options)
    with blame("--model"):
        create_named = functools.partial(
            create_model,
            arguments.model,
            position=arguments.position,
            num_classes=arguments.num_classes,
            image_size=size and image_pair(size),
            seed=seed,
            dtype=dtype,
            head=arguments.head,
            **options,
        )
    released, weights, saved = None, arguments.weights, names_weights(arguments.model)
    if saved and weights is not None:
        raise ConfigError(f"--model={arguments.model} has weights: leave --weights out")
    if arguments.pretrained is not None:
        settings = {"position": arguments.position, "head": arguments.head}
        with blame("--pretrained"):
            released = find_weights(arguments.model, arguments.pretrained, **settings)
        with blame("--model"):
            model = create_named(pretrained=released, weights_dir=arguments.weights_dir)
        path, weights = released.locate(arguments.weights_dir), released.tag
    elif weights is not None and find_listed(weights) is not None:
        released = find_listed(weights)
        with blame("--weights"), open_listed(weights) as file:  # with its size, options and classes
            source = arguments.source or file.source
            model = create_named(pretrained=dataclasses.replace(file, source=source))
            path = file.path
    else:
        with blame("--model"):
            model = create_named()
        if weights is not None:
            with blame("--weights"):
                load_pretrained(model, weights, source=arguments.source)
        path = weights = weights or (arguments.model if saved else f"fresh, seed {seed}")
    fresh = functools.partial(
        create_model,
        model.name,
        position=model.notation,
        num_classes=model.num_classes,
        image_size=model.image_size,
        seed=seed,
        dtype=dtype,
        head=model.head_notation,
        blocks=None if model.head_notation is None else model.blocks,
        **dataclasses.asdict(model.options),
    )
    return LoadedModel(
        model,
        fresh,
        model.name,
        model.notation,
        model.image_size,
        model.preprocessing or Preprocessing(),
        None,
        weights,
        sha256=_sha256(path),
        released=released,
    )


def _sha256(where: str) -> str | None:
    """The hash of weights in a file or folder; None for those of a hub."""
    path = pathlib.Path(where)
    path = path / "model.safetensors" if path.is_dir() else path
    return file_sha256(path) if path.is_file() else None
