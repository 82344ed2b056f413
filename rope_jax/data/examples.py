"""The examples of the training stream and of an evaluation, as pure functions of their position."""

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from rope_jax.data.draws import epoch_draws, example_draws
from rope_jax.data.images.augment import (
    AUGMENTATIONS,
    CROP,
    STEP,
    Augmentation,
    parse_crop,
    parse_loader,
)
from rope_jax.data.images.fits import Size, smallest_canvas
from rope_jax.data.images.joint import crop_both
from rope_jax.data.order import batch_examples
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.index import BadImages, BadSet
from rope_jax.data.workers import Batch
from rope_jax.names.text import other_command
from rope_jax.system.files import warn

BAD_IMAGES = ("error", "skip")
MAX_BOXES = 100  # of an image, by default
_SKIP_ONE_IN = 1000  # one image in 1,000 may be skipped
_TOGETHER = 64  # consecutive batches among which portrait and landscape images are divided
EPOCHS_OF_A_COPY = 1 << 20  # copies of an example have draws of other epochs
Ids = tuple[Int64[np.ndarray, "*b"], Int64[np.ndarray, "*b"]]  # epochs and indices of examples
Drawn = tuple[Augmentation | None, UInt64[np.ndarray, " b"]]  # with the draws of some examples
THREADS = 8  # decode images for an evaluation


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Common parts of `Training` and `Evaluation`, which are called with (step, start, stop).

    Each has `batch_extents(step)`, the rows and columns of the images of a batch, of all shards.

    Attributes:
        images: the split.
        batch_size: examples in the batch of all shards together.
        shard: (k, of): the k-th of `of` equal parts of the batch.
        bad_images: "error" or "skip", see `batches` and `evaluation_batches`.
        canvases, max_boxes: of sets with boxes, see `batches`.
    """

    images: Images | Streamed
    batch_size: int
    shard: tuple[int, int] = (0, 1)
    bad_images: str = "error"
    canvases: tuple[Size, ...] = ()
    max_boxes: int = MAX_BOXES

    def canvas(self, step: int) -> Size:
        """The size of the images of a batch, the same for all shards; no image is read."""
        if self.images.one_size:
            return self.images.size
        return smallest_canvas(self.batch_extents(step), canvases_of(self.images, self.canvases))


@dataclass(frozen=True, kw_only=True)
class Training(Examples):
    """Creates examples of the training stream, a pure function of its fields and the position.

    Attributes:
        seed: 0 to 2**64 - 1.
        augmentations: of the loader.
        repeats: see `epoch_length`.
        copy: see `batches`.
    """

    seed: int
    augmentations: tuple[Augmentation, ...]
    repeats: int = 1
    copy: int = 0

    def __call__(self, step: int, start: int, stop: int) -> Batch:
        """Examples `start` to `stop` of this shard's part of a batch: see `batches`, and `bad`."""
        images, count = self.images, len(self.images.labels)
        epochs, indices = (x[start:stop] for x in self.part(step))
        (crop, crop_draws), *others = self._crop_first(epochs, indices)
        canvas = self.canvas(step)
        bad: list[int] = []
        examples = zip((indices % count).tolist(), crop_draws.tolist(), strict=True)
        rows = [self._read_usable(example, crop, draw, canvas, bad) for example, draw in examples]
        if images.labels_kind.ragged or (crop and "images" not in crop.entry.labels):
            parts = []  # sizes or numbers of labels differ
            for k, row in enumerate(rows):
                row_draws = [(augmentation, draws[k : k + 1]) for augmentation, draws in others]
                part = self._augment(_stack([row]), row_draws)
                parts.append(_pad(part, images, canvas, self.max_boxes))
            batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        else:
            batch = self._augment(_stack(rows), others)
        return batch | {
            "epoch": epochs.astype(np.int32),
            "index": indices.astype(np.int32),
            "bad": np.array(bad, np.int64),
        }

    def ids(self, step: int) -> Ids:
        """Epochs and indices of the batch of a step, of all shards: see `batch_examples`.

        Where images differ in size, those of a batch are all portrait or all landscape after the
        crop, except in one batch of each block of 64. This keeps canvases small. The images of a
        block are sorted, landscape before portrait and in the order of the stream, and its batches
        are then shuffled. detectron2 groups the images of each GPU, by their size before the crop.
        """
        if self.images.one_size:
            return self.in_order(step)
        size = max(1, min(_TOGETHER, len(self.images.labels) // self.batch_size))
        epochs, indices = self._block(step // size, size)
        return epochs[step % size], indices[step % size]

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _block(self, block: int, size: int) -> Ids:
        """Epochs and indices of `size` batches of images that differ in size, [size, B] each."""
        steps = range(block * size, (block + 1) * size)
        epochs, indices = map(np.concatenate, zip(*map(self.in_order, steps), strict=True))
        rows, columns = self.extents(epochs, indices).T
        order = np.argsort(rows > columns, kind="stable").reshape(size, -1)
        draws = epoch_draws(self.seed, block, size, "batches")
        order = order[np.argsort(draws, kind="stable")]
        return epochs[order], indices[order]

    def part(self, step: int) -> Ids:
        """This shard's part of `ids`."""
        epochs, indices = self.ids(step)
        size = self.batch_size // self.shard[1]
        shard = slice(self.shard[0] * size, (self.shard[0] + 1) * size)
        return epochs[shard], indices[shard]

    def in_order(self, step: int) -> Ids:
        """`batch_examples` of this stream."""
        return batch_examples(
            step,
            batch_size=self.batch_size,
            seed=self.seed,
            count=len(self.images.labels),
            repeats=self.repeats,
        )

    def batch_extents(self, step: int) -> Int64[np.ndarray, "B 2"]:
        return self.extents(*self.ids(step))

    def extents(self, epochs: np.ndarray, indices: np.ndarray) -> Int64[np.ndarray, "b 2"]:
        """Rows and columns of examples after the crop; no image is read."""
        (crop, draws), *_ = self._crop_first(epochs, indices)
        return self.images.extents(indices % len(self.images.labels), crop, draws)

    def draws(self, epochs: np.ndarray, indices: np.ndarray) -> list[Drawn]:
        """The augmentations with their draws for some examples (`rope_jax.data.draws`)."""
        total = len(self.images.labels) * self.repeats
        epochs = epochs + self.copy * EPOCHS_OF_A_COPY
        return [
            (
                augmentation,
                example_draws(self.seed, epochs, indices, total, f"{number} {augmentation.name}"),
            )
            for number, augmentation in enumerate(self.augmentations)
        ]

    def _crop_first(self, epochs: np.ndarray, indices: np.ndarray) -> list[Drawn]:
        """`draws`, of which the first is the crop, or None in its place."""
        drawn = self.draws(epochs, indices)
        if drawn and drawn[0][0].entry.stage == CROP:
            return drawn
        return [(None, np.zeros(len(indices), np.uint64)), *drawn]

    def _read_usable(
        self, example: int, crop: Augmentation | None, draw: int, canvas: Size, bad: list[int]
    ) -> Batch:
        """Reads an example, or the next usable one that fits the canvas; adds others to `bad`."""
        images, count, tried = self.images, len(self.images.labels), set()
        while True:
            try:
                return images.example(example, crop, draw)
            except BadImages:
                if self.bad_images == "error" or example in tried:  # no other fits the canvas
                    raise
            tried.add(example)
            bad.append(example)
            if len(set(bad)) > max_skipped(count):  # a batch may hold an image twice
                raise too_many(bad, count)
            fits = False
            while not fits:
                example = (example + 1) % count
                arguments = (np.array([example]), crop, np.array([draw], np.uint64))
                fits = images.one_size or (images.extents(*arguments) <= canvas).all()

    def _augment(self, batch: Batch, drawn: Sequence[Drawn]) -> Batch:
        """Applies the augmentations that keep the size of images to a batch."""
        for augmentation, draws in drawn:
            labels = self.images.labels_kind.move(batch, augmentation, draws)
            batch = batch | {"image": augmentation(batch["image"], draws)} | labels
        return batch


def batch_ids(
    images: Images | Streamed,
    step: int,
    *,
    batch_size: int,
    seed: int,
    augment: str = "none",
    repeats: int = 1,
) -> list[int]:
    """Ids of the images in the training batch of a step, from 0; arguments as in `batches`."""
    make = Training(
        images=images,
        batch_size=batch_size,
        seed=seed,
        augmentations=parse_loader(augment),
        repeats=repeats,
    )
    _, indices = make.ids(step)
    return (indices % len(images.labels)).tolist()


def loader_of(
    augment: str, images: Images | Streamed, size: Size | None = None
) -> tuple[Augmentation, ...]:
    """Parses the augmentations of a loader, and tries each on a black image of a size.

    Raises:
        ValueError: one does not support the labels of the set, or options contradict each other.
    """
    augmentations = parse_loader(augment)
    size = size or images.size
    black, none = np.zeros((*size, 3), np.uint8), np.zeros(size, np.uint8)
    kind = images.labels_kind
    for augmentation in augmentations:
        if kind.labels_of not in augmentation.entry.labels:
            supported = ", ".join(
                name
                for name, other in AUGMENTATIONS.items()
                if kind.labels_of in other.labels and other.stage < STEP
            )
            raise ValueError(
                f"{augmentation.name} changes images, but not the labels of their "
                f"{kind.labels_of}: leave it out; {supported} change both"
            )
        if augmentation.entry.stage != CROP:
            augmentation(black[None], np.zeros(1, np.uint64))
        elif kind.ragged:
            augmentation(size, 0)
        else:
            crop_both(black, none, augmentation, size)
    return augmentations


def canvases_of(images: Images | Streamed, canvases: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that the images of a batch may have.

    Args:
        images: of any kind.
        canvases: for sets whose images differ in size; none for the size of the set.
    """
    return (images.size,) if images.one_size or not canvases else tuple(canvases)


def check_canvases(images: Images | Streamed, augment: str, canvases: Sequence[Size]) -> None:
    """Rejects canvases that some batch would not fit.

    Args:
        images: of any kind.
        augment: of the loader, see `batches`; "none" for evaluation.
        canvases: see `batches`.

    Raises:
        ValueError: none of them holds both a portrait and a landscape image of the largest size.
    """
    crops = [crop for crop in parse_loader(augment) if crop.entry.stage == CROP]
    if not crops and not images.one_size:
        crops = [parse_crop(images.crop)]
    for crop in crops:
        if images.labels_kind.ragged and images.labels_of in crop.entry.labels:
            longest = min(filter(None, map(crop.option, ("long", "window"))))
            smallest_canvas(np.array([[longest, longest]]), canvases_of(images, canvases))


def check_labels(images: Images | Streamed, bad_images: str = "error") -> None:
    """Reads all labels of pixels that are files, and prints `Source.remarks` as warnings.

    Args:
        images: of any kind.
        bad_images: "error" or "skip", see `batches`.

    Raises:
        ValueError: labels cannot be used, or too many of them; the message names a file.
    """
    for remark in () if images.in_memory else images.source.remarks():
        warn(f"WARNING: {remark}")
    errors = [] if images.in_memory else images.source.label_errors()
    if len(errors) > (max_skipped(len(images.labels)) if bad_images == "skip" else 0):
        more = f" ({len(errors)} of {len(images.labels)} images are affected)" if errors[1:] else ""
        raise ValueError(f"{errors[0]}{more}")


def _pad(row: Batch, images: Images | Streamed, canvas: Size, max_boxes: int) -> Batch:
    """Pads a batch of one example to a size, and adds the `extent` that it had before."""
    height, width = row["image"].shape[1:3]
    image = np.zeros((1, *canvas, 3), np.uint8)
    image[:, :height, :width] = row["image"]
    padded = {"image": image, "extent": np.array([[height, width]], np.int32)}
    return row | padded | images.labels_kind.pad(row, canvas, max_boxes)


def _stack(rows: Sequence[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def max_skipped(count: int) -> int:
    """The number of images of a set that may be skipped; never all of them."""
    return min(-(-count // _SKIP_ONE_IN), count - 1)


def too_many(skipped: Iterable[int], count: int) -> BadSet:
    """The error for skipped images, by number, of a set of `count`."""
    ids = sorted(set(skipped))
    return BadSet(
        f"{len(ids)} of {count} images cannot be used, more than {max_skipped(count)} (one in "
        f"{_SKIP_ONE_IN}): {', '.join(map(str, ids[:8]))}, ...; "
        f"{other_command('rope_jax.data.verify')} lists them with the reasons"
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation(Examples):
    """Creates the examples of an evaluation: every image once, in order, without augmentation.

    Attributes:
        threads: number of threads that read images; 0 for the caller's only.
    """

    threads: int = 0

    def __call__(self, step: int, start: int, stop: int) -> Batch:
        """Examples `start` to `stop` of this shard's part of a batch.

        See `evaluation_batches`; `bad` has the ids of unusable images.
        """
        images = self.images
        first = step * self.batch_size + self.shard[0] * self.batch_size // self.shard[1]
        ids = np.arange(first + start, first + stop)
        exists = ids < len(images.labels)
        canvas = self.canvas(step)
        # Masks are large, and read from the images where needed.
        options = {"with_masks": False} if images.labels_kind.ragged else {}

        def read(example: int) -> tuple[Batch, bool]:
            row = {"image": np.zeros((*canvas, 3), np.uint8)}
            row, usable = row | images.labels_kind.blank(images.labels, canvas), False
            if example < len(images.labels):
                try:
                    row, usable = images.example(example, **options), True
                except BadImages:
                    if self.bad_images == "error":
                        raise
            if images.labels_kind.ragged:
                row = _pad(_stack([row]), images, canvas, self.max_boxes)
                row = {name: array[0] for name, array in row.items()}
            return row, usable

        with ThreadPoolExecutor(self.threads or 1) as pool:
            rows, mask = zip(*(pool.map if self.threads else map)(read, ids.tolist()), strict=True)
        return _stack(rows) | {
            "index": ids.astype(np.int32),
            "mask": np.array(mask),
            "bad": ids[exists & ~np.array(mask)],
        }

    def batch_extents(self, step: int) -> Int64[np.ndarray, "B 2"]:
        first = step * self.batch_size
        ids = np.arange(first, min(first + self.batch_size, len(self.images.labels)))
        return self.images.extents(ids, None, np.zeros(len(ids), np.uint64))
