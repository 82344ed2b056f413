"""What a run is: the settings made from the ConfigDict of a recipe, with every mistake refused before anything starts.

Recipes in `configs/` start from `default()`, a ConfigDict of all fields of `rope_jax.settings`, so that `--config.section.key=value` works
for every field and a misspelt key is an error in recipes and on the command line alike.
"""

import ast
import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections

from rope_jax.hints import closest
from rope_jax.settings import (
    COSMETIC,
    IMAGENET_MEAN,
    IMAGENET_STD,
    RANGES,
    SEMANTIC,
    WORDS,
    Config,
    OptimConfig,
    Size,
)

__all__ = [
    "COSMETIC",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "SEMANTIC",
    "Config",
    "ConfigError",
    "OptimConfig",
    "Size",
    "blame",
    "default",
    "differences",
    "from_json",
    "model_overrides",
    "recipe_arguments",
    "resolve",
    "split_assignments",
    "to_json",
]


class ConfigError(Exception):
    """A mistake of configuration or surroundings, told in one sentence that names what to change."""


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
    config = cls(**values)
    if cls is Config and config.loss == "binary" and config.label_smoothing:
        raise ConfigError(
            f"--config.label_smoothing={config.label_smoothing} does not go with --config.loss=binary, whose targets are 0 or 1: "
            "set the smoothing to 0, or use --config.loss=softmax"
        )
    if cls is Config and config.seeds > 1:
        _check_seeds(config)
    if cls is Config and config.optim.cooldown_epochs >= config.epochs:
        raise ConfigError(
            f"--config.optim.cooldown_epochs={config.optim.cooldown_epochs} are not less than --config.epochs={config.epochs}, of which "
            "they are the last: lower the first or raise the second"
        )
    return config


def _check_seeds(config: Config) -> None:
    """Refuses what several seeds at once cannot have."""
    several = f"--config.seeds={config.seeds}"
    if not config.data.on_device:
        raise ConfigError(
            f"{several} are trained from a set that lies on the device: add --config.data.on_device=True, or use --config.seeds=1"
        )
    if config.mesh.fsdp > 1:
        raise ConfigError(
            f"{several} does not go with --config.mesh.fsdp={config.mesh.fsdp}, which divides a model that is large: set one of them to 1"
        )
    if config.seed + config.seeds > 2**32:
        raise ConfigError(f"{several} from --config.seed={config.seed} on do not all stay below 2**32: use a smaller seed")


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
    low, high = RANGES.get(name, (None, None))
    if (low is not None and value < low) or (high is not None and value >= high):
        raise ConfigError(f"--config.{name}={value!r} is out of range; it must be at least {low}" + (f" and below {high}" if high else ""))
    if name == "data.std" and min(value) <= 0:
        raise ConfigError(f"--config.data.std={value} is out of range; each number must be greater than 0")
    if name == "data.mean" and not all(0 <= v <= 1 for v in value):
        raise ConfigError(f"--config.data.mean={value} is out of range; it is of values in [0, 1], so divide means of 0 to 255 by 255")
    if name == "optim.clip_norm" and value == 0:
        raise ConfigError("--config.optim.clip_norm=0 leaves nothing of any gradient; use None for no clipping")
    if name == "epochs" and value == 0:
        raise ConfigError("--config.epochs=0 trains nothing; use a number above 0, or --mode=evaluate")
    if name in WORDS and value not in WORDS[name]:
        raise ConfigError(f"--config.{name}={value} is not one of {', '.join(WORDS[name])}")
    if name in ("mix.prob", "mix.switch_prob") and not 0 <= value <= 1:
        raise ConfigError(f"--config.{name}={value} is out of range; it is a probability, from 0 to 1")
    if name == "optim.layer_decay" and not 0 < value <= 1:
        raise ConfigError(f"--config.{name}={value} is out of range; it must be above 0 and at most 1")
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


def differences(stored: Config, wanted: Config, allowed: Sequence[str] = ()) -> list[str]:
    """One line per field in which two runs differ, cosmetic and `allowed` ones aside: "model.position: 'ape' -> 'rope2d'"."""
    before, after = (_flatten(dataclasses.asdict(c)) for c in (stored, wanted))
    fine = {*COSMETIC, *allowed}
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name] and name not in fine]


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
