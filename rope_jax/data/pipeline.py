"""Batches for training, a pure function of (seed, step), and batches of one shape for evaluation.

Batches are created in this process, in a thread, or in worker processes.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from rope_jax.data.ahead import Ahead, Waiting
from rope_jax.data.examples import (
    BAD_IMAGES,
    MAX_BOXES,
    THREADS,
    Evaluation,
    Size,
    Training,
    check_canvases,
    loader_of,
    max_skipped,
    too_many,
)
from rope_jax.data.order import check_batch
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.boxes import check_boxes
from rope_jax.data.workers import Batch, in_processes
from rope_jax.names.options import CountOrZero, convert
from rope_jax.system.cores import cores


class Batches(Iterator[Batch], contextlib.AbstractContextManager):
    """An iterator over batches that owns any processes and threads that produce them.

    Attributes:
        skipped: ids of the images that could not be used so far; only with `bad_images="skip"`.
    """

    def __init__(self, stream: Iterator[Batch], images: Images | Streamed):
        self._stream, self._count = stream, len(images.labels)
        self.skipped: set[int] = set()

    def __next__(self) -> Batch:
        batch = next(self._stream)
        self.skipped.update(batch.pop("bad").tolist())
        if len(self.skipped) > max_skipped(self._count):
            self.close()
            raise too_many(self.skipped, self._count)
        return batch

    def close(self) -> None:
        """Ends processes and threads."""
        self._stream.close()

    def __exit__(self, *_: Any) -> None:
        self.close()


class SeveralSizes(Iterator[Batch]):
    """Batches of the same examples at several sizes: `image`, `image_1`, `image_2`, ...

    Args:
        streams: of `batches`, one for each size, which differ in `copy`.
    """

    def __init__(self, streams: Sequence[Batches]):
        self._streams = streams

    def __next__(self) -> Batch:
        first, *others = [next(stream) for stream in self._streams]
        return first | {f"image_{k}": batch["image"] for k, batch in enumerate(others, 1)}

    @property
    def skipped(self) -> set[int]:
        """Ids of images that could not be used."""
        return set().union(*(stream.skipped for stream in self._streams))

    def close(self) -> None:
        """Ends all streams."""
        for stream in self._streams:
            stream.close()


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
    copy: int = 0,
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
        canvases: for sets with boxes whose images differ in size: sizes (height, width). The images
            of a batch are padded to the smallest that holds all of them; none for the set's size.
            In every batch all shards have the same. The images of a batch are all portrait or all
            landscape after the crop, except in at most one batch in 64.
        max_boxes: rows for the objects of an image.
        waiting: called once a second while a batch that is prepared ahead is awaited, with the
            seconds so far; may raise to stop.
        copy: streams that differ in it have the same examples, augmented separately.

    Returns:
        An iterator over `image` uint8 [b, H, W, 3] and `label`, `epoch` and `index` int32 [b]. The
        last two (see `batch_examples`) together identify one augmented example. Errors of threads
        and processes are raised by the iterator. Of sets whose pixels have classes, `label` is
        uint8 [b, H, W], and after a joint crop there is `extent` int32 [b, 2], the rows and columns
        before padding.

        Sets with boxes also have `boxes` float32 [b, max_boxes, 4], x1 y1 x2 y2 in pixels of the
        (resized) image; their `label` is int32 [b, max_boxes], -1 in rows without an object; and
        there are `extent` and `original` int32 [b, 2], the rows and columns before padding and
        those of the stored image. With masks there is `masks` uint8 [b, max_boxes, H, W / 8], the
        pixels of each object, eight to a byte along rows; not in an evaluation.

    Raises:
        ValueError: arguments out of range, at once.
    """
    make = Training(
        images=images,
        batch_size=batch_size,
        seed=seed,
        augmentations=loader_of(augment, images),
        repeats=repeats,
        shard=shard,
        bad_images=bad_images,
        canvases=tuple(canvases),
        max_boxes=max_boxes,
        copy=copy,
    )
    _check(make, augment)
    make.in_order(start_step)  # a step, seed or repeats out of range is refused now
    return _produce(make, range(start_step, sys.maxsize), ahead, workers, waiting)


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
            All shards have the same number of batches.
        workers: see `batches`; without them, threads decode images that are not in memory.
        bad_images: "error", or "skip" to set their mask to False; too many are an error, see
            `batches`.
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
    ahead = not images.in_memory
    make = Evaluation(
        images=images,
        batch_size=batch_size,
        shard=shard,
        bad_images=bad_images,
        canvases=tuple(canvases),
        max_boxes=max_boxes,
        threads=THREADS if ahead and not workers else 0,
    )
    _check(make, "none")
    return _produce(make, range(-(-len(images.labels) // batch_size)), ahead, workers, waiting)


def worker_count(requested: int | None) -> int:
    """The number of worker processes for training; None requests one per core.

    >>> worker_count(3)
    3

    Without grain (the extra `data`), None is 0.
    """
    if requested is not None:
        return requested
    return cores() if importlib.util.find_spec("grain") is not None else 0


def _check(make: Training | Evaluation, augment: str) -> None:
    convert(make.bad_images, Literal[*BAD_IMAGES], "bad_images")
    check_batch(make.batch_size, len(make.images.labels), make.shard)
    check_boxes(make.images, make.max_boxes)
    check_canvases(make.images, augment, make.canvases)


def _produce(
    make: Training | Evaluation, steps: range, ahead: bool, workers: int, waiting: Waiting
) -> Batches:
    """Produces the batches of some steps, in this process or by workers."""
    convert(workers, CountOrZero, "workers")
    images, size = make.images, make.batch_size // make.shard[1]
    source_name = f"the images of {images.name}, {images.split} split"
    if workers and not images.in_memory:
        crew: list[BaseProcess] = []
        stream = in_processes(make, size, steps, workers, crew)
        return Batches(Ahead(stream, source_name, waiting, crew), images)
    stream = (make(step, 0, size) for step in steps)
    return Batches(Ahead(stream, source_name, waiting) if ahead else stream, images)
