"""The part of the augmentation in the training step that all tasks share."""

from jax import Array

from rope_jax.config.settings import DataConfig
from rope_jax.data import split_augment
from rope_jax.data.device_batches import take
from rope_jax.data.images import device

Batch = dict[str, Array]


def augment_batch(batch: Batch, options: DataConfig, *, seed: int | Array) -> Batch:
    """Augments and normalises the images of a training batch.

    Args:
        batch: of `rope_jax.data.batches`, `image` uint8 [B, H, W, 3]; or, for a data set on the
            device, `set`, `draws`, `epoch`, `index`.
        options: of the run's data: augmentation and normalisation.
        seed: of the run. Augmentation is a function of (seed, epoch, index).

    Returns:
        The batch of `rope_jax.data.batches` with `image` float32 [B, H, W, 3], 0 where padded.
    """
    augment = split_augment(options.augment)
    if "set" in batch:
        batch = take(*batch["set"], batch, augment.loader, options.image_size)
    images = batch["image"]
    if augment.pixels:
        keys = device.example_keys(seed, batch["epoch"], batch["index"])
        fill = tuple(round(255 * x) for x in options.mean)
        images = device.apply(images, keys, augment.pixels, fill=fill)
    images = device.normalise(images, options.mean, options.std, batch.get("extent"))
    return batch | {"image": images}
