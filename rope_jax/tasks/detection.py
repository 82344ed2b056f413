"""Object detection: boxes with classes, perhaps with masks, scored by average precision.

A batch from the loader has `image`, padded at the bottom and on the right; `extent` int32 [B, 2],
the rows and columns before padding; `boxes` float32 [B, M, 4], corners x1, y1, x2, y2 in pixels;
`label` int32 [B, M], their classes, -1 in rows that are padding; `epoch` and `index`.
`prepare_batch` returns them for the model: `image` float32, 0 where padded; `boxes`, centres and
sizes, 0 to 1 within the extent; and `share` float32 [B], the number of images divided by that of
boxes in the whole batch. It weighs the sum of losses of each image, so that a batch can be computed
in parts. If the labels are masks, both batches have them, as in `rope_jax.data.labels`.

An evaluation batch has `image`, `extent`, `index`, `mask` and `original` [B, 2], the rows and
columns of the stored image. The objects themselves are read from the images.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from rope_jax.config import Config, ConfigError
from rope_jax.data import Images, Streamed, check_objects, load
from rope_jax.data.images.augment import parse_crop
from rope_jax.data.images.masks import Mask, encode_mask
from rope_jax.data.labels import BoxLabels, find_labels
from rope_jax.models.dense import parse_head
from rope_jax.models.description import Preprocessing
from rope_jax.models.heads.detection import Targets, scale_boxes
from rope_jax.tasks.augmented import Batch, augment_batch
from rope_jax.tasks.average_precision import ImageDetections, average_precision, require_pycocotools
from rope_jax.tasks.box_pictures import DetectedImage, draw_detections
from rope_jax.tasks.dense import check_classes, check_dense, dense_identity, side_multiple
from rope_jax.tasks.evaluator import Evaluator, Row, description
from rope_jax.tasks.pasting import paste


@dataclasses.dataclass(frozen=True)
class Detection:
    """Boxes with classes. See `rope_jax.tasks`.

    Attributes:
        labels: boxes, or boxes with masks.
    """

    labels: BoxLabels = find_labels("boxes")
    does = "detect objects"
    sets = ("coco",)
    flags = ()
    batch_size = 16
    titles = MappingProxyType(
        {
            "ap": "AP",
            "ap50": "AP50",
            "ap75": "AP75",
            "ap_small": "AP small",
            "ap_medium": "AP medium",
            "ap_large": "AP large",
            "mask_ap": "mask AP",
            "mask_ap50": "mask AP50",
            "mask_ap75": "mask AP75",
        }
    )
    score_name = "average precision"
    class_score = ("class_ap", "average precision")
    picture = "detections.png"

    def check(self, config: Config, images: Images | Streamed) -> None:
        """Rejects images without boxes, and settings for classes of whole images."""
        require_pycocotools()
        sources = "scenes or coco"
        check_dense(config, images, labels=self.labels, sources=sources, targets="their boxes")
        name, _, options = parse_head(config.model.head)
        queries = getattr(options, "queries", None)
        if queries is not None and config.data.max_boxes > queries:
            raise ConfigError(
                f"--config.data.max_boxes={config.data.max_boxes} is more than the head's "
                f"{queries} queries, each of which can find one object: use at most {queries}, or "
                f"--config.model.head={name}(queries={config.data.max_boxes})"
            )

    def prepare_batch(
        self, batch: Batch, config: Config, *, seed: int | Array, key: Key[Array, ""]
    ) -> Batch:
        """Augments and normalises images, and scales their boxes; `key` is not used."""
        batch = augment_batch(batch, config.data, seed=seed)
        extent, label = batch["extent"], batch["label"]
        share = jnp.full(len(label), len(label) / jnp.maximum((label >= 0).sum(), 1), jnp.float32)
        boxes = scale_boxes(batch["boxes"], extent)
        kept = {name: batch[name] for name in ("image", "masks") if name in batch}
        return kept | {"extent": extent, "boxes": boxes, "label": label, "share": share}

    def loss(
        self, model: nnx.Module, batch: Batch, config: Config, *, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The training loss of the model's head, and the fraction of boxes that it gets right.

        Which boxes these are is defined by the head's `loss`.
        """
        predictions = model.predict(
            batch["image"],
            extent=batch["extent"],
            targets=Targets(batch["boxes"], batch["label"], batch.get("masks")),
            train=True,
            key=key,
        )
        return model.head.loss(predictions, batch)

    def count(self, outputs: Any, batch: Batch, images: Images | Streamed) -> dict[str, Array]:
        """The detections of an evaluation batch, in pixels of the stored images.

        Args:
            outputs: `Detections` of the batch.
            batch: with `extent`, `original`, `index` and `mask`.
            images: the set; its classes are those of the model.

        Returns:
            `boxes` [B, D, 4], corners x1, y1, x2, y2 within the image; `scores`, `classes` [B, D];
            `index` and `mask` [B]; and of detections with masks `masks` [B, D, S, S], the
            probabilities of their cells, and `original` [B, 2].
        """
        ends = batch["original"][:, None, ::-1].astype(jnp.float32)  # width, height
        corners = outputs.boxes.reshape(*outputs.boxes.shape[:2], 2, 2)
        corners = corners * (ends / batch["extent"][:, None, ::-1])[:, :, None]
        boxes = jnp.clip(corners, 0, ends[:, :, None]).reshape(outputs.boxes.shape)
        part = {
            "boxes": boxes,
            "scores": outputs.scores,
            "classes": outputs.classes,
            "index": batch["index"],
            "mask": batch["mask"],
        }
        if outputs.masks is not None:
            part |= {"masks": outputs.masks, "original": batch["original"]}
        return part

    def collect(self, part: Mapping[str, np.ndarray]) -> dict[int, ImageDetections]:
        """Collects the detections of a batch, by number of the image.

        Boxes without an area are left out. Detections with masks stay, as in mmdetection: an empty
        mask counts as wrong.

        Args:
            part: from `count`.
        """
        detections = {}
        for row in np.flatnonzero(part["mask"]):
            boxes, scores, classes = (part[name][row] for name in ("boxes", "scores", "classes"))
            kept, masks = (boxes[:, 2:] > boxes[:, :2]).all(axis=1), None
            if "masks" in part:
                kept, size = scores > 0, tuple(part["original"][row].tolist())
                pairs = zip(part["masks"][row][kept], boxes[kept], strict=True)
                masks = [_encode(*pair, size) for pair in pairs]
            values = (x[kept] for x in (boxes, scores, classes))
            detections[int(part["index"][row])] = ImageDetections(*values, masks)
        return detections

    def scores(
        self, parts: Sequence[Mapping[int, ImageDetections]], images: Images | Streamed
    ) -> dict[str, Any]:
        """Average precision, see `rope_jax.tasks.average_precision`, and `count` of images.

        The objects of the set are the annotated ones, including crowds.
        """
        detections = dict(itertools.chain.from_iterable(part.items() for part in parts))
        truths = [images.truth(index) for index in detections]
        compare = functools.partial(
            average_precision, list(detections.values()), truths, images.classes
        )
        scores = dict(compare())
        if self.labels.labels_of == "masks":
            by_mask = compare(overlap="masks")
            scores |= {f"mask_{name}": score for name, score in by_mask.items()}
        return scores | {"count": len(detections)}

    def open(
        self, dataset: str, folder: str, size: tuple[int, int], crop: str
    ) -> Images | Streamed:
        return load(dataset, folder, "test", size, labels_of=self.labels.labels_of)

    def frame_images(
        self, images: Images | Streamed, size: tuple[int, int] | None, frame: str | None
    ) -> Images | Streamed:
        """Fits images into the requested size, the frame of the run's own evaluation, or that of
        the set."""
        if size is not None:
            return dataclasses.replace(images, crop=f"fit(short={min(size)},long={max(size)})")
        if frame is not None and self.labels.labels_of in parse_crop(frame).entry.labels:
            return dataclasses.replace(images, crop=frame)
        return dataclasses.replace(images, size=_sides(images.crop))

    def identity(
        self,
        images: Images | Streamed,
        folder: str | None,
        model: nnx.Module,
        preprocessing: Preprocessing,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        return dense_identity(model, folder) | {"frame": images.protocol}

    def evaluate(
        self,
        evaluator: Evaluator,
        model: nnx.Module,
        images: Images | Streamed,
        pictures: int,
        options: Mapping[str, Any],
    ) -> tuple[Row, list[DetectedImage]]:
        """Evaluates on canvases of the run, or on canvases that hold all images of the frame."""
        require_pycocotools()
        check_classes(model, images)
        check_objects(images)
        config = evaluator.config
        if not images.one_size and images.crop != config.eval.frame:
            multiple = side_multiple(model.grids)
            short, long = (-(-side // multiple) * multiple for side in _sides(images.crop))
            canvases = ((short, long), (long, short), (long, long))  # portrait, landscape or both
            changed = dataclasses.replace(config.data, canvases=canvases)
            config = dataclasses.replace(config, data=changed)
        (parts,), used = dataclasses.replace(evaluator, config=config).count(images)
        row = description(images) | {"count": used} | self.scores(parts, images)
        return row | {"protocol": images.protocol}, first_detections(parts, images, pictures)

    def predict(
        self, evaluator: Evaluator, images: Images | Streamed, count: int
    ) -> list[DetectedImage]:
        """The first images with their detections, by the program of the evaluation."""
        (parts,), _ = evaluator.count(images, steps=1)
        return first_detections(parts, images, count)

    draw = staticmethod(draw_detections)


def _sides(frame: str) -> tuple[int, int]:
    """The shorter and the longer side, in pixels, that images of a frame fit into."""
    crop = parse_crop(frame)
    return crop.option("short"), crop.option("long")


def _encode(
    mask: Float[np.ndarray, "S S"], box: Float[np.ndarray, " 4"], size: tuple[int, int]
) -> Mask:
    """The mask of a detection in an image of (rows, columns)."""
    pixels = np.zeros(size, np.uint8, order="F")
    probabilities, place = paste(mask, box, size)
    pixels[place] = probabilities >= 0.5
    return encode_mask(pixels)


def first_detections(
    parts: Sequence[Mapping[int, ImageDetections]], images: Images | Streamed, count: int
) -> list[DetectedImage]:
    """The first images of a set with their detections.

    Args:
        parts: from `Detection.collect`, of the set's batches.
        images: the set.
        count: of images.
    """
    pairs = itertools.chain.from_iterable(part.items() for part in parts)
    first = itertools.islice(pairs, count)
    return [DetectedImage(images.pixels(k), images.truth(k), detections) for k, detections in first]
