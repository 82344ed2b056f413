"""The examples of each training batch, as a pure function of (seed, step).

The stream is the concatenation of epochs, each a permutation of all images; batches cross the ends
of epochs. Step s at batch size B starts at example s * B, so that a run resumes without any saved
state.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from rope_jax.data.draws import epoch_draws
from rope_jax.names.options import Count, convert

_REPEATED_EPOCH = 256  # epochs of repeated augmentation are multiples of it


def epoch_length(count: int, repeats: int = 1) -> int:
    """Examples in an epoch.

    >>> epoch_length(600), epoch_length(600, repeats=3)
    (600, 512)

    Args:
        count: images of the set.
        repeats: copies of each image in a row. From 2 on (repeated augmentation as in DeiT and
            DeiT-III, arXiv 1901.09335) an epoch is cut to a multiple of 256 examples and holds
            `repeats` times fewer images.

    Returns:
        `count`, or floor(count / 256) * 256.

    Raises:
        ValueError: for less than one repeat, and if an epoch would be empty.
    """
    convert(repeats, Count, "repeats")
    if repeats > 1 and count < _REPEATED_EPOCH:
        raise ValueError(
            f"repeats {repeats} of {count} images: "
            f"repeated augmentation needs at least {_REPEATED_EPOCH}"
        )
    return count if repeats == 1 else count // _REPEATED_EPOCH * _REPEATED_EPOCH


def check_batch(batch_size: int, count: int, shard: tuple[int, int] = (0, 1)) -> None:
    """Checks the sizes of batches, epochs and shards.

    Raises:
        ValueError: empty batches or epochs, or shards that do not exist or do not divide a batch.
    """
    part, parts = shard
    convert(batch_size, Count, "batch_size")
    convert(count, Count, "number of examples")
    if not 0 <= part < parts or batch_size % parts:
        raise ValueError(
            f"shard {shard} of batch_size {batch_size}: "
            "(k, of) has 0 <= k < of, and of divides the batch"
        )


def permutation(seed: int, epoch: int, count: int) -> Int64[np.ndarray, " count"]:
    """The order of an epoch: example ids, each once.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: from 0.
        count: examples in an epoch.

    Returns:
        int64 [count], read-only.

    Raises:
        ValueError: for a seed out of range.
    """
    return _orders(seed, count)(epoch)


@functools.lru_cache(maxsize=64)
def _orders(seed: int, count: int) -> Callable[[int], Int64[np.ndarray, " count"]]:
    """`permutation` of a seed; two epochs are cached, for streams of several seeds in turn."""

    @functools.lru_cache(maxsize=2)
    def epoch_order(epoch: int) -> np.ndarray:
        order = np.argsort(epoch_draws(seed, epoch, count, "order"), kind="stable")
        order.setflags(write=False)
        return order

    return epoch_order


def batch_examples(
    step: int,
    *,
    batch_size: int,
    seed: int,
    count: int,
    repeats: int = 1,
) -> tuple[Int64[np.ndarray, " b"], Int64[np.ndarray, " b"]]:
    """The examples of a training batch, as (epoch, index).

    With repeats, the copies of an image are in different parts of the batch, first copies first, so
    that with three or more devices each has an image at most once per step.

    >>> epochs, indices = batch_examples(1, batch_size=4, seed=0, count=6)
    >>> epochs.tolist(), indices.tolist()
    ([0, 0, 1, 1], [2, 1, 4, 0])

    Args:
        step: from 0.
        batch_size: examples in the batch.
        seed: 0 to 2**64 - 1.
        count: images of the set.
        repeats: see `epoch_length`.

    Returns:
        epochs int64 [b] and indices int64 [b], b = batch_size. An index is the image's id,
        plus `count` for each earlier copy of the image in the epoch.

    Raises:
        ValueError: for a negative step, and as `epoch_length` and `check_batch`.
    """
    check_batch(batch_size, count)
    if step < 0:
        raise ValueError(f"step {step} is negative; steps start at 0")
    numbers = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs, indices = np.divmod(numbers, epoch_length(count, repeats))
    if repeats > 1:
        order = np.argsort(indices % repeats, kind="stable")
        epochs, indices = epochs[order], indices[order]
    ids = np.empty_like(indices)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        ids[in_epoch] = permutation(seed, epoch, count)[indices[in_epoch] // repeats]
    return epochs, ids + indices % repeats * count
