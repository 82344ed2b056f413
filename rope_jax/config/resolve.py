"""Conversion of a recipe's ConfigDict, or of an earlier run's JSON, to a valid `Config`, and back.

Recipes in `configs/` start from `default()`, a ConfigDict of all settings with locked keys, so
that `--config.section.key=value` works for each and a misspelt key is an error.
"""

import contextlib
import dataclasses
import functools
import json
import operator
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_collections

from rope_jax.config.settings import Config
from rope_jax.names.notation import Call, Value, assignments, literal, parse
from rope_jax.names.options import convert, describe, read
from rope_jax.names.text import closest
from rope_jax.system.files import SaveFailed

# Arguments of `create_model` that other settings determine.
_NOT_OPTIONS = {"name", "position", "num_classes", "image_size", "seed", "dtype", "pretrained"}
_NOT_OPTIONS |= {"weights_dir", "head"}

# The settings that a recipe's arguments of these names stand for.
_SETTINGS_OF_ARGUMENTS = {
    "seed": "seed",
    "epochs": "epochs",
    "steps": "steps",
    "batch_size": "batch_size",
    "init_from": "init_from",
    "model": "model.name",
    "variant": "model.name",
    "position": "model.position",
    "head": "model.head",
    "source": "data.source",
    "path": "data.path",
    "resolution": "data.image_size",
    "augment": "data.augment",
}


class ConfigError(Exception):
    """A mistake in the config, the command or the workdir, in one sentence with its remedy."""


def in_one_line(error: Exception) -> str:
    """Message of an error for commands without --config flags: names settings, but not as flags.

    >>> in_one_line(ConfigError("path 'x' does not exist [--config.data]"))
    "path 'x' does not exist [data of the run's config]"
    """
    words = " ".join(str(error).split())
    return re.sub(r"\[--config\.([^\]]*)\]$", r"[\1 of the run's config]", words)


@contextlib.contextmanager
def blame(flag: str) -> Iterator[None]:
    """Turns an error of a value, a file, a module or its size into a ConfigError for the flag.

    A SaveFailed is not changed: it is not the flag's fault that a file could not be written.
    """
    try:
        yield
    except SaveFailed:
        raise
    except (ValueError, OSError, ImportError, OverflowError, MemoryError, RecursionError) as error:
        reason = str(error) or type(error).__name__  # a MemoryError may have no text
        raise ConfigError(f"{reason} [{flag}]") from error


def default(**arguments: Any) -> ml_collections.ConfigDict:
    """All settings with their defaults; keys are locked.

    >>> config = default(resolution=32)
    >>> config.data.image_size, config.optim.learning_rate
    (32, 0.001)

    Args:
        **arguments: a recipe's arguments. Those with these names set a setting unless they are
            None, others are ignored: seed, epochs, steps, batch_size, init_from, model or variant
            (its name), position, head, source, path, resolution (`data.image_size`) and augment.
    """
    config = _to_dict(Config).lock()
    for name, value in arguments.items():
        if name in _SETTINGS_OF_ARGUMENTS and value is not None:
            config.update_from_flattened_dict({_SETTINGS_OF_ARGUMENTS[name]: value})
    return config


def _to_dict(cls: type) -> ml_collections.ConfigDict:
    values = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            values[field.name] = _to_dict(field.type)
        elif type(None) in typing.get_args(field.type):
            # Numbers as objects, so that None can be given on the command line.
            plain = str if field.type == str | None else object
            values[field.name] = ml_collections.FieldReference(field.default, field_type=plain)
        else:
            values[field.name] = field.default
    return ml_collections.ConfigDict(values)


