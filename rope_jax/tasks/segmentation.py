"""Semantic segmentation: a class for every pixel, scored by mean intersection over union.

A batch from the loader has `image` uint8 [B, H, W, 3], `label` uint8 [B, H, W], `epoch` and `index`
int32 [B], and `extent` int32 [B, 2], the rows and columns before padding, where images may be
padded; `prepare_batch` returns `image` (normalised) and `label` for the model.
Pixels of label 255 belong to no class: they are neither trained on nor counted.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

from rope_jax.config import Config, ConfigError, blame
from rope_jax.data import BadImages, Images, Streamed, load
from rope_jax.data.images.device import normalise
from rope_jax.data.labels import find_labels
from rope_jax.models.description import Preprocessing
from rope_jax.tasks.augmented import Batch, augment_batch
from rope_jax.tasks.dense import check_classes, check_dense, dense_identity, side_multiple
from rope_jax.tasks.evaluator import Evaluator, Row, description
from rope_jax.tasks.pictures import Segmented, draw_pictures
from rope_jax.tasks.segments import count_pixels, requested_views, segment_split


@dataclasses.dataclass(frozen=True)
class Segmentation:
    """Each pixel has a class. See `rope_jax.tasks`."""

    labels = find_labels("pixels")
    does = "segment images"
    sets = ("ade20k", "masks")
    flags = ("scales", "flip", "window", "stride")
    batch_size = 16
    titles = MappingProxyType({"miou": "mIoU", "accuracy": "pixels"})
    score_name, class_score = "mean IoU", ("iou", "intersection over union")
    picture = "segments.png"

    def check(self, config: Config, images: Images | Streamed) -> None:
        """Rejects images without classes of pixels, and settings for classes of whole images."""
        targets = "the labels of their pixels"
        sources = "scenes, masks or ade20k"
        check_dense(config, images, labels=self.labels, sources=sources, targets=targets)
        if config.loss_pixels == "valid" and config.accumulate > 1:
            raise ConfigError(
                f"--config.accumulate={config.accumulate} cannot be combined with "
                "--config.loss_pixels=valid, whose divisor differs between the parts of a batch: "
                "use --config.accumulate=1 or --config.loss_pixels=all"
            )

    def prepare_batch(
        self, batch: Batch, config: Config, *, seed: int | Array, key: Key[Array, ""]
    ) -> Batch:
        """Augments and normalises images; `key` is not used."""
        batch = augment_batch(batch, config.data, seed=seed)
        return {"image": batch["image"], "label": batch["label"]}

    def loss(
        self, model: nnx.Module, batch: Batch, config: Config, *, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The training loss of the model's head, and the pixel accuracy."""
        predictions = model.predict(batch["image"], train=True, key=key)
        loss_key = jax.random.fold_in(key, zlib.crc32(b"loss"))
        return model.head.loss(predictions, batch, divisor=config.loss_pixels, key=loss_key)

    def count(
        self, logits: Float[Array, "B H W K"], batch: Batch, images: Images | Streamed
    ) -> Int[Array, "K 3"]:
        """`count_pixels` of an evaluation batch with the logits of all pixels."""
        return count_pixels(logits.argmax(-1), batch["label"], batch["mask"], images.classes)

    def scores(
        self, parts: Sequence[Int[np.ndarray, "K 3"]], images: Images | Streamed
    ) -> dict[str, Any]:
        """Mean intersection over union of the classes that occur, and pixel accuracy.

        >>> from rope_jax.data import LabelMaps
        >>> pixels, labels = np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, 8, 8), np.uint8)
        >>> images = LabelMaps(pixels, labels, "mine", "test", classes=3)
        >>> parts = [np.array([[3, 3, 4], [2, 3, 2], [0, 0, 0]])]
        >>> scores = Segmentation().scores(parts, images)
        >>> scores["iou"], round(scores["miou"], 4), round(scores["accuracy"], 4)
        ([0.75, 0.6666666666666666, None], 0.7083, 0.8333)

        Returns:
            `miou`; `accuracy`, the fraction of pixels with a class that are predicted correctly;
            `iou`, of every class, None for one that is neither predicted nor present.
        """
        none = np.zeros((images.classes, 3), np.int64)  # where all images are left out
        correct, predicted, actual = np.sum([none, *parts], axis=0).T
        union = predicted + actual - correct
        iou = [float(a / b) if b else None for a, b in zip(correct, union, strict=True)]
        occurring = [x for x in iou if x is not None]
        return {
            "miou": float(np.mean(occurring)) if occurring else 0.0,
            "accuracy": float(correct.sum() / max(actual.sum(), 1)),
            "iou": iou,
        }

    def open(
        self, dataset: str, folder: str, size: tuple[int, int], crop: str
    ) -> Images | Streamed:
        return load(dataset, folder, "test", size)

    def identity(
        self,
        images: Images | Streamed,
        folder: str | None,
        model: nnx.Module,
        preprocessing: Preprocessing,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        return dense_identity(model, folder) | {"views": str(requested_views(images, **options))}

    def evaluate(
        self,
        evaluator: Evaluator,
        model: nnx.Module,
        images: Images | Streamed,
        pictures: int,
        options: Mapping[str, Any],
    ) -> tuple[Row, list[Segmented]]:
        """Evaluates with the requested `Views`."""
        views = requested_views(images, **options)
        check_classes(model, images)
        if views.window is not None:
            with blame("--window"):
                model.grids(views.window)
        # Windows have their own size: only whole images are padded to sides that the model takes.
        multiple = side_multiple(model.grids) if views.window is None else 1
        probabilities = model.head.probabilities
        parts, kept, seen = segment_split(
            evaluator, images, views, multiple, probabilities, pictures=pictures
        )
        row = description(images) | {"count": len(parts)} | self.scores(parts, images)
        return row | {"protocol": f"{seen}, labels at their own size; {views}"}, kept

    def predict(
        self, evaluator: Evaluator, images: Images | Streamed, count: int
    ) -> list[Segmented]:
        """The first images, of one size, with their classes."""
        examples: list[dict[str, np.ndarray]] = []
        for number in range(len(images.labels)):
            with contextlib.suppress(BadImages):  # where the run skips them
                examples.append(images.example(number))
            if len(examples) == count:
                break

        @jax.jit
        def predict(weights: Any, pixels: UInt8[Array, "B H W 3"]) -> UInt8[Array, "B H W"]:
            logits = evaluator.apply(weights, normalise(pixels, evaluator.mean, evaluator.std))
            return logits.argmax(-1).astype(np.uint8)

        pixels = np.stack([example["image"] for example in examples])
        predictions = np.asarray(predict(evaluator.weights, pixels))
        return [
            Segmented(example["image"], example["label"], classes)
            for example, classes in zip(examples, predictions, strict=True)
        ]

    draw = staticmethod(draw_pictures)
