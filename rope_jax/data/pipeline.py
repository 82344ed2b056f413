"""Batches for training, a pure function of (seed, step), and batches of one shape for evaluation.

Batches are created in this process, in a thread, or in worker processes.
"""

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from rope_jax.cores import cores
from rope_jax.data.ahead import Ahead, Waiting
from rope_jax.data.examples import (
    BAD_IMAGES,
    MAX_BOXES,
    THREADS,
    Evaluation,
    Size,
    Training,
    allowed,
    check_augmentations,
    check_canvases,
    too_many,
)
from rope_jax.data.images.augment import CROP, parse_loader
from rope_jax.data.images.joint import crop_both
from rope_jax.data.order import check_batch
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.boxes import check_boxes
from rope_jax.data.workers import Batch


class Batches(Iterator[Batch]):
    """An iterator over batches that owns any processes and threads that produce them.

    Attributes:
        skipped: ids of the images that could not be used so far; only with `bad_images="skip"`.
    """

    def __init__(self, make: Iterator[Batch], count: int):
        """Batches of a set of `count` images."""
        self._make, self._count = make, count
        self.skipped: set[int] = set()

    def __next__(self) -> Batch:
        batch = next(self._make)
        self.skipped.update(batch.pop("bad").tolist())
        if len(self.skipped) > allowed(self._count):
            self.close()
            raise too_many(self.skipped, self._count)
        return batch

    def close(self) -> None:
        """Ends processes and threads."""
        self._make.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def batches(
    images: Images | Streamed,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    augment: str = "none",
    repeats: int = 1,
    shard: tuple[int, int] = (0, 1),
    ahead: bool = False,
    workers: int = 0,
    bad_images: str = "error",
    canvases: Sequence[Size] = (),
    max_boxes: int = MAX_BOXES,
    waiting: Waiting = lambda seconds: None,
) -> Batches:
    """The training batches from `start_step` on, without end.

    >>> from rope_jax import data
    >>> stream = data.batches(data.load("digits"), batch_size=4, seed=0, augment="crop(pad=1)+flip")
    >>> batch = next(stream)
    >>> batch["image"].shape, batch["label"].tolist()
    ((4, 8, 8, 3), [8, 3, 2, 8])

    Args:
        images: the training split.
        batch_size: examples in the batch of all shards together; may exceed the number of images.
        seed: 0 to 2**64 - 1.
        start_step: the first step, 0 or the one at which a run resumes.
        augment: augmentations of the loader, see `rope_jax.data.images.augment`.
        repeats: see `epoch_length`.
        shard: (k, of): the k-th of `of` equal parts of the batch, b = batch_size / of examples.
        ahead: prepare the next batch in a thread while one is in use. Worthwhile if a batch takes
            longer than a thread switch (0.1 ms).
        workers: processes that read, decode and augment images of a `Streamed` set (needs grain,
            the extra `data`); the next batch is then always prepared ahead. For data sets in memory
            this process is used. The stream does not depend on the number of workers.
        bad_images: "error": an image that cannot be decoded ends the stream. "skip": it is replaced
            by the next image of the set that can be decoded, with that image's label; more than one
            in a thousand (rounded up) end the stream.
        canvases: of sets with boxes whose images differ in size: (height, width) that the images of
            a batch are padded to, the smallest that holds all of them; none for the set's size.
            All shards have the same in every batch. The images of a batch are all upright or all
            lying after the crop, but for at most one batch in 64.
        max_boxes: rows for the objects of an image.
        waiting: called once a second while a batch that is prepared ahead is awaited, with the
            seconds so far; may raise to stop.

    Returns:
        An iterator over `image` uint8 [b, H, W, 3] and `label`, `epoch` and `index` int32 [b]. The
        last two (see `batch_examples`) together identify one augmented example. Errors of threads
        and processes are raised by the iterator. Of sets whose pixels have classes, `label` is
        uint8 [b, H, W], and after a joint crop there is `extent` int32 [b, 2], the rows and columns
        before padding.

        Sets with boxes also have `boxes` float32 [b, max_boxes, 4], x1 y1 x2 y2 in pixels of the
        (resized) image; their `label` is int32 [b, max_boxes], -1 in rows without an object; and
        there are `extent` and `original` int32 [b, 2], the rows and columns before padding and
        those of the image as it is stored.

    Raises:
        ValueError: arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    check_batch(batch_size, len(images.labels), shard)
    size, augmentations = batch_size // shard[1], parse_loader(augment)
    shapes = (tuple(canvases), max_boxes)
    make = Training(images, batch_size, seed, augmentations, repeats, shard, bad_images, *shapes)
    check_augmentations(augmentations, images)
    # Steps, seeds, repeats and options out of range are refused now, not in a worker.
    make.examples(start_step * size, start_step * size + 1)
    black, none = np.zeros((1, *images.size, 3), np.uint8), np.zeros(images.size, np.uint8)
    for one in augmentations:
        if one.entry.joint == "boxes":
            one(images.size, 0)
        elif one.entry.stage == CROP:
            crop_both(black[0], none, one, images.size)
        else:
            one(black, np.zeros(1, np.uint64))
    check_boxes(images, max_boxes)
    check_canvases(images, augment, canvases)
    made = _produced(
        make, size, itertools.count(start_step), ahead=ahead, workers=workers, waiting=waiting
    )
    return Batches(made, len(images.labels))


def evaluation_batches(
    images: Images | Streamed,
    *,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    workers: int = 0,
    bad_images: str = "error",
    canvases: Sequence[Size] = (),
    max_boxes: int = MAX_BOXES,
    waiting: Waiting = lambda seconds: None,
) -> Batches:
    """Every image once, in order, in batches of one shape.

    >>> from rope_jax import data
    >>> images = data.load("digits", split="test")
    >>> batches = list(data.evaluation_batches(images, batch_size=128))
    >>> len(batches), [int(batch["mask"].sum()) for batch in batches]
    (3, [128, 128, 104])

    Args:
        images: the split to evaluate.
        batch_size: examples in the batch of all shards together.
        shard: (k, of): the k-th of `of` equal parts of each batch, b = batch_size / of examples.
            All shards have as many batches.
        workers: see `batches`; without them, threads decode images that are not in memory.
        bad_images: "error", or "skip": their mask is False; too many are an error, see `batches`.
        canvases, max_boxes: see `batches`.
        waiting: see `batches`.

    Returns:
        An iterator over `image` uint8 [b, H, W, 3], `label` int32 [b], or [b, M] for sets with
        several correct labels (padded with -1), or uint8 [b, H, W] for those whose pixels have
        classes; `index` int32 [b], the number of the image; and `mask` bool [b]. The last batch is
        padded with black images of label 0, whose mask is False. Sets with boxes have the fields of
        `batches`.

    Raises:
        ValueError: arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    count = len(images.labels)
    check_batch(batch_size, count, shard)
    ahead = not images.in_memory
    threads = THREADS if ahead and not workers else 0
    check_boxes(images, max_boxes)
    check_canvases(images, "none", canvases)
    shapes = (tuple(canvases), max_boxes)
    make = Evaluation(images, batch_size, shard, bad_images, *shapes, threads)
    steps = range(-(-count // batch_size))
    made = _produced(
        make, batch_size // shard[1], steps, ahead=ahead, workers=workers, waiting=waiting
    )
    return Batches(made, count)


def worker_count(wanted: int | None) -> int:
    """The number of worker processes for training; None for as many as there are cores.

    >>> worker_count(3)
    3

    Without grain (the extra `data`), None is 0.
    """
    if wanted is not None:
        return wanted
    return cores() if importlib.util.find_spec("grain") is not None else 0


def _check_policy(bad_images: str, workers: int) -> None:
    if bad_images not in BAD_IMAGES:
        raise ValueError(
            f"bad_images {bad_images!r} is unknown; it is one of {', '.join(BAD_IMAGES)}"
        )
    if workers < 0:
        raise ValueError(f"workers {workers} must be at least 0")


def _produced(
    make: Training | Evaluation,
    size: int,
    steps: range | itertools.count,
    *,
    ahead: bool,
    workers: int,
    waiting: Waiting,
) -> Iterator[Batch]:
    """Batches of `size` examples, created in this process or by workers."""
    about = f"the images of {make.images.name}, {make.images.split} split"
    if workers > 0 and not make.images.in_memory:
        from rope_jax.data.workers import in_processes

        first, stop = (steps.start, steps.stop) if isinstance(steps, range) else (next(steps), None)
        crew: list[BaseProcess] = []
        made = in_processes(make, size, first, workers=workers, stop=stop, crew=crew)
        return Ahead(made, about, waiting, crew)
    made = (make(step * size, (step + 1) * size) for step in steps)
    return Ahead(made, about, waiting) if ahead else made