def recipe_arguments(
    text: str | None, words: Mapping[str, Iterable[str]] = {}, /, **defaults: Any
) -> tuple[ml_collections.ConfigDict, ml_collections.ConfigDict]:
    """Parses the arguments after the colon of `--config=configs/NAME.py:key=value,...`.

    >>> arguments, config = recipe_arguments("position=ape,epochs=3", position=None, epochs=1.0)
    >>> arguments.position, config.model.position, config.epochs
    ('ape', 'ape', 3.0)

    Args:
        text: comma-separated key=value; commas inside parentheses belong to the value.
        words: the allowed values of arguments that have a fixed choice.
        **defaults: the recipe's arguments; a value must have its default's type (text or None for
            None).

    Returns:
        The arguments, and all settings as by `default(**arguments)`.

    Raises:
        ConfigError: an unknown argument, or a value of another type.
    """
    arguments = ml_collections.ConfigDict(defaults)
    with blame("recipe argument"):
        texts = assignments(text or "", "recipe argument")
    for key, value in texts.items():
        if key not in defaults:
            hint = setting_called(key)
            setting = f"; for the setting, {hint}" if hint else ""
            raise ConfigError(
                f"the recipe has no argument {key!r}; {closest(key, defaults)}{setting}"
            )
        kind = str | None if defaults[key] is None else type(defaults[key])
        with blame("recipe argument"), arguments.ignore_type():
            arguments[key] = read(value, Literal[*words[key]] if key in words else kind, key)
    return arguments, default(**arguments)


def recipe_sides(resolutions: str) -> list[int]:
    """The sides in pixels that the argument `resolutions` of a recipe joins by +.

    >>> recipe_sides("224+160+128")
    [224, 160, 128]

    Raises:
        ConfigError: the text has another form.
    """
    if not re.fullmatch(r"[1-9][0-9]*(\+[1-9][0-9]*)*", resolutions):
        raise ConfigError(
            f"recipe argument resolutions={resolutions}: use sides in pixels joined by +, such as "
            "224+160+128"
        )
    return [int(side) for side in resolutions.split("+")]


def with_options(position: str, name: str, **options: Value) -> str:
    """A positional scheme whose parts called `name` have these options, unless they are given.

    >>> with_options("lape(ape)+rpb(std=0.1)", "rpb", std=0.02, decay=True)
    'lape(ape)+rpb(std=0.1,decay=True)'

    Args:
        position: a recipe's argument, as in `rope_jax.positions`.
        name: of a scheme, also in sums and inside wrappers.
        **options: of that scheme.

    Raises:
        ConfigError: `position` does not follow the notation.
    """

    def complete(call: Call) -> Call:
        inner = tuple(tuple(map(complete, calls)) for calls in call.inner)
        written = dict(call.options)
        missing = {key: value for key, value in options.items() if key not in written}
        merged = written | missing if call.name == name else written
        return Call(call.name, inner, tuple(merged.items()))

    with blame("recipe argument position"):
        return "+".join(str(complete(call)) for call in parse(position, "position"))


def model_overrides(options: str) -> dict[str, Any]:
    """Parses `model.options` into overrides of `create_model`.

    >>> model_overrides("depth=6,attention=global")
    {'depth': 6, 'attention': 'global'}
    """
    with blame("--config.model.options"):
        overrides = assignments(options, "option")
    if reserved := sorted(_NOT_OPTIONS & overrides.keys()):
        raise ConfigError(
            f"--config.model.options: {reserved[0]} is a setting of its own, not an option"
        )
    return {key: literal(value) for key, value in overrides.items()}


def resolve(raw: Any) -> Config:
    """Checks every setting and returns the frozen Config.

    >>> resolve({"optim": {"learning_rate": 3e-3}}).optim.learning_rate
    0.003

    Args:
        raw: a recipe's ConfigDict, or a dict; missing settings have defaults.

    Raises:
        ConfigError: an unknown key, or a value of another type or out of range; the message names
            the flag.
    """
    raw = raw.to_dict() if isinstance(raw, ml_collections.ConfigDict) else raw
    config = _resolve_section(Config, raw, "")
    _check_combinations(config)
    return config


