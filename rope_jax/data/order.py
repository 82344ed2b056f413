"""Which example stands where in the training stream: a pure function of (seed, step).

The stream is the concatenation of epochs, each a permutation of all examples; batches run across the borders. Nothing has to be saved to
resume it: step s at batch size B starts at position s * B, whatever ran before.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from rope_jax.data.augment import epoch_draws

_REPEATED_EPOCH = 256  # epochs of repeated augmentation are whole multiples of it


def epoch_length(count: int, repeats: int = 1) -> int:
    """Examples in an epoch.

    Args:
        count: images of the set.
        repeats: how often each comes in a row. From 2 on an epoch is as long as without, cut to a multiple of 256, and holds that many
            fewer images (repeated augmentation as DeiT and DeiT-III have it, arXiv 1901.09335).

    Returns:
        `count`, or floor(count / 256) * 256.

    Raises:
        ValueError: for less than one repeat, and where an epoch would be empty.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats} must be at least 1")
    if repeats > 1 and count < _REPEATED_EPOCH:
        raise ValueError(f"repeats {repeats} of {count} images: repeated augmentation needs at least {_REPEATED_EPOCH}")
    return count if repeats == 1 else count // _REPEATED_EPOCH * _REPEATED_EPOCH


def position(
    step: int, batch_size: int, count: int, shard: tuple[int, int] = (0, 1)
) -> tuple[Int64[np.ndarray, " b"], Int64[np.ndarray, " b"]]:
    """Where the examples of a batch lie: example i of step s is number s * batch_size + i of the stream.

    Args:
        step: from 0.
        batch_size: examples in the batch of all shards together.
        count: examples in an epoch.
        shard: (k, of): the k-th of `of` equal parts of the batch.

    Returns:
        epochs int64 [b] and indices within them int64 [b], b = batch_size / of.

    Raises:
        ValueError: for a negative step, an empty batch or epoch, and a shard that does not exist or does not divide the batch.
    """
    part, parts = shard
    if step < 0:
        raise ValueError(f"step {step} is negative; steps start at 0")
    if batch_size < 1 or count < 1:
        raise ValueError(f"batch_size {batch_size} of {count} examples: both must be at least 1")
    if not 0 <= part < parts or batch_size % parts:
        raise ValueError(f"shard {shard} of batch_size {batch_size}: (k, of) has 0 <= k < of, and of divides the batch")
    size = batch_size // parts
    epochs, indices = np.divmod(step * batch_size + part * size + np.arange(size, dtype=np.int64), count)
    return epochs, indices


def permutation(seed: int, epoch: int, count: int) -> Int64[np.ndarray, " count"]:
    """The order of an epoch: example ids, each once. A pure function of its arguments.

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
    """`permutation` of a seed, which remembers the last two epochs: streams of several seeds may be read in turn."""

    @functools.lru_cache(maxsize=2)
    def order_of(epoch: int) -> np.ndarray:
        order = np.argsort(epoch_draws(seed, epoch, count, "order"), kind="stable")
        order.setflags(write=False)
        return order

    return order_of


def places(
    step: int, *, batch_size: int, seed: int, count: int, repeats: int = 1, shard: tuple[int, int] = (0, 1)
) -> tuple[Int64[np.ndarray, " b"], Int64[np.ndarray, " b"]]:
    """Which examples are in a batch, and which copies of them.

    With repeats the copies of an example stand in different parts of the batch, first copies first, so that three or more devices each see
    an example at most once in a step.

    Args:
        step: from 0.
        batch_size: examples in the batch of all shards together.
        seed: 0 to 2**64 - 1.
        count: images of the set.
        repeats: see `epoch_length`.
        shard: (k, of): the k-th of `of` equal parts of the batch.

    Returns:
        epochs int64 [b], and indices int64 [b]: the id of the image, plus `count` for each copy of it that came before in the epoch.

    Raises:
        ValueError: as `position` and `epoch_length`.
    """
    position(step, batch_size, count, shard)  # refuses what is out of range
    epochs, indices = position(step, batch_size, epoch_length(count, repeats))
    if repeats > 1:
        order = np.argsort(indices % repeats, kind="stable")
        epochs, indices = epochs[order], indices[order]
    size = batch_size // shard[1]
    part = slice(shard[0] * size, (shard[0] + 1) * size)
    epochs, indices = epochs[part], indices[part]
    examples = np.empty_like(indices)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        examples[here] = permutation(seed, epoch, count)[indices[here] // repeats]
    return epochs, examples + indices % repeats * count


def examples(step: int, *, batch_size: int, seed: int, count: int, repeats: int = 1) -> list[int]:
    """Ids of the images in the training batch of one step, in its order; arguments as in `places`."""
    return (places(step, batch_size=batch_size, seed=seed, count=count, repeats=repeats)[1] % count).tolist()
