"""Common parts of the tasks of dense prediction."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from rope_jax.config import Config, ConfigError, blame
from rope_jax.data import Images, Streamed, split_augment
from rope_jax.data.labels import Labels
from rope_jax.models.dense import parse_head


def check_dense(
    config: Config, images: Images | Streamed, *, labels: Labels, sources: str, targets: str
) -> None:
    """Rejects images with other labels, and settings for classes of whole images.

    Args:
        config: of the run, with a head.
        images: the training images.
        labels: the kind that the head needs.
        sources: sources that have it, for the error.
        targets: the labels that augmentations would have to change with the images, likewise.

    Raises:
        ConfigError: with the flag to change.
    """
    head, mix = f"--config.model.head={config.model.head}", config.mix
    if images.labels_kind != labels:
        raise ConfigError(
            f"{head} needs {labels.words}, but --config.data.source={config.data.source} has "
            f"{images.labels_kind.words}: use {sources}, or another head"
        )
    if config.model.num_classes not in (None, images.classes):
        raise ConfigError(
            f"--config.model.num_classes={config.model.num_classes}, but {images.name} has "
            f"{images.classes} classes: use {images.classes}, or None for as many"
        )
    classification_only = {
        "mix.mixup": (mix.mixup, 0),
        "mix.cutmix": (mix.cutmix, 0),
        "label_smoothing": (config.label_smoothing, 0),
        "loss": (config.loss, "softmax"),
    }
    for name, (value, required) in classification_only.items():
        if value != required:
            raise ConfigError(
                f"--config.{name}={value} is for classes of whole images: set it to {required} "
                f"with {head}"
            )
    _, family, _ = parse_head(config.model.head)
    if config.accumulate > 1 and not family.divisible:
        raise ConfigError(
            f"--config.accumulate={config.accumulate} cannot be combined with {head}, whose loss "
            "is divided by the number of objects in a batch: use --config.accumulate=1"
        )
    with blame("--config.data.augment"):
        split = split_augment(config.data.augment)
    for augmentation in (*split.pixels, *split.erasing):
        if labels.labels_of not in augmentation.entry.labels:
            raise ConfigError(
                f"--config.data.augment: {augmentation.name} changes images, but not {targets}: "
                f"leave it out with {head}"
            )


def dense_identity(model: nnx.Module, folder: str | None) -> dict[str, Any]:
    """The identity of a row of a model with a head."""
    blocks = model.blocks and list(model.blocks)
    return {"head": model.head_notation, "blocks": blocks, "images": folder}


def check_classes(model: nnx.Module, images: Images | Streamed) -> None:
    """Rejects images of other classes than the model's, by their names if both are known."""
    if model.num_classes != images.classes:
        raise ConfigError(
            f"the model has {model.num_classes} classes, and {images.name} has {images.classes}: "
            "use images of the same classes, or weights for as many"
        )
    if (difference := first_difference(model.class_names, images.class_names)) is not None:
        label, expected, actual = difference
        raise ConfigError(
            f"the model has other classes than {images.name}: label {label} is {expected!r} for "
            f"the model and {actual!r} in the images: use images of the same classes"
        )


def side_multiple(grids: Callable[[tuple[int, int]], Any]) -> int:
    """The smallest number of pixels whose multiples are sides of images that a model accepts.

    >>> import rope_jax
    >>> side_multiple(rope_jax.create_model("vit_digits", depth=1).grids)
    2

    Args:
        grids: `Backbone.grids`.

    Raises:
        ConfigError: there is no such number up to 128.
    """
    for side in range(1, 129):
        try:
            for times in (6, 7, 11):
                grids((side * times, side * (times + 1)))
        except ValueError:
            continue
        return side
    raise ConfigError("the model takes images of few sizes only: name a --window that it takes")


def first_difference(
    first: Sequence[str] | None, second: Sequence[str] | None
) -> tuple[int, str | None, str | None] | None:
    """The first label whose class has two names, and both names; None if there is none.

    >>> first_difference(("cat", "dog"), ("cat",))
    (1, 'dog', None)
    """
    if first is None or second is None:
        return None
    pairs = enumerate(itertools.zip_longest(first, second))
    return next(((label, *pair) for label, pair in pairs if pair[0] != pair[1]), None)