def resolve_stored(raw: Any, where: object = "config.json") -> Config:
    """Resolves a config from `config.json` or a checkpoint, which may have removed settings.

    JAX_NUM_CPU_DEVICES has replaced `mesh.cpu_devices`.

    >>> resolve_stored({"mesh": {"fsdp": 2, "cpu_devices": 1}}).mesh
    MeshConfig(fsdp=2)

    Args:
        raw: the stored value.
        where: its location, for error messages.

    Raises:
        ConfigError: they are not settings of this version.
    """
    if isinstance(raw, dict) and isinstance(mesh := raw.get("mesh"), dict):
        raw = raw | {"mesh": {key: x for key, x in mesh.items() if key != "cpu_devices"}}
    try:
        return resolve(raw)
    except ConfigError as error:
        reason = str(error).replace("--config.", "")
        raise ConfigError(
            f"{where} holds settings of another version of rope_jax, or is damaged ({reason}): "
            "use the version that wrote it"
        ) from error


def _resolve_section(cls: type, raw: Any, prefix: str) -> Any:
    if not isinstance(raw, dict):
        section = f" (--config.{prefix.rstrip('.')})" if prefix else ""
        raise ConfigError(f"{raw!r:.100}{section} holds no settings by name")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in raw.items():
        if key in fields and dataclasses.is_dataclass(fields[key].type):
            values[key] = _resolve_section(fields[key].type, value, f"{key}.")
        elif key not in fields and f"{prefix}{key}" in settings():
            raise ConfigError(f"--config.{prefix}{key} is in a section: give that as a dict")
        else:
            values[key] = convert_setting(value, f"{prefix}{key}")
    return cls(**values)


def setting(name: str) -> dataclasses.Field:
    """The declaration of a setting, "optim.b1"; raises ConfigError if there is none."""
    if name not in settings():
        section, _, key = name.rpartition(".")
        split = [other.rpartition(".") for other in settings()]
        siblings = [sibling for inside, _, sibling in split if inside == section]
        hint = closest(key, siblings) if siblings else "--config.help lists all"
        raise ConfigError(f"--config.{name} is not a setting; {setting_called(key) or hint}")
    return settings()[name]


def convert_setting(value: Any, name: str, using: Callable = convert) -> Any:
    """The value of a setting as its type, by `convert` or `read`; raises ConfigError."""
    field = setting(name)
    try:
        return using(value, field.type, f"--config.{name}")
    except ValueError as error:
        raise ConfigError(": ".join(filter(None, [str(error), field.metadata["hint"]]))) from None


_ELSEWHERE = {  # names of settings in other libraries -> here
    "model": "model.name",
    "data_dir": "data.path",
    "data_path": "data.path",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "resolution": "data.image_size",
    "res": "data.image_size",
    "lr": "optim.learning_rate",
    "opt": "optim.name",
    "optimizer": "optim.name",
    "clip_grad": "optim.clip_norm",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "smoothing": "label_smoothing",
    "model_ema_decay": "ema_decay",
    "num_workers": "data.workers",
    "finetune": "init_from",
    "pretrained": "init_from",
    "drop_path": "model.options=drop_path",
    "drop_path_rate": "model.options=drop_path",
}


def setting_called(name: str) -> str | None:
    """A hint for a setting in another section, or with another name in other libraries.

    >>> setting_called("img-size"), setting_called("momentun")
    ('use --config.data.image_size', None)
    """
    name = name.replace("-", "_")
    here = [full_name for full_name in settings() if full_name.rpartition(".")[2] == name]
    elsewhere = [_ELSEWHERE[name]] if name in _ELSEWHERE else []
    options = sorted(here, key=lambda full_name: full_name.count(".")) or elsewhere
    return f"use {' or '.join(f'--config.{option}' for option in options)}" if options else None


