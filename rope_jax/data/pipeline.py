"""The stream of training batches as a pure function of (seed, step), and batches of one shape for evaluation.

The stream is the concatenation of epochs, each a permutation of all examples; batches run across the borders. Nothing has to be saved to
resume it: step s at batch size B starts at position s * B, whatever ran before.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int64

from rope_jax.data.augment import augment as apply_augmentations
from rope_jax.data.augment import epoch_draws, parse
from rope_jax.data.sources import Images

Batch = dict[str, np.ndarray]


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


@functools.lru_cache(maxsize=2)
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
    order = np.argsort(epoch_draws(seed, epoch, count, "order"), kind="stable")
    order.setflags(write=False)
    return order


def examples(step: int, *, batch_size: int, seed: int, count: int) -> list[int]:
    """Indices of the examples in the training batch of one step, in its order; arguments as in `batch` and `position`."""
    epochs, indices = position(step, batch_size, count)
    return [int(permutation(seed, int(epoch), count)[index]) for epoch, index in zip(epochs, indices, strict=True)]


def batch(images: Images, step: int, *, batch_size: int, seed: int, augment: str = "none", shard: tuple[int, int] = (0, 1)) -> Batch:
    """The training batch of one step.

    Args:
        images: the training split.
        step: from 0.
        batch_size: examples in the batch of all shards together; may exceed the number of images.
        seed: 0 to 2**64 - 1.
        augment: see `rope_jax.data.augment.parse`.
        shard: (k, of): the k-th of `of` equal parts of the batch.

    Returns:
        `image` uint8 [b, H, W, 3] and `label` int32 [b], b = batch_size / of.

    Raises:
        ValueError: for arguments out of range.
    """
    augmentations, count = parse(augment), len(images.labels)
    epochs, indices = position(step, batch_size, count, shard)
    pieces, labels = [], []
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        examples = permutation(seed, epoch, count)[indices[epochs == epoch]]
        pieces.append(apply_augmentations(images.images[examples], examples, augmentations, seed=seed, epoch=epoch, count=count))
        labels.append(images.labels[examples])
    return {"image": np.concatenate(pieces), "label": np.concatenate(labels)}


def batches(
    images: Images,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    augment: str = "none",
    shard: tuple[int, int] = (0, 1),
    ahead: bool = False,
) -> Iterator[Batch]:
    """The training batches from `start_step` on, without end.

    Args:
        images: the training split.
        batch_size: as in `batch`, like `seed`, `augment` and `shard`.
        seed: see there.
        start_step: the first step, 0 or where a run resumes.
        augment: see there.
        shard: see there.
        ahead: prepare the next batch in a thread while one is in use. Worth it where a batch takes longer than a thread switch (0.1 ms).

    Returns:
        an iterator of what `batch` returns. Errors of the thread are raised here; it ends with the iterator.

    Raises:
        ValueError: for arguments out of range, at once.
    """
    make = functools.partial(batch, images, batch_size=batch_size, seed=seed, augment=augment, shard=shard)
    make(start_step)  # arguments are refused here rather than at the first use of the iterator
    return _in_thread(make, start_step) if ahead else map(make, itertools.count(start_step))


def _in_thread(make: Callable[[int], Batch], step: int) -> Iterator[Batch]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="rope_jax.data")
    try:
        coming = thread.submit(make, step)
        while True:
            ready, step = coming.result(), step + 1
            coming = thread.submit(make, step)
            yield ready
    finally:
        # An executor that nobody holds ends its thread. So would its shutdown(), but that raises where the interpreter collects us at exit.
        del thread


def evaluation_batches(images: Images, *, batch_size: int) -> Iterator[Batch]:
    """Every example once, in order, in batches of one shape; the last one is filled up with black images of label 0.

    Args:
        images: the split to evaluate.
        batch_size: examples in a batch.

    Returns:
        an iterator of `image` uint8 [batch_size, H, W, 3], `label` int32 [batch_size] and `mask` bool [batch_size], False where filled up.

    Raises:
        ValueError: for a batch size below 1, at once.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} must be at least 1")
    return (_evaluation_batch(images, start, batch_size) for start in range(0, len(images.labels), batch_size))


def _evaluation_batch(images: Images, start: int, batch_size: int) -> Batch:
    image, label = images.images[start : start + batch_size], images.labels[start : start + batch_size]
    missing = batch_size - len(label)
    return {
        "image": np.pad(image, ((0, missing), (0, 0), (0, 0), (0, 0))),
        "label": np.pad(label, (0, missing)),
        "mask": np.arange(batch_size) < len(label),
    }
