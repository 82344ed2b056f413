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
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections

from rope_jax.hints import closest


class ConfigError(Exception):
    """A mistake of configuration or surroundings, told in one sentence that names what to change."""


Size = int | tuple[int, int]

# Mean and standard deviation of ImageNet's training images, in [0, 1], as its recipes use them.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        source: "digits", "npz", "idx", "folder", "tfds", "packed" or "imagenet", see `rope_jax.data.load`.
        path: file or folder of the source; digits needs none.
        image_size: training resolution in pixels, int or (height, width); None for the images' own.
        mean, std: normalisation per channel, of values in [0, 1].
        augment: augmentations with their options, "none" for none: those of the loader (`rope_jax.data.augment`), then those of the step
            (`rope_jax.data.on_device`), as "resized_crop+flip+rand_augment(m=9)+erase(p=0.25)".
        repeats: times that an example comes in a row, each time augmented anew; an epoch then has as many steps as without, over fewer
            examples (repeated augmentation, see `rope_jax.data.pipeline.epoch_length`).
        bad_images: what an image that cannot be decoded is: an "error", or to "skip" and replace (up to one in a thousand).
        workers: processes that decode images which are read one at a time (needs the extra `data`); 0 for the process itself.
        on_device: whether the whole set lies on the device, for sets that are small.
    """

    source: str = "digits"
    path: str | None = None
    image_size: Size | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    augment: str = "none"
    repeats: int = 1
    bad_images: str = "error"
    workers: int = 0
    on_device: bool = False


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning rate, see `rope_jax.optim`.

    Attributes:
        name: "adamw", "lamb" (as in DeiT-III) or "sgd".
        learning_rate: peak.
        min_learning_rate: at the end.
        schedule: "cosine" decay after the warmup, or "constant".
        schedule_step: how often the rate changes: each "iteration"; each "epoch"; or each epoch by the count of epochs that are over when
            it begins, less one ("late_epoch": the first two epochs share a rate, as in DeiT and DeiT-III).
        warmup_epochs: linear from `warmup_learning_rate`.
        warmup_learning_rate: at which the warmup starts.
        warmup_prefix: whether the cosine starts where the warmup ends (Swin), or has run since the start of training (timm's default).
        cooldown_epochs: at the end of the run, at `min_learning_rate`; the last of `epochs`.
        weight_decay: on matrices; never on biases, norms, and what a positional scheme exempts.
        layer_decay: factor on the learning rate from each block to the one below it, 1 for none.
        b1, b2, eps: of AdamW and LAMB.
        momentum, nesterov: of SGD.
        clip_norm: global gradient norm above which gradients are scaled down; None for no clipping.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    schedule: str = "cosine"
    schedule_step: str = "iteration"
    warmup_epochs: float = 5.0
    warmup_learning_rate: float = 0.0
    warmup_prefix: bool = True
    cooldown_epochs: float = 0.0
    weight_decay: float = 0.05
    layer_decay: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixing of the images of a batch and of their labels, with one draw a batch (arXiv 1710.09412, 1905.04899).

    Attributes:
        mixup: alpha of the Beta(alpha, alpha) of which mixup draws the share of the first image; 0 for no mixup.
        cutmix: the same of cutmix.
        prob: that a batch is mixed at all.
        switch_prob: that it is cutmix rather than mixup, where there are both.
        off_epoch: epochs after which nothing is mixed any more; None for never.
        before_erasing: whether images are mixed before random erasing (timm's loaders) or after it (DeiT, Swin).
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    off_epoch: float | None = None
    before_erasing: bool = False


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation.

    Attributes:
        resolutions: pixels, each an int or (height, width); the training resolution is always evaluated first.
        batch_size: images per step on all devices together.
        ema: whether the moving average of the weights is evaluated, where there is one, or the weights themselves.
        frame: how images that are read one at a time are brought to a resolution: "centre(crop=0.875,interpolation=bicubic)", with the
            share of the resized image that is kept, or "stretch(interpolation=bilinear)".
    """

    resolutions: tuple[Size, ...] = ()
    batch_size: int = 256
    ema: bool = True
    frame: str = "centre"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How a run lies on its devices, see `rope_jax.sharding`. Batches are always divided over all of them.

    Attributes:
        fsdp: over how many devices each parameter, its optimiser state and its average are divided; 1 for a copy on every device. A run
            may be resumed with another number.
    """

    fsdp: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        seed: of initial weights, order of the data, augmentation, and drop path.
        epochs: passes over the training images.
        batch_size: images per step on all devices together.
        accumulate: parts into which a batch is cut to save memory; the gradient is that of the whole.
        dtype: in which activations are computed, "float32" or "bfloat16"; parameters are float32.
        loss: "softmax" cross entropy, or "binary" cross entropy of each class, see `rope_jax.losses`.
        label_smoothing: in [0, 1).
        ema_decay: of the moving average of the weights, per step; None for none.
        init_from: a workdir of another run, or a weights file (.npz), whose weights are the start; position tables of another
            resolution are resized by their scheme's rule, a head for other classes stays fresh.
        log_every, checkpoint_every: steps; a checkpoint is also written at the end and when the run is interrupted.
        keep_checkpoints: how many of the newest that verify stay, at least 2.
        non_finite: what to do when a loss or gradient is not finite: "stop", or "skip" the update of that step (the state stays what it
            was, but for the count of steps), up to 10 times in a row.
        profile_at: the step at which jax's profiler records a few steps into the workdir; None for only when SIGUSR2 asks.
        tensorboard: also write TensorBoard files into the workdir (needs the extra `log`).
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mix: MixConfig = MixConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    epochs: float = 1.0
    batch_size: int = 128
    accumulate: int = 1
    dtype: str = "float32"
    loss: str = "softmax"
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    init_from: str | None = None
    log_every: int = 50
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    non_finite: str = "stop"
    profile_at: int | None = None
    tensorboard: bool = False


# Every field is in one of two lists. These may change when a run is resumed: they do not change what is computed as long as all goes well.
COSMETIC = (
    "data.path",
    "data.bad_images",
    "data.workers",
    "data.on_device",
    "eval.resolutions",
    "eval.batch_size",
    "eval.ema",
    "eval.frame",
    "mesh.fsdp",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "non_finite",
    "profile_at",
    "tensorboard",
)
# And these may not, unless --resume_override names them.
SEMANTIC = (
    "model.name", "model.position", "model.num_classes", "model.options",
    "data.source", "data.image_size", "data.mean", "data.std", "data.augment", "data.repeats",
    "mix.mixup", "mix.cutmix", "mix.prob", "mix.switch_prob", "mix.off_epoch", "mix.before_erasing",
    "optim.name", "optim.learning_rate", "optim.min_learning_rate", "optim.schedule", "optim.schedule_step", "optim.warmup_epochs",
    "optim.warmup_learning_rate", "optim.warmup_prefix", "optim.cooldown_epochs", "optim.weight_decay", "optim.layer_decay", "optim.b1",
    "optim.b2", "optim.eps", "optim.momentum", "optim.nesterov", "optim.clip_norm",
    "seed", "epochs", "batch_size", "accumulate", "dtype", "loss", "label_smoothing", "ema_decay", "init_from",
)  # fmt: skip

_RANGES = {
    "batch_size": (1, None), "epochs": (0, None), "label_smoothing": (0, 1), "ema_decay": (0, 1), "log_every": (1, None),
    "checkpoint_every": (1, None), "keep_checkpoints": (2, None), "eval.batch_size": (1, None), "optim.learning_rate": (0, None),
    "optim.min_learning_rate": (0, None), "optim.warmup_epochs": (0, None), "optim.weight_decay": (0, None), "optim.eps": (0, None),
    "optim.b1": (0, 1), "optim.b2": (0, 1), "optim.clip_norm": (0, None), "model.num_classes": (1, None), "seed": (0, None),
    "mesh.fsdp": (1, None), "profile_at": (1, None),
    "data.repeats": (1, None), "data.workers": (0, None),
    "accumulate": (1, None), "optim.warmup_learning_rate": (0, None), "optim.cooldown_epochs": (0, None), "optim.momentum": (0, 1),
    "mix.mixup": (0, None), "mix.cutmix": (0, None), "mix.off_epoch": (0, None),
}  # fmt: skip

_WORDS = {
    "dtype": ("float32", "bfloat16"),
    "data.bad_images": ("error", "skip"),
    "loss": ("softmax", "binary"),
    "non_finite": ("stop", "skip"),
    "optim.name": ("adamw", "lamb", "sgd"),
    "optim.schedule": ("cosine", "constant"),
    "optim.schedule_step": ("iteration", "epoch", "late_epoch"),
}


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
    if cls is Config and config.optim.cooldown_epochs >= config.epochs:
        raise ConfigError(
            f"--config.optim.cooldown_epochs={config.optim.cooldown_epochs} are not less than --config.epochs={config.epochs}, of which "
            "they are the last: lower the first or raise the second"
        )
    return config


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
    if name == "data.mean" and not all(0 <= v <= 1 for v in value):
        raise ConfigError(f"--config.data.mean={value} is out of range; it is of values in [0, 1], so divide means of 0 to 255 by 255")
    if name == "optim.clip_norm" and value == 0:
        raise ConfigError("--config.optim.clip_norm=0 leaves nothing of any gradient; use None for no clipping")
    if name == "epochs" and value == 0:
        raise ConfigError("--config.epochs=0 trains nothing; use a number above 0, or --mode=evaluate")
    if name in _WORDS and value not in _WORDS[name]:
        raise ConfigError(f"--config.{name}={value} is not one of {', '.join(_WORDS[name])}")
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