def _check_combinations(config: Config) -> None:
    """Rejects incompatible settings."""
    optim, batch, seeds = config.optim, config.batch_size, f"--config.seeds={config.seeds}"
    groups = config.mix.groups if config.mix.mixup or config.mix.cutmix else 1
    below = max(batch // groups, 2) * groups
    mistakes = [
        (
            optim.schedule in ("cosine", "poly") and optim.min_learning_rate > optim.learning_rate,
            f"--config.optim.min_learning_rate={optim.min_learning_rate} is above "
            f"--config.optim.learning_rate={optim.learning_rate}: lower the first or raise the "
            "second",
        ),
        (
            optim.cooldown_epochs and optim.schedule in ("constant", "step"),
            f"--config.optim.cooldown_epochs={optim.cooldown_epochs} cannot be combined with "
            f"--config.optim.schedule={optim.schedule}, which does not end at a minimum: set the "
            "cooldown to 0, or use cosine or poly",
        ),
        (
            config.loss == "binary" and config.label_smoothing,
            f"--config.label_smoothing={config.label_smoothing} cannot be combined with "
            "--config.loss=binary, whose targets are 0 or 1: set the smoothing to 0, or use "
            "--config.loss=softmax",
        ),
        (
            groups > 1 and (batch % groups or batch < 2 * groups),
            f"--config.batch_size={batch} cannot be divided into --config.mix.groups={groups} "
            f"equal groups of at least 2 images: use a batch of {below} or {below + groups}, or "
            "--config.mix.groups=1",
        ),
        (
            config.seeds > 1 and not config.data.on_device,
            f"{seeds} needs the images on the device: add --config.data.on_device=True, or use "
            "--config.seeds=1",
        ),
        (
            config.seeds > 1 and config.mesh.fsdp > 1,
            f"{seeds} cannot be combined with --config.mesh.fsdp={config.mesh.fsdp}: set one to 1",
        ),
        (
            config.seed + config.seeds > 2**32,
            f"{seeds} from --config.seed={config.seed} on reach beyond 2**32 - 1: use a smaller "
            "seed",
        ),
        (
            config.distill is None and config.distill_from != "feature",
            f"--config.distill_from={config.distill_from} needs --config.distill: name a distance, "
            "or leave it out",
        ),
        (
            config.distill is not None and not config.data.more_sizes,
            f"--config.distill={config.distill} is between the resolutions of a step: name further "
            "ones with --config.data.more_sizes, or leave it out",
        ),
        *(
            (
                config.data.more_sizes and named,
                f"--config.data.more_sizes cannot be combined with --config.{flag}: leave one out",
            )
            for flag, named in (
                ("data.on_device", config.data.on_device),
                ("model.head", config.model.head is not None),
            )
        ),
    ]
    for wrong, mistake in mistakes:
        if wrong:
            raise ConfigError(mistake)


@functools.cache
def settings() -> dict[str, dataclasses.Field]:
    """Every setting by name, those of sections as "section.field"."""
    fields = {}
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            fields |= {f"{field.name}.{f.name}": f for f in dataclasses.fields(field.type)}
        else:
            fields[field.name] = field
    return fields


def settings_help() -> str:
    """Every setting as a flag with its type, allowed values, default and meaning.

    >>> print(settings_help().splitlines()[0])
    --config.model.name: text; default: vit_digits
    """
    lines = []
    for name, field in settings().items():
        default = "''" if field.default == "" else field.default
        resumable = "; resumable" if field.metadata["resumable"] else ""
        text = f"--config.{name}: {describe(field.type)}; default: {default}{resumable}"
        wrap = functools.partial(textwrap.wrap, width=100, break_on_hyphens=False)
        lines += wrap(text, subsequent_indent=" " * 8)
        lines += wrap(field.metadata["help"], initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(lines)


def to_json(config: Config) -> str:
    """The config as stored in `config.json` and with each checkpoint.

    >>> json.loads(to_json(Config()))["data"]["source"]
    'digits'
    """
    return json.dumps(dataclasses.asdict(config), indent=2)


def differences(stored: Config, requested: Config, allowed: Sequence[str] = ()) -> list[str]:
    """The settings that differ and that a resumed run may not change.

    >>> differences(Config(), resolve({"seed": 1, "log_every": 5}))
    ['seed: 0 -> 1']
    >>> differences(Config(), resolve({"seed": 1}), allowed=["seed"])
    []

    Args:
        stored: config of the run so far.
        requested: config to resume with.
        allowed: other settings that may differ.

    Returns:
        One line for each: "model.position: 'ape' -> 'rope2d'".
    """
    lines = []
    for name, field in settings().items():
        before, after = map(operator.attrgetter(name), (stored, requested))
        if before != after and not field.metadata["resumable"] and name not in allowed:
            lines.append(f"{name}: {before!r} -> {after!r}")
    return lines
