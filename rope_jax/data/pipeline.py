"""Batches for training, a pure function of (seed, step), and batches of one shape for evaluation.

Batches are created in this process, in a thread, or in worker processes.
"""

import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from jaxtyping import UInt64

from rope_jax.data.ahead import Ahead, Waiting
from rope_jax.data.checking import FileCheck
from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import CROP, LOADER, Augmentation, parse_loader
from rope_jax.data.images.joint import crop_both, padded
from rope_jax.data.order import batch_examples, check_batch
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.index import BadImages
from rope_jax.data.workers import Batch

BAD_IMAGES = ("error", "skip")
_BAD_SHARE = 1000  # one image in 1,000 may be skipped
Drawn = tuple[Augmentation, UInt64[np.ndarray, " b"]]  # with the draws of some examples
_THREADS = 8  # decode images for an evaluation


@dataclass(frozen=True)
class Training:
    """Creates examples of the training stream, a pure function of its fields and the position.

    Attributes:
        images: the training split.
        batch_size: examples in the batch of all shards together.
        seed: 0 to 2**64 - 1.
        augmentations: of the loader.
        repeats: see `epoch_length`.
        shard: (k, of): the k-th of `of` equal parts of the batch.
        bad_images: "error" or "skip".
    """

    images: Images | Streamed
    batch_size: int
    seed: int
    augmentations: tuple[Augmentation, ...]
    repeats: int = 1
    shard: tuple[int, int] = (0, 1)
    bad_images: str = "error"

    def __call__(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop` of this shard's stream: see `batches`, and `bad` ids."""
        epochs, indices = self.examples(start, stop)
        count = len(self.images.labels)
        drawn = [
            (one, example_draws(self.seed, epochs, indices, count * self.repeats, stream))
            for stream, one in named_streams(self.augmentations)
        ]
        crop, crop_draws = None, np.zeros(len(indices), np.uint64)
        if drawn and drawn[0][0].entry.stage == CROP:
            crop, crop_draws = drawn.pop(0)
        ids, bad = indices % count, []
        rows: list[Batch] = []
        for k, draw in enumerate(crop_draws.tolist()):
            while True:
                try:
                    rows.append(self.images.example(int(ids[k]), crop, draw))
                    break
                except BadImages:
                    if self.bad_images == "error" or len(bad) > _allowed(count):
                        raise
                    bad.append(int(ids[k]))
                    ids[k] = (ids[k] + 1) % count
        if crop is not None and crop.entry.joint:  # of sizes of their own
            parts = [self._padded(row, drawn, k) for k, row in enumerate(rows)]
            batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        else:
            batch = self._changed(_stacked(rows), drawn)
        return batch | {
            "epoch": epochs.astype(np.int32),
            "index": indices.astype(np.int32),
            "bad": np.array(bad, np.int64),
        }

    def _changed(self, batch: Batch, drawn: Sequence[Drawn]) -> Batch:
        """A batch after the augmentations that keep the size of images."""
        for augmentation, draws in drawn:
            batch["image"] = augmentation(batch["image"], draws)
            if self.images.pixelwise:
                labels = augmentation.moved_labels(augmentation, batch["label"], draws)
                batch["label"] = labels
        return batch

    def _padded(self, row: Batch, drawn: Sequence[Drawn], k: int) -> Batch:
        """Example k as a batch of its own, augmented and then padded; with its `extent`."""
        drawn = [(augmentation, draws[k : k + 1]) for augmentation, draws in drawn]
        batch = self._changed(_stacked([row]), drawn)
        extent = np.array([batch["label"].shape[1:]], np.int32)
        image, label = padded(batch["image"], batch["label"], self.images.size)
        return {"image": image, "label": label, "extent": extent}

    def examples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices of examples of this shard's stream, see `batch_examples`."""
        size = self.batch_size // self.shard[1]
        first = start // size
        parts = [
            batch_examples(
                step,
                batch_size=self.batch_size,
                seed=self.seed,
                count=len(self.images.labels),
                repeats=self.repeats,
                shard=self.shard,
            )
            for step in range(first, -(-stop // size))
        ]
        wanted = slice(start - first * size, stop - first * size)
        epochs, indices = (np.concatenate(x)[wanted] for x in zip(*parts, strict=True))
        return epochs, indices


def named_streams(
    augmentations: tuple[Augmentation, ...],
) -> Iterator[tuple[str, Augmentation]]:
    """The loader's augmentations with the streams of their draws (`rope_jax.data.draws`)."""
    for number, one in enumerate(augmentations):
        yield f"{number} {one.name}", one


def check_augmentations(augmentations: Sequence[Augmentation], images: Images | Streamed) -> None:
    """Raises ValueError for augmentations of the loader that do not suit the labels of a set."""
    for one in augmentations:
        if one.entry.joint and not images.pixelwise:
            raise ValueError(
                f"{one.name} is for images whose pixels have classes, but {images.name} has a "
                "class for each image: use resized_crop"
            )
        if images.pixelwise and one.entry.stage == LOADER:
            one.check_moves()


def check_labels(images: Images | Streamed, bad_images: str = "error") -> None:
    """Reads all labels of pixels that are files.

    Args:
        images: of any kind.
        bad_images: "error" or "skip", see `batches`.

    Raises:
        ValueError: labels cannot be used, or too many of them; the message names a file.
    """
    errors = [] if images.in_memory else images.source.label_errors()
    if len(errors) > (_allowed(len(images.labels)) if bad_images == "skip" else 0):
        more = f" ({len(errors)} of {len(images.labels)} images have such)" if errors[1:] else ""
        raise ValueError(f"{errors[0]}{more}")


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _allowed(count: int) -> int:
    """The number of images of a set that may be skipped; never all of them."""
    return min(-(-count // _BAD_SHARE), count - 1)


@dataclass(frozen=True)
class Evaluation:
    """Creates the examples of an evaluation: every image once, in order, without augmentation.

    Attributes:
        images: the split to evaluate.
        batch_size: examples in the batch of all shards together.
        shard: (k, of): the k-th of `of` equal parts of each batch.
        bad_images: "error", or "skip": their mask is False.
        threads: number of threads that read images; 0 for the caller's only.
    """

    images: Images | Streamed
    batch_size: int
    shard: tuple[int, int] = (0, 1)
    bad_images: str = "error"
    threads: int = 0

    def __call__(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop` of this shard: see `evaluation_batches`, and `bad` ids."""
        images, (part, parts) = self.images, self.shard
        size = self.batch_size // parts
        numbers = np.arange(start, stop)
        ids = numbers // size * self.batch_size + part * size + numbers % size
        exists = ids < len(images.labels)
        mask = exists.copy()
        label = np.zeros(images.size, np.uint8) if images.pixelwise else images.labels[0] * 0
        rows = [{"image": np.zeros((*images.size, 3), np.uint8), "label": label}] * len(ids)

        def read(k: int) -> None:
            try:
                rows[k] = images.example(int(ids[k]))
            except BadImages:
                if self.bad_images == "error":
                    raise
                mask[k] = False

        wanted = np.flatnonzero(exists).tolist()
        if self.threads:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(read, wanted))
        else:
            list(map(read, wanted))
        return _stacked(rows) | {"mask": mask, "bad": ids[exists & ~mask]}


class Batches(Iterator[Batch]):
    """An iterator over batches that owns any processes and threads that produce them.

    Attributes:
        skipped: ids of the images that could not be used so far; only with `bad_images="skip"`.
    """

    def __init__(
        self, make: Iterator[Batch], images: Images | Streamed, epoch: int, waiting: Waiting
    ):
        """Batches of a set; within the first `epoch` of them its files are checked."""
        self._make, self._count, self._left = make, len(images.labels), epoch
        self._check = FileCheck(images, waiting)
        self.skipped: set[int] = set()

    def __next__(self) -> Batch:
        try:
            batch = next(self._make)
        except StopIteration:
            self._check(wait=True)
            raise
        self._left -= 1
        if self._left >= 0:
            self._check(wait=self._left == 0)
        self.skipped.update(batch.pop("bad").tolist())
        if len(self.skipped) > _allowed(self._count):
            self.close()
            some = ", ".join(map(str, sorted(self.skipped)[:8]))
            raise BadImages(
                f"{len(self.skipped)} of {self._count} images cannot be used, more than "
                f"{_allowed(self._count)} (one in {_BAD_SHARE}): {some}, ...; "
                "python -m rope_jax.data.verify lists them with the reasons"
            )
        return batch

    def close(self) -> None:
        """Ends processes and threads."""
        self._check.close()
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
        waiting: called once a second while a batch that is prepared ahead is awaited, with the
            seconds so far; may raise to stop.

    Returns:
        An iterator over `image` uint8 [b, H, W, 3] and `label`, `epoch` and `index` int32 [b]. The
        last two (see `batch_examples`) together identify one augmented example. Errors of threads
        and processes are raised by the iterator. Of sets whose pixels have classes, `label` is
        uint8 [b, H, W], and after a joint crop there is `extent` int32 [b, 2], the rows and columns
        before padding.

    Raises:
        ValueError: arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    check_batch(batch_size, len(images.labels), shard)
    size, augmentations = batch_size // shard[1], parse_loader(augment)
    make = Training(images, batch_size, seed, augmentations, repeats, shard, bad_images)
    # Steps, seeds, repeats and options out of range are refused now, not in a worker.
    make.examples(start_step * size, start_step * size + 1)
    check_augmentations(augmentations, images)
    blank, none = np.zeros((1, *images.size, 3), np.uint8), np.zeros(images.size, np.uint8)
    for one in augmentations:
        if one.entry.stage == CROP:
            crop_both(blank[0], none, one, images.size)
        else:
            one(blank, np.zeros(1, np.uint64))
    made = _produced(
        make, size, itertools.count(start_step), ahead=ahead, workers=workers, waiting=waiting
    )
    return Batches(made, images, -(-len(images.labels) // batch_size), waiting)


def evaluation_batches(
    images: Images | Streamed,
    *,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    workers: int = 0,
    bad_images: str = "error",
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
        waiting: see `batches`.

    Returns:
        An iterator over `image` uint8 [b, H, W, 3], `label` int32 [b], or [b, M] for sets with
        several correct labels (padded with -1), or uint8 [b, H, W] for those whose pixels have
        classes; and `mask` bool [b]. The last batch is padded with
        black images of label 0, whose mask is False.

    Raises:
        ValueError: arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    count = len(images.labels)
    check_batch(batch_size, count, shard)
    ahead = not images.in_memory
    threads = _THREADS if ahead and not workers else 0
    make = Evaluation(images, batch_size, shard, bad_images, threads)
    steps = range(-(-count // batch_size))
    made = _produced(
        make, batch_size // shard[1], steps, ahead=ahead, workers=workers, waiting=waiting
    )
    return Batches(made, images, len(steps), waiting)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
