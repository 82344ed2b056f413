"""The examples of the training stream and of an evaluation, as pure functions of their position."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt64

from rope_jax.data.draws import example_draws
from rope_jax.data.images.augment import CROP, LOADER, Augmentation
from rope_jax.data.images.joint import padded
from rope_jax.data.order import batch_examples
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.index import BadImages, BadSet
from rope_jax.data.workers import Batch

BAD_IMAGES = ("error", "skip")
_BAD_SHARE = 1000  # one image in 1,000 may be skipped
Drawn = tuple[Augmentation, UInt64[np.ndarray, " b"]]  # with the draws of some examples
THREADS = 8  # decode images for an evaluation


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
                    if self.bad_images == "error":
                        raise
                    bad.append(int(ids[k]))
                    if len(bad) > allowed(count) + 1:
                        raise too_many(bad, count) from None
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
    if len(errors) > (allowed(len(images.labels)) if bad_images == "skip" else 0):
        more = f" ({len(errors)} of {len(images.labels)} images have such)" if errors[1:] else ""
        raise ValueError(f"{errors[0]}{more}")


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def allowed(count: int) -> int:
    """The number of images of a set that may be skipped; never all of them."""
    return min(-(-count // _BAD_SHARE), count - 1)


def too_many(skipped: Iterable[int], count: int) -> BadSet:
    """The error for skipped images, by number, of a set of `count`."""
    ids = sorted(set(skipped))
    return BadSet(
        f"{len(ids)} of {count} images cannot be used, more than {allowed(count)} (one in "
        f"{_BAD_SHARE}): {', '.join(map(str, ids[:8]))}, ...; "
        "python -m rope_jax.data.verify lists them with the reasons"
    )


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
        return _stacked(rows) | {
            "index": ids.astype(np.int32),
            "mask": mask,
            "bad": ids[exists & ~mask],
        }
