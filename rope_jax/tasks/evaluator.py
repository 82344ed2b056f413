"""An evaluation: a model, or those of several seeds, and its scores on sets of images."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from rope_jax import data
from rope_jax.config import Config
from rope_jax.data.images.device import normalise
from rope_jax.system.sharding import process_shard, put_batch, replicate
from rope_jax.tasks import seeds

Apply = Callable[..., Any]  # (weights, normalised images [B, H, W, 3]) -> the model's outputs
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A model, or those of several seeds, ready to be scored.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from rope_jax.system.sharding import make_mesh
    >>> from rope_jax.tasks import TASKS
    >>> evaluator = Evaluator(
    ...     lambda weights, images: images.mean((1, 2)) @ weights,
    ...     jnp.zeros((3, 2)),  # equal logits, of which class 0 is the first
    ...     TASKS["classification"],
    ...     mean=(0.5, 0.5, 0.5),
    ...     std=(0.5, 0.5, 0.5),
    ...     batch_size=4,
    ...     mesh=make_mesh(),
    ... )
    >>> pixels, labels = np.zeros((4, 8, 8, 3), np.uint8), np.int32([0, 1, 1, 1])
    >>> (row,) = evaluator.score(data.Images(pixels, labels, "mine", "test", classes=2))
    >>> row["top1"], row["count"]
    (0.25, 4)

    Attributes:
        apply: (weights, normalised images [B, H, W, 3]) -> outputs of the model; for padded images
            it also receives their `extent`, int32 [B, 2].
        weights: a tree of arrays; stacked for a run with several seeds.
        task: an object of `rope_jax.tasks`, whose scores these are.
        mean, std: normalisation per channel.
        batch_size: images per step on all devices together; in views of segmentation, windows.
        mesh: the devices.
        config: of the run, for its seeds, data workers, canvases and policy on bad images.
        poll: called after each step with the number of images so far; may raise to stop.
        waiting: see `rope_jax.data.batches`.
    """

    apply: Apply
    weights: Any
    task: Any
    mean: Sequence[float]
    std: Sequence[float]
    batch_size: int
    mesh: Mesh
    config: Config = dataclasses.field(default_factory=Config)
    poll: Callable[[int], None] = lambda images: None
    waiting: Callable[[int], None] = lambda seconds: None

    def score(self, images: data.Images | data.Streamed) -> list[Row]:
        """The scores of a set, one row per seed.

        Returns:
            `dataset`, `split`, `resolution` and the scores: for classification `top1` and `top5`
            (fractions) and `count`.

        Raises:
            ValueError: the model has too few classes, or an image cannot be read.
        """
        parts, used = self.count(images)
        entries = description(images) | {"count": used}
        return [entries | self.task.scores(seed_parts, images) for seed_parts in parts]

    def count(
        self, images: data.Images | data.Streamed, steps: int | None = None
    ) -> tuple[list[list[Any]], int]:
        """The counts from which a set's scores are computed, and the number of images used.

        Args:
            images: a test split or evaluation set at one resolution.
            steps: batches to stop after; None for all.

        Returns:
            For each seed the trees of the task's `count`, one of each batch, or what `collect` of
            the task makes of them; and the number.
        """
        config, mesh = self.config, self.mesh

        def count(weights: Any, batch: dict[str, Array]) -> tuple[Any, Array]:
            extents = {name: batch[name] for name in ("extent",) if name in batch}
            inputs = normalise(batch["image"], self.mean, self.std, **extents)
            outputs = self.apply(weights, inputs, **extents)
            return self.task.count(outputs, batch, images), batch["mask"].sum()

        count = jax.jit(
            seeds.vmap(count, config.seeds, in_axes=(0, None)), out_shardings=replicate(mesh)
        )
        collect = getattr(self.task, "collect", lambda part: part)
        parts: list[list[Any]] = [[] for _ in config.all_seeds]
        seen, used = 0, 0
        batch_size = -(-self.batch_size // mesh.size) * mesh.size  # the last is padded anyway
        rows = config.data.max_boxes
        if images.labels_kind.ragged:  # larger images may have more objects than those of training
            rows = images.annotations.counts().max(initial=rows).item()
        batches = data.evaluation_batches(
            images,
            batch_size=batch_size,
            shard=process_shard(),
            workers=config.data.workers or 0,  # by default threads, which start at once
            bad_images=config.data.bad_images,
            canvases=config.data.canvas_sizes,
            max_boxes=rows,
            waiting=self.waiting,
        )
        with batches:
            for batch in itertools.islice(batches, steps):
                tree, usable = jax.device_get(count(self.weights, put_batch(batch, mesh)))
                used += int(usable.flat[0])  # the same for every seed
                for seed_parts, part in zip(parts, seeds.split(tree, config.seeds), strict=True):
                    seed_parts.append(collect(part))
                seen = min(seen + batch_size, len(images.labels))
                self.poll(seen)
        return parts, used


def weights_rule(averaged: bool) -> str:
    """Names the weights of a run that are evaluated."""
    return "averaged weights (EMA)" if averaged else "weights of the last step"


def description(images: data.Images | data.Streamed) -> Row:
    """The entries of a row about its images, with the names of classes of pixels and boxes."""
    names = {"class_names": list(images.class_names or ())} if images.labels_kind.placed else {}
    entries = {"dataset": images.name, "split": images.split, "resolution": list(images.size)}
    return entries | names
