"""The model that a command is about: what a run wrote, or a model by name with weights from a file."""

import argparse
import dataclasses
import hashlib
import pathlib

import jax.numpy as jnp
from flax import nnx

from rope_jax.checkpoint import Checkpoints
from rope_jax.config import Config, ConfigError, blame, model_overrides
from rope_jax.models.pretrained import Preprocessing, load_pretrained
from rope_jax.models.registry import create_model, find_model, image_pair
from rope_jax.restore import load_checkpoint


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and where it comes from.

    Attributes:
        model: with its weights.
        name, position: as for `create_model`.
        image_size: (h, w) in pixels at which it was trained, or made.
        preprocessing: what it expects of images.
        config: of the run that trained it, or None.
        weights: where they come from, in words that a reader can follow.
        step: of the checkpoint, or None.
        sha256: of the file of weights, or of the manifest of the checkpoint; None where there is neither.
    """

    model: nnx.Module
    name: str
    position: str
    image_size: tuple[int, int]
    preprocessing: Preprocessing
    config: Config | None
    weights: str
    step: int | None = None
    sha256: str | None = None

    @property
    def title(self) -> str:
        """Model and scheme, for tables and pictures."""
        return f"{self.name} with {self.position}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `load` reads."""
    group = parser.add_argument_group("model", "a WORKDIR, or --model with what it needs")
    group.add_argument("workdir", nargs="?", help="of a run of rope_jax.main")
    group.add_argument("--step", type=int, help="of the checkpoint; the newest one is the default")
    group.add_argument("--model", help="one of rope_jax.list_models(), instead of a workdir")
    group.add_argument("--position", help="scheme of --model; its own is the default")
    group.add_argument("--weights", help=".safetensors or .npz file, or hub id; without it --model has fresh weights")
    group.add_argument("--source", help="whose names --weights has, see rope_jax.convert_state_dict; default: whichever fits")
    group.add_argument("--num_classes", type=int, help="outputs of --model")
    group.add_argument("--image_size", help="pixels at which --model is made: 224 or 224x320")
    group.add_argument("--options", default="", help="overrides of --model: depth=6,window_size=8")
    group.add_argument("--seed", type=int, help="of the fresh weights of --model, or which of a WORKDIR's; default: 0, or its first")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="in which --model computes; default: float32")


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) from "224" or "224x320"."""
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"size {text!r} must be pixels, 224, or height and width, 224x320")
    return image_pair(int(parts[0]) if len(parts) == 1 else tuple(map(int, parts)))


def load(asked: argparse.Namespace) -> Subject:
    """Loads the model that the arguments of `add_arguments` name.

    Raises:
        ConfigError: they name none, or two; or what they name does not exist or does not fit.
    """
    if (asked.workdir is None) == (asked.model is None):
        raise ConfigError("name either the WORKDIR of a run or a --model")
    if asked.workdir is not None:
        own = ("position", "weights", "source", "num_classes", "image_size", "options", "dtype")
        if given := [name for name in own if getattr(asked, name)]:
            raise ConfigError(f"--{given[0]} goes with --model; what a WORKDIR holds is settled by its config.json: leave it out")
        with blame("WORKDIR"):
            step = _newest(asked.workdir) if asked.step is None else asked.step
            model, config = load_checkpoint(asked.workdir, step=step, seed=asked.seed)
        size = image_pair(config.data.image_size)
        position = config.model.position or find_model(config.model.name).position
        preprocessing = Preprocessing(mean=config.data.mean, std=config.data.std, crop=1.0)
        weights = f"{asked.workdir}, seed {config.seed}, step {step}" + (", averaged weights (EMA)" if config.averaged else "")
        sha256 = _sha256(f"{asked.workdir}/checkpoints/{step}/manifest.json")
        return Subject(model, config.model.name, position, size, preprocessing, config, weights, step, sha256)
    if asked.step is not None:
        raise ConfigError("--step goes with a WORKDIR: leave it out")
    if asked.source is not None and asked.weights is None:
        raise ConfigError(f"--source={asked.source} says whose names --weights has: name the --weights, or leave it out")
    with blame("--model"):
        entry = find_model(asked.model)
        size = image_pair(entry.image_size) if asked.image_size is None else parse_size(asked.image_size)
        model = create_model(
            asked.model,
            position=asked.position,
            num_classes=asked.num_classes,
            image_size=size,
            seed=asked.seed or 0,
            dtype=jnp.dtype(asked.dtype or "float32"),
            **model_overrides(asked.options),
        )
    if asked.weights is None:
        return Subject(model, asked.model, asked.position or entry.position, size, Preprocessing(), None, f"fresh, seed {asked.seed or 0}")
    try:
        load_pretrained(model, asked.weights, source=asked.source)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{error} [--weights]") from error
    title = asked.position or entry.position
    return Subject(model, asked.model, title, size, model.preprocessing, None, asked.weights, sha256=_sha256(asked.weights))


def _sha256(path: str) -> str | None:
    """Of a file's content; None of what is no file, such as a hub id."""
    if not pathlib.Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _newest(workdir: str) -> int | None:
    """The step that `load_checkpoint` takes."""
    folder = pathlib.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        return None  # which it refuses with its own words
    with Checkpoints(folder) as checkpoints:
        return checkpoints.newest_verified()
