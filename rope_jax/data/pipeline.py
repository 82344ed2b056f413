"""Training batches as a pure function of (seed, step), and batches of one shape for evaluation; in this process, a thread, or others."""

import atexit
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from rope_jax.data.augment import Augmentation, ExampleDraws, apply, as_frame, parse, parse_frame, stream
from rope_jax.data.augment import augment as apply_augmentations
from rope_jax.data.decode import open_image
from rope_jax.data.frames import FRAMES, Frame, cut_file, cut_pixels
from rope_jax.data.order import places, position
from rope_jax.data.sources import Images, Streamed

Batch = dict[str, np.ndarray]

BAD_IMAGES = ("error", "skip")
_BAD_SHARE = 1000  # one image in so many may be skipped


class BadImages(ValueError):
    """An image cannot be used, or too many of those that were skipped cannot."""


@dataclass(frozen=True)
class Training:
    """Makes the examples of the training stream: a pure function of its fields and the position. Small when pickled.

    Attributes:
        images: the training split.
        batch_size, seed, repeats, shard: as in `places`.
        augmentations: see `rope_jax.data.augment`.
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
        """The examples of this shard from number `start` to `stop` of its stream, as `batch` returns them, and `bad`."""
        size = self.batch_size // self.shard[1]
        steps = range(start // size, -(-stop // size))
        parts = [
            places(
                step,
                batch_size=self.batch_size,
                seed=self.seed,
                count=len(self.images.labels),
                repeats=self.repeats,
                shard=self.shard,
            )
            for step in steps
        ]
        wanted = slice(start - steps[0] * size, stop - steps[0] * size)
        epochs, indices = (np.concatenate(x)[wanted] for x in zip(*parts, strict=True))
        make = _of_memory if isinstance(self.images, Images) else _of_stream
        made = make(self, epochs, indices)
        return made | {"epoch": epochs.astype(np.int32), "index": indices.astype(np.int32)}


def _of_memory(training: Training, epochs: np.ndarray, indices: np.ndarray) -> Batch:
    images, count = training.images, len(training.images.labels)
    pixels = np.empty((len(indices), *images.images.shape[1:]), np.uint8)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        pixels[here] = apply_augmentations(
            images.images[indices[here] % count],
            indices[here],
            training.augmentations,
            seed=training.seed,
            epoch=epoch,
            count=count * training.repeats,
        )
    return {"image": pixels, "label": images.labels[indices % count], "bad": np.empty(0, np.int64)}


def _of_stream(training: Training, epochs: np.ndarray, indices: np.ndarray) -> Batch:
    images, count, augmentations = training.images, len(training.images.labels), training.augmentations
    draws = ExampleDraws(training.seed)
    draw = lambda place, epoch, index: draws(int(epoch), int(index), stream(place, augmentations[place]))
    framed = bool(augmentations) and augmentations[0].name in FRAMES
    frame = as_frame(augmentations[0]) if framed else parse_frame(images.frame)
    pixels, labels, bad = np.empty((len(indices), *images.size, 3), np.uint8), np.empty(len(indices), np.int32), []
    for k, (epoch, index) in enumerate(zip(epochs, indices, strict=True)):
        example = int(index) % count
        while True:
            try:
                pixels[k] = read_image(images, example, frame, draw(0, epoch, index) if framed else 0)
                break
            except BadImages:
                if training.bad_images == "error" or len(bad) > _allowed(count):
                    raise
                bad.append(example)
                example = (example + 1) % count
        labels[k] = images.labels[example]
    for place, augmentation in enumerate(augmentations):
        if not (place == 0 and framed):
            drawn = np.array([draw(place, *one) for one in zip(epochs, indices, strict=True)], np.uint64)
            pixels = apply(augmentation, pixels, drawn)
    return {"image": pixels, "label": labels, "bad": np.array(bad, np.int64)}


def read_image(images: Streamed, example: int, frame: Frame, draw: int = 0) -> UInt8[np.ndarray, "H W 3"]:
    """Reads one image and brings it to the set's size.

    Args:
        images: the set.
        example: its number.
        frame: how.
        draw: 64 random bits for the frame.

    Returns:
        uint8 [H, W, 3].

    Raises:
        BadImages: where it cannot be read or decoded; the message names it.
        MemoryError: where there is too little memory to decode it.
    """
    try:
        data = images.source.read(example)
        if isinstance(data, bytes):
            return cut_file(open_image(data), frame, images.size, draw)
        return cut_pixels(data, frame, images.size, draw)
    except (ValueError, OSError) as error:
        if isinstance(error.__cause__, MemoryError):  # no fault of the image, and nothing to skip it for
            raise error.__cause__ from None
        raise BadImages(f"image {example} of {images.name} ({images.source.example_name(example)}) cannot be used: {error}") from error


def _allowed(count: int) -> int:
    """How many images of a set may be skipped; never all of them."""
    return min(-(-count // _BAD_SHARE), count - 1)


@dataclass(frozen=True)
class Evaluation:
    """Makes the examples of an evaluation: every image once, in order, as it is. Small when pickled.

    Attributes:
        images: the split to evaluate.
        batch_size: examples in the batch of all shards together.
        shard: (k, of): the k-th of `of` equal parts of each batch.
        bad_images: "error", or "skip": their mask is False.
    """

    images: Streamed
    batch_size: int
    shard: tuple[int, int] = (0, 1)
    bad_images: str = "error"

    def __call__(self, start: int, stop: int) -> Batch:
        """The examples of this shard from number `start` to `stop` of its stream, as `evaluation_batches` returns them, and `bad`."""
        images, frame, (part, parts) = self.images, parse_frame(self.images.frame), self.shard
        size = self.batch_size // parts
        pixels = np.zeros((stop - start, *images.size, 3), np.uint8)
        labels, mask, bad = np.zeros(stop - start, np.int32), np.zeros(stop - start, np.bool_), []
        for k, number in enumerate(range(start, stop)):
            example = number // size * self.batch_size + part * size + number % size
            if example >= len(images.labels):  # filled up
                continue
            try:
                pixels[k], labels[k], mask[k] = read_image(images, example, frame), images.labels[example], True
            except BadImages:
                if self.bad_images == "error":
                    raise
                bad.append(example)
        return {"image": pixels, "label": labels, "mask": mask, "bad": np.array(bad, np.int64)}


class Batches(Iterator[Batch]):
    """An iterator over batches that may hold processes and a thread; `close`, or the end of it, ends them.

    Attributes:
        skipped: numbers of the images that could not be used since the start, each once; only with `bad_images="skip"`.
    """

    def __init__(self, make: Iterator[Batch], count: int):
        self._make, self._count = make, count
        self.skipped: set[int] = set()

    def __next__(self) -> Batch:
        batch = next(self._make)
        self.skipped.update(batch.pop("bad").tolist())
        if len(self.skipped) > _allowed(self._count):
            self.close()
            raise BadImages(
                f"{len(self.skipped)} of {self._count} images cannot be used, more than {_allowed(self._count)} (one in {_BAD_SHARE}): "
                f"{', '.join(map(str, sorted(self.skipped)[:8]))}, ...; python -m rope_jax.data.verify lists them with the reasons"
            )
        return batch

    def close(self) -> None:
        """Ends what works in the background."""
        close = getattr(self._make, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def batch(
    images: Images | Streamed,
    step: int,
    *,
    batch_size: int,
    seed: int,
    augment: str = "none",
    repeats: int = 1,
    shard: tuple[int, int] = (0, 1),
) -> Batch:
    """The training batch of one step.

    Args:
        images: the training split.
        step: from 0.
        batch_size: examples in the batch of all shards together; may exceed the number of images.
        seed: 0 to 2**64 - 1.
        augment: see `rope_jax.data.augment.parse`.
        repeats: see `epoch_length`.
        shard: (k, of): the k-th of `of` equal parts of the batch.

    Returns:
        `image` uint8 [b, H, W, 3], `label`, `epoch` and `index` int32 [b], b = batch_size / of. See `places` for the last two, which
        together name an example as often as it is augmented anew.

    Raises:
        ValueError: for arguments out of range, and BadImages, which is one.
    """
    places(step, batch_size=batch_size, seed=seed, count=len(images.labels), repeats=repeats, shard=shard)
    size = batch_size // shard[1]
    made = Training(images, batch_size, seed, parse(augment), repeats, shard)(step * size, (step + 1) * size)
    return {name: made[name] for name in made if name != "bad"}


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
) -> Batches:
    """The training batches from `start_step` on, without end.

    Args:
        images: the training split.
        batch_size: as in `batch`, like `seed`, `augment`, `repeats` and `shard`.
        seed: see there.
        start_step: the first step, 0 or where a run resumes.
        augment: see there.
        repeats: see there.
        shard: see there.
        ahead: prepare the next batch in a thread while one is in use. Worth it where a batch takes longer than a thread switch (0.1 ms).
        workers: processes that read, decode and augment images of a `Streamed` set (needs grain, the extra `data`); with them the next
            batch is always prepared ahead. Sets in memory are served by this process. The stream is the same at any number.
        bad_images: "error": an image that cannot be decoded ends the stream. "skip": the next one of the set that can takes its place,
            with its own label; `skipped` of the iterator counts them, and more than one in a thousand (rounded up) end the stream.

    Returns:
        an iterator of what `batch` returns. Errors of threads and processes are raised here; they end with the iterator.

    Raises:
        ValueError: for arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    count = len(images.labels)
    # Arguments are refused here rather than at the first use of the iterator.
    places(start_step, batch_size=batch_size, seed=seed, count=count, repeats=repeats, shard=shard)
    augmentations = parse(augment)
    apply_augmentations(np.zeros((1, *images.size, 3), np.uint8), np.zeros(1, np.int64), augmentations, seed=seed, epoch=0, count=1)
    make = Training(images, batch_size, seed, augmentations, repeats, shard, bad_images)
    return Batches(_produced(make, batch_size // shard[1], start_step, ahead=ahead, workers=workers), count)


def _produced(make: Callable[[int, int], Batch], size: int, step: int, *, ahead: bool, workers: int, stop: int | None = None) -> Iterator:
    """Batches of `size` from a step on, until number `stop` where there is one, made in the process or in others."""
    if workers > 0 and isinstance(make.images, Streamed):
        from rope_jax.data.workers import in_processes

        return _Ahead(in_processes(make, size, step, workers=workers, stop=stop))
    steps = itertools.count(step) if stop is None else range(step, -(-stop // size))
    made = (make(step * size, (step + 1) * size) for step in steps)
    return _Ahead(made) if ahead else made


class _Ahead(Iterator[Batch]):
    """Takes the next batch from an iterator in a thread while one is in use."""

    def __init__(self, made: Iterator[Batch]):
        self._made = made
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rope_jax.data")
        self._coming = self._thread.submit(next, made, None)
        self._at_exit = functools.partial(_close, weakref.ref(self))  # while the interpreter is still whole
        atexit.register(self._at_exit)

    def __next__(self) -> Batch:
        if self._thread is None:
            raise StopIteration
        try:
            ready = self._coming.result()
        except BaseException:
            self.close()
            raise
        if ready is None:
            self.close()
            raise StopIteration
        self._coming = self._thread.submit(next, self._made, None)
        return ready

    def close(self) -> None:
        """Waits for the batch under way and ends the thread and what it takes from."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.shutdown(cancel_futures=True)
            self._made.close()
            atexit.unregister(self._at_exit)
            del self._coming

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()


def _close(reference: weakref.ref) -> None:
    if (iterator := reference()) is not None:
        iterator.close()


def evaluation_batches(
    images: Images | Streamed, *, batch_size: int, shard: tuple[int, int] = (0, 1), workers: int = 0, bad_images: str = "error"
) -> Iterator[Batch]:
    """Every example once, in order, in batches of one shape; the last one is filled up with black images of label 0.

    Args:
        images: the split to evaluate.
        batch_size: examples in the batch of all shards together.
        shard: (k, of): the k-th of `of` equal parts of each batch, b = batch_size / of examples. All shards have as many batches.
        workers: see `batches`.
        bad_images: "error", or "skip": they are black and masked like what is filled up; too many are an error, see `batches`.

    Returns:
        an iterator of `image` uint8 [b, H, W, 3], `label` int32 [b] and `mask` bool [b], False where filled up.

    Raises:
        ValueError: for arguments out of range, at once.
    """
    _check_policy(bad_images, workers)
    count = len(images.labels)
    position(0, batch_size, count, shard)  # refuses what is out of range
    if isinstance(images, Images):
        return (_evaluation_batch(images, start, batch_size, shard) for start in range(0, count, batch_size))
    size, steps = batch_size // shard[1], -(-count // batch_size)
    made = _produced(Evaluation(images, batch_size, shard, bad_images), size, 0, ahead=True, workers=workers, stop=steps * size)
    return Batches(made, count)


def _check_policy(bad_images: str, workers: int) -> None:
    if bad_images not in BAD_IMAGES:
        raise ValueError(f"bad_images {bad_images!r} is unknown; it is one of {', '.join(BAD_IMAGES)}")
    if workers < 0:
        raise ValueError(f"workers {workers} must be at least 0")


def _evaluation_batch(images: Images, start: int, batch_size: int, shard: tuple[int, int]) -> Batch:
    part, parts = shard
    size = batch_size // parts
    rows = slice(start + part * size, start + (part + 1) * size)
    image, label = images.images[rows], images.labels[rows]
    missing = size - len(label)
    return {
        "image": np.pad(image, ((0, missing), (0, 0), (0, 0), (0, 0))),
        "label": np.pad(label, (0, missing)),
        "mask": np.arange(size) < len(label),
    }
