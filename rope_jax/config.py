"""What a run is: frozen dataclasses, made from the ConfigDict of a recipe, with every mistake refused before anything starts.

The dataclasses are the one list of fields and defaults. Recipes in `configs/` start from `default()`, a ConfigDict of them, so that
`--config.section.key=value` works for every field and a misspelt key is an error in recipes and on the command line alike.
"""

import ast
import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import ml_collections

from rope_jax.hints import closest


class ConfigError(Exception):
    """A mistake of configuration or surroundings, told in one sentence that names what to change."""


Size = int | tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model.

    Attributes:
        name: one of `rope_jax.list_models()`.
        position: a scheme as written in `rope_jax.positions`; None for the model's own.
        num_classes: outputs of the head; None for as many as the data has.
        options: overrides of the model's options, as "depth=6,drop_path=0.1".
    """

    name: str = "vit_digits"
    position: str | None = None
    num_classes: int | None = None
    options: str = ""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which images, and how they reach the model.

    Attributes:
        source: "digits", "npz", "idx" or "folder", see `rope_jax.data`.
        path: file or folder of the source; digits needs none.
        image_size: training resolution in pixels, int or (height, width); None for the images' own.
        mean, std: normalisation per channel, of values in [0, 1].
        augment: augmentations with their options, see `rope_jax.data.augment`; "none" for none.
    """

    source: str = "digits"
    path: str | None = None
    image_size: Size | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    augment: str = "none"


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warmup and cosine decay.

    Attributes:
        learning_rate: peak.
        min_learning_rate: at the end.
        warmup_epochs: linear from 0; the cosine starts where it ends.
        weight_decay: on matrices; never on biases, norms, and what a positional scheme exempts.
        b1, b2, eps: of AdamW.
        clip_norm: global gradient norm above which gradients are scaled down; None for no clipping.
    """

    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    warmup_epochs: float = 5.0
    weight_decay: float = 0.05
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation.

    Attributes:
        resolutions: pixels, each an int or (height, width); the training resolution is always evaluated first.
        batch_size: images per step on all devices together.
    """

    resolutions: tuple[Size, ...] = ()
    batch_size: int = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        seed: of initial weights, order of the data, augmentation, and drop path.
        epochs: passes over the training images.
        batch_size: images per step on all devices together.
        dtype: in which activations are computed, "float32" or "bfloat16"; parameters are float32.
        label_smoothing: in [0, 1).
        ema_decay: of the moving average of the weights, per step; None for none. Evaluation uses the average where there is one.
        init_from: a workdir of another run, or a weights file (.npz), whose weights are the start; position tables of another
            resolution are resized by their scheme's rule, a head for other classes stays fresh.
        log_every, checkpoint_every: steps; a checkpoint is also written at the end and when the run is interrupted.
        keep_checkpoints: how many of the newest stay.
        tensorboard: also write TensorBoard files into the workdir (needs the extra `log`).
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    seed: int = 0
    epochs: float = 1.0
    batch_size: int = 128
    dtype: str = "float32"
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    init_from: str | None = None
    log_every: int = 50
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    tensorboard: bool = False


# Fields that may change when a run is resumed: they do not change what is computed.
COSMETIC = (
    "data.path",
    "eval.resolutions",
    "eval.batch_size",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "tensorboard",
)

_RANGES = {
    "batch_size": (1, None), "epochs": (0, None), "label_smoothing": (0, 1), "ema_decay": (0, 1), "log_every": (1, None),
    "checkpoint_every": (1, None), "keep_checkpoints": (1, None), "eval.batch_size": (1, None), "optim.learning_rate": (0, None),
    "optim.min_learning_rate": (0, None), "optim.warmup_epochs": (0, None), "optim.weight_decay": (0, None), "optim.eps": (0, None),
    "optim.b1": (0, 1), "optim.b2": (0, 1), "optim.clip_norm": (0, None), "model.num_classes": (1, None), "seed": (0, None),
}  # fmt: skip


def default() -> ml_collections.ConfigDict:
    """All fields with their defaults, as a ConfigDict whose keys are locked: what a recipe starts from."""
    return _to_dict(Config).lock()


