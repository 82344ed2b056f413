"""What the tasks of dense prediction share."""

from rope_jax.config import Config, ConfigError, blame
from rope_jax.data import Images, Streamed, split_augment
from rope_jax.models.dense import head_call
from rope_jax.models.heads import find_head


def check_dense(
    config: Config, images: Images | Streamed, *, labels_of: str, sources: str, moved: str
) -> None:
    """Rejects images with other labels, and settings for classes of whole images.

    Args:
        config: of the run, with a head.
        images: the training images.
        labels_of: what the head needs classes of, "pixels" or "boxes".
        sources: words for the error: sources that have them.
        moved: likewise: what augmentations would have to change with the images.

    Raises:
        ConfigError: with the flag to change.
    """
    head, mix = f"--config.model.head={config.model.head}", config.mix
    if images.labels_of != labels_of:
        raise ConfigError(
            f"{head} needs classes of {labels_of}, but --config.data.source={config.data.source} "
            f"has classes of {images.labels_of}: use {sources}, or another head"
        )
    if config.model.num_classes not in (None, images.classes):
        raise ConfigError(
            f"--config.model.num_classes={config.model.num_classes}, but {images.name} has "
            f"{images.classes} classes of {labels_of}: use {images.classes}, or None for as many"
        )
    whole = {
        "mix.mixup": (mix.mixup, 0),
        "mix.cutmix": (mix.cutmix, 0),
        "label_smoothing": (config.label_smoothing, 0),
        "loss": (config.loss, "softmax"),
    }
    for name, (value, needed) in whole.items():
        if value != needed:
            raise ConfigError(
                f"--config.{name}={value} is for classes of whole images: set it to {needed} with "
                f"{head}"
            )
    family = find_head(head_call(config.model.head).name).family
    if config.accumulate > 1 and not family.divisible:
        raise ConfigError(
            f"--config.accumulate={config.accumulate} does not go with {head}, whose loss is "
            "divided by what there is in a batch: use --config.accumulate=1"
        )
    with blame("--config.data.augment"):
        split = split_augment(config.data.augment)
    for one in (*split.pixels, *split.erasing):
        if not one.entry.colours:
            raise ConfigError(
                f"--config.data.augment: {one.name} changes images, but not {moved}: leave it out "
                f"with {head}"
            )
