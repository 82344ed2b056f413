"""Training batches of a data set on the device: the host sends ids and draws, but no pixels.

The stream is that of `rope_jax.data.batches`, bit for bit.
"""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Integer, UInt8, UInt64

from rope_jax.data.examples import Training
from rope_jax.data.images.augment import AUGMENTATIONS, CROP, Augmentation, parse_loader
from rope_jax.data.images.device_crops import pack
from rope_jax.data.sources import Images, Streamed


class DeviceBatches(Iterator[dict[str, np.ndarray]]):
    """Examples of each training batch, and the loader's draws for them: see `take`.

    Attributes:
        skipped: ids of images that could not be used; always empty, as all images are in memory.
    """

    skipped: frozenset[int] = frozenset()

    def __init__(
        self,
        images: Images | Streamed,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        augment: str = "none",
        repeats: int = 1,
        shard: tuple[int, int] = (0, 1),
    ):
        """Arguments and errors as in `rope_jax.data.batches` and `loader_on_device`."""
        self._make = Training(
            images=images,
            batch_size=batch_size,
            seed=seed,
            augmentations=loader_on_device(augment, images),
            repeats=repeats,
            shard=shard,
        )
        self._step = start_step

    def __next__(self) -> dict[str, np.ndarray]:
        """`epoch` and `index` int32 [b], `draws` uint32 [b, augmentations, 2], high words first."""
        epochs, indices = self._make.part(self._step)
        self._step += 1
        drawn = [
            _pack_draws(augmentation, self._make.images, draws)
            for augmentation, draws in self._make.draws(epochs, indices)
        ]
        draws = np.array(drawn, np.uint64).reshape(len(drawn), len(indices)).T
        words = np.stack([draws >> np.uint64(32), draws & np.uint64(0xFFFFFFFF)], axis=-1)
        return {
            "epoch": epochs.astype(np.int32),
            "index": indices.astype(np.int32),
            "draws": words.astype(np.uint32),
        }

    @property
    def pixels(self) -> UInt8[np.ndarray, "n H W 3"]:
        """The images that `take` needs: as they are stored, if the first augmentation crops."""
        images, stages = self._make.images, [x.entry.stage for x in self._make.augmentations]
        return images.to_crop if CROP in stages else images.images

    def close(self) -> None:
        """Does nothing: there are no workers."""


def loader_on_device(augment: str, images: Images | Streamed) -> tuple[Augmentation, ...]:
    """The augmentations of a loader that runs on the device.

    Raises:
        ValueError: the set is not in memory, or an augmentation cannot run on the device.
    """
    if not images.in_memory or images.labels_kind.ragged:
        raise ValueError(
            f"on_device=True is for sets in memory without boxes, and {images.name} is not one: "
            "set it to False"
        )
    augmentations = parse_loader(augment)
    for augmentation in augmentations:
        crop = augmentation.entry.stage == CROP
        if augmentation.entry.on_device is None or (crop and images.labels_kind.placed):
            supported = ", ".join(name for name, other in AUGMENTATIONS.items() if other.on_device)
            raise ValueError(
                f"on_device=True supports {supported} and augmentations of the step, not "
                f"{augmentation.name} of {images.labels_of}: set it to False"
            )
        _pack_draws(augmentation, images, np.zeros(1, np.uint64))  # its options may be unsupported
    return augmentations


def _pack_draws(
    augmentation: Augmentation, images: Images, draws: UInt64[np.ndarray, " b"]
) -> UInt64[np.ndarray, " b"]:
    """Returns the draws, or the packed boxes of a crop."""
    if augmentation.entry.stage != CROP:
        return draws
    height, width = images.to_crop.shape[1:3]
    boxes = [pack(augmentation(width, height, images.size, draw)) for draw in draws.tolist()]
    return np.array(boxes, np.uint64)


def take(
    images: UInt8[Array, "n H W 3"],
    labels: Integer[Array, "n ..."],
    batch: dict[str, Array],
    augment: str,
    size: tuple[int, int] | None = None,
) -> dict[str, Array]:
    """The batch of `rope_jax.data.batches`, from the whole data set on the device.

    Args:
        images: `DeviceBatches.pixels`.
        labels: int32 [n], or uint8 [n, H, W] of pixels.
        batch: from `DeviceBatches`.
        augment: as for `DeviceBatches`.
        size: (h, w) of the result; None for that of `images`.

    Returns:
        `image` uint8 [b, h, w, 3], `label`, `epoch` and `index` int32 [b].
    """
    examples = batch["index"] % len(labels)
    pixels, label = images[examples], labels[examples]
    for number, augmentation in enumerate(parse_loader(augment)):
        options = dict(augmentation.options)
        if augmentation.entry.stage == CROP:
            options["size"] = size or images.shape[1:3]
        function = jax.vmap(functools.partial(augmentation.entry.on_device, **options))
        draws = batch["draws"][:, number]
        pixels = function(pixels, draws)
        if label.ndim == 3:  # of pixels
            label = augmentation.move_labels(function, label, draws)
    return {"image": pixels, "label": label, "epoch": batch["epoch"], "index": batch["index"]}