def _to_dict(cls: type) -> ml_collections.ConfigDict:
    fields = {}
    for field in dataclasses.fields(cls):
        kind, _ = _kind(field.type)
        if dataclasses.is_dataclass(kind):
            fields[field.name] = _to_dict(kind)
        elif isinstance(field.default, bool | int | float | str) and field.type in (bool, int, float, str):
            fields[field.name] = field.default
        else:  # None and tuples: any type may replace them here; `resolve` checks.
            placeholder = ml_collections.config_dict.placeholder(kind if kind in (int, float, str) else object)
            fields[field.name] = placeholder if field.default is None else field.default
    return ml_collections.ConfigDict(fields)


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed."""
    if isinstance(annotation, types.UnionType) and type(None) in typing.get_args(annotation):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        return (rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]), True  # noqa: UP007
    return annotation, False


def recipe_arguments(text: str | None, **defaults: Any) -> ml_collections.ConfigDict:
    """Reads what stands behind the colon of `--config=configs/NAME.py:key=value,...`.

    Args:
        text: comma-separated key=value; commas inside parentheses belong to the value.
        **defaults: the recipe's arguments with their defaults; a value takes its default's type (text where that is None).

    Raises:
        ConfigError: an argument that the recipe does not have, or a value of the wrong kind.
    """
    arguments = ml_collections.ConfigDict(defaults)
    for key, value in split_assignments(text or "", "recipe argument"):
        if key not in defaults:
            raise ConfigError(f"the recipe has no argument {key!r}; {closest(key, defaults)}")
        kind = str if defaults[key] is None else type(defaults[key])
        with arguments.ignore_type():
            arguments[key] = value if kind is str else _literal(f"recipe argument {key}", value, kind)
    return arguments


def split_assignments(text: str, what: str) -> list[tuple[str, str]]:
    """Splits "a=1,b=f(x=2,y=3)" into pairs; commas and equal signs inside parentheses belong to the value."""
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    pairs = [piece.strip().partition("=") for piece in pieces if piece.strip()]
    for key, equals, value in pairs:
        if not equals or not key.isidentifier() or not value:
            raise ConfigError(f"{what} {key + equals + value!r} is not of the form key=value")
    return [(key, value) for key, _, value in pairs]


def _literal(what: str, text: str, kind: type) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{what}={text} must be of type {kind.__name__}")
    return value


def model_overrides(options: str) -> dict[str, Any]:
    """The overrides of `create_model` written in `ModelConfig.options`."""
    overrides = {}
    for key, value in split_assignments(options, "--config.model.options:"):
        try:
            overrides[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[key] = value
    return overrides


def resolve(raw: ml_collections.ConfigDict | dict) -> Config:
    """Makes the frozen Config of a ConfigDict or of what `to_json` wrote.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range; the message names the flag to change.
    """
    return _resolve(Config, raw.to_dict() if isinstance(raw, ml_collections.ConfigDict) else raw, "")


def _resolve(cls: type, raw: dict, prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise ConfigError(f"--config.{prefix}{key} is not a setting; {closest(key, fields)}")
    values = {}
    for key, value in raw.items():
        kind, optional = _kind(fields[key].type)
        name = prefix + key
        if dataclasses.is_dataclass(kind):
            values[key] = _resolve(kind, value, name + ".")
        elif value is None and optional:
            values[key] = None
        else:
            values[key] = _checked(name, value, kind)
    if cls is OptimConfig and values.get("min_learning_rate", cls.min_learning_rate) > values.get("learning_rate", cls.learning_rate):
        raise ConfigError(
            f"--config.optim.min_learning_rate={values.get('min_learning_rate', cls.min_learning_rate)} is above "
            f"--config.optim.learning_rate={values.get('learning_rate', cls.learning_rate)}: lower the first or raise the second"
        )
    return cls(**values)


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    fine = type(value) is kind
    if kind == Size:
        value, fine = _size(value)
    elif typing.get_origin(kind) is tuple and isinstance(value, tuple | list):
        element, *rest = typing.get_args(kind)
        if element == Size:
            pairs = [_size(v) for v in value]
            value, fine = tuple(v for v, _ in pairs), all(ok for _, ok in pairs)
        else:
            value = tuple(float(v) if type(v) is int else v for v in value)
            fine = len(value) == 1 + len(rest) and all(type(v) is element for v in value)
    if fine and any(isinstance(v, float) and not math.isfinite(v) for v in (value if isinstance(value, tuple) else (value,))):
        raise ConfigError(f"--config.{name}={value!r} is out of range; it must be finite")
    if not fine:
        raise ConfigError(f"--config.{name}={value!r} is not of the right kind; it must be {_describe(kind)}")
    low, high = _RANGES.get(name, (None, None))
    if (low is not None and value < low) or (high is not None and value >= high):
        raise ConfigError(f"--config.{name}={value!r} is out of range; it must be at least {low}" + (f" and below {high}" if high else ""))
    if name == "data.std" and min(value) <= 0:
        raise ConfigError(f"--config.data.std={value} is out of range; each number must be greater than 0")
    if name == "epochs" and value == 0:
        raise ConfigError("--config.epochs=0 trains nothing; use a number above 0, or --mode=evaluate")
    if name == "dtype" and value not in ("float32", "bfloat16"):
        raise ConfigError(f"--config.dtype={value} is not one of float32, bfloat16")
    return value


def _size(value: Any) -> tuple[Any, bool]:
    if isinstance(value, tuple | list):
        value = tuple(value)
        return value, len(value) == 2 and all(type(v) is int and v > 0 for v in value)
    return value, type(value) is int and value > 0


def _describe(kind: Any) -> str:
    if kind == Size:
        return "a number of pixels or a pair (height, width)"
    if typing.get_origin(kind) is tuple:
        return "a tuple of sizes in pixels" if typing.get_args(kind)[0] == Size else f"{len(typing.get_args(kind))} numbers"
    return {int: "a whole number", float: "a number", str: "text", bool: "True or False"}[kind]


def to_json(config: Config) -> str:
    """The resolved config as it stands in `config.json` and beside the weights."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> Config:
    """The inverse of `to_json`."""
    return resolve(json.loads(text))


def differences(stored: Config, wanted: Config) -> list[str]:
    """One line per field in which two runs differ, cosmetic ones aside: "model.position: 'ape' -> 'rope2d'"."""
    before, after = (_flatten(dataclasses.asdict(c)) for c in (stored, wanted))
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name] and name not in COSMETIC]


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@contextlib.contextmanager
def blame(flag: str) -> Iterator[None]:
    """Turns ValueError and OSError inside into a ConfigError that names the flag to change."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"{error} [{flag}]") from error
