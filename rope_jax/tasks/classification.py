"""Image classification: losses, augmentation and mixing in the step, accuracy.

A batch from the loader has `image` uint8 [B, H, W, 3], `label`, `epoch` and `index` int32 [B];
`prepare_batch` returns `image` (normalised), `label` and `target` (soft labels, float32 [B,
classes]) for the model. With `data.more_sizes` there are `image_1`, `image_2`, ..., too.
"""

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from rope_jax.config import Config, ConfigError
from rope_jax.data import (
    EPOCHS_OF_A_COPY,
    EVALUATION_SETS,
    EvaluationSet,
    Images,
    Streamed,
    split_augment,
)
from rope_jax.data.images import device, mixing
from rope_jax.data.labels import find_labels
from rope_jax.models.description import Preprocessing
from rope_jax.tasks.augmented import Batch, augment_batch
from rope_jax.tasks.dense import first_difference
from rope_jax.tasks.evaluator import Evaluator, Row, weights_rule


def softmax_loss(logits: Float[Array, "*B K"], targets: Float[Array, "*B K"]) -> Float[Array, ""]:
    """Mean cross entropy of the softmax, in nats.

    >>> float(softmax_loss(jnp.zeros((1, 2)), jnp.array([[1.0, 0.0]]))).__round__(4)
    0.6931

    Args:
        logits: [..., classes].
        targets: [..., classes], each row a distribution.
    """
    return optax.softmax_cross_entropy(logits, targets).mean()


def binary_loss(logits: Float[Array, "*B K"], targets: Float[Array, "*B K"]) -> Float[Array, ""]:
    """Mean cross entropy of one sigmoid per class, in nats; any weight above 0 is a full target.

    Both classes of a mixed image are targets, as in DeiT-III (arXiv 2204.07118).

    Args:
        logits: [..., classes].
        targets: [..., classes], without label smoothing.
    """
    return optax.sigmoid_binary_cross_entropy(logits, (targets > 0).astype(logits.dtype)).mean()


LOSSES = {"softmax": softmax_loss, "binary": binary_loss}


def _whitened_smooth_l1(
    student: Float[Array, "B C"], teacher: Float[Array, "B C"]
) -> Float[Array, ""]:
    """Mean smooth L1 distance (beta 1) from the teacher's features, normalised over channels."""
    teacher = jax.nn.standardize(teacher, axis=-1, epsilon=1e-6)
    return optax.huber_loss(student, teacher).mean()


# Of a student's features from a teacher's, both [B, C], as in ResFormer's code.
DISTANCES = {
    "smooth_l1": _whitened_smooth_l1,
    "l2": lambda student, teacher: ((student - teacher) ** 2).mean(),
    "cosine": lambda student, teacher: optax.cosine_distance(student, teacher, epsilon=1e-6).mean(),
}


def _outputs(
    model: nnx.Module, images: Float[Array, "B ..."], config: Config, key: Key[Array, ""]
) -> tuple[Float[Array, "B K"], Float[Array, "B C"] | None]:
    """Logits, and the features to distil, if the config does."""
    if config.distill is None or config.distill_from == "logits":
        logits = model(images, train=True, key=key).astype(jnp.float32)
        return logits, None if config.distill is None else logits
    tokens = model.encode(images, train=True, key=key)
    patches = tokens[:, model.position.stage.prefix :]
    feature = model.pool(tokens) if config.distill_from == "feature" else patches.mean(axis=1)
    return model.classify(tokens).astype(jnp.float32), feature.astype(jnp.float32)


def soft_targets(
    first: Int[Array, " B"],
    second: Int[Array, " B"],
    weight: Float[Array, "B 1"] | float,
    classes: int,
    smoothing: float,
) -> Float[Array, "B K"]:
    """Smoothed targets of mixed examples: `weight` of the first label, the rest of the second.

    Args:
        first: int [B], labels in [0, classes).
        second: int [B], likewise.
        weight: [B, 1], of each first label, 0 to 1; or one number for all.
        classes: number of classes.
        smoothing: label smoothing in [0, 1).

    Returns:
        float32 [B, classes], rows of sum 1.
    """
    first, second = (
        jax.nn.one_hot(labels, classes, dtype=jnp.float32) for labels in (first, second)
    )
    return optax.smooth_labels(weight * first + (1 - weight) * second, smoothing)


@dataclasses.dataclass(frozen=True)
class Classification:
    """Each image has one class; scored by accuracy. See `rope_jax.tasks`."""

    labels = find_labels("images")
    does = "classify images"
    sets = EVALUATION_SETS
    flags = ("crop", "interpolation", "limit")
    batch_size = 128
    titles = MappingProxyType({"top1": "top-1", "top5": "top-5"})
    score_name, class_score = "top-1 accuracy", None
    picture = None

    def check(self, config: Config, images: Images | Streamed) -> None:
        """Rejects images whose pixels or boxes have classes, and several labels of an image."""
        if images.labels_kind != self.labels:
            raise ConfigError(
                f"--config.data.source={config.data.source} has {images.labels_kind.words}, but "
                f"{config.model.name} without a head of dense prediction has one class for each "
                "image: add one with --config.model.head"
            )
        if images.labels.ndim > 1:
            raise ConfigError(
                f"--config.data.source={config.data.source} has up to {images.labels.shape[1]} "
                "labels for each training image: give each one, int32 [n]; only images of an "
                "evaluation may have several"
            )

    def prepare_batch(
        self, batch: Batch, config: Config, *, seed: int | Array, key: Key[Array, ""]
    ) -> Batch:
        """Augments, normalises and mixes images; `key` is for mixing.

        Of several sizes, `image` becomes the largest. Each is augmented separately, and all are
        mixed with one draw: boxes of cutmix and weights of labels are those of the largest.
        """
        augment, m = split_augment(config.data.augment), config.mix
        sizes = [augment_batch(batch, config.data, seed=seed)]
        for copy in range(1, 1 + len(config.data.more_sizes)):
            epoch = batch["epoch"] + copy * EPOCHS_OF_A_COPY
            part = {"image": batch[f"image_{copy}"], "epoch": epoch, "index": batch["index"]}
            sizes.append(augment_batch(part, config.data, seed=seed))
        sizes.sort(key=lambda part: math.prod(part["image"].shape[1:3]), reverse=True)
        labels = sizes[0]["label"] if len(sizes) == 1 else batch["label"]
        mix = functools.partial(
            mixing.mix_groups,
            labels=labels,
            key=jax.random.fold_in(key, zlib.crc32(b"mix")),
            groups=m.groups,
            mixup=m.mixup,
            cutmix=m.cutmix,
            prob=m.prob,
            switch_prob=m.switch_prob,
            enabled=True if m.off_epoch is None else batch["epoch"][0] < m.off_epoch,
            drawn_at=sizes[0]["image"].shape[1:3] if len(sizes) > 1 else None,
        )
        images, mixed = [], []
        for part in sizes:
            image, keys = part["image"], None
            if augment.erasing:
                keys = device.example_keys(seed, part["epoch"], part["index"])
            if keys is not None and not m.before_erasing:
                image = device.apply(image, keys, augment.erasing, first=device.ERASING)
            if m.mixup or m.cutmix:
                image, *partners = mix(image)
                mixed.append(partners)
            if keys is not None and m.before_erasing:
                image = device.apply(image, keys, augment.erasing, first=device.ERASING)
            images.append(image)
        others, weight = mixed[0] if mixed else (labels, 1.0)  # of the largest size
        smoothing, classes = config.label_smoothing, config.model.num_classes
        targets = soft_targets(labels, others, weight, classes, smoothing)
        named = {f"image_{k}" if k else "image": image for k, image in enumerate(images)}
        return named | {"label": labels, "target": targets}

    def loss(
        self, model: nnx.Module, batch: Batch, config: Config, *, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The training loss, and the accuracy on the (mixed) images of the largest size.

        With several sizes, the largest first, the loss is the mean of theirs (ResFormer, arXiv
        2212.00776): of each the loss of the logits, and, if the config distils, of all but the
        largest the distance of its features from those of the next larger one.
        """
        losses, teacher = [], None
        for number in range(1 + len(config.data.more_sizes)):
            images = batch[f"image_{number}" if number else "image"]
            key = jax.random.fold_in(key, number) if number else key
            logits, feature = _outputs(model, images, config, key)
            loss = LOSSES[config.loss](logits, batch["target"])
            if teacher is not None:
                loss += DISTANCES[config.distill](feature, jax.lax.stop_gradient(teacher))
            losses.append(loss)
            if number == 0:
                accuracy = (logits.argmax(-1) == batch["label"]).mean()
            teacher = feature
        return sum(losses) / len(losses), accuracy

    def count(
        self, logits: Float[Array, "B K"], batch: Batch, images: Images | Streamed
    ) -> Int[Array, "3"]:
        """`count_correct` of an evaluation batch, among the classes that compete in that set.

        Raises:
            ValueError: the model has fewer classes than the images.
        """
        if logits.shape[-1] < images.classes:
            raise ValueError(
                f"the model has {logits.shape[-1]} classes, but {images.name} has "
                f"{images.classes}: use weights for as many"
            )
        if images.competing is not None:
            logits = logits[:, jnp.asarray(images.competing)]
        return count_correct(logits, batch["label"], batch["mask"])

    def scores(
        self, parts: Sequence[Int[np.ndarray, "3"]], images: Images | Streamed
    ) -> dict[str, Any]:
        """Accuracies, as fractions, and the number of images.

        >>> from rope_jax import data
        >>> parts = [np.array([1, 2, 2]), np.array([2, 2, 2])]
        >>> Classification().scores(parts, data.load("digits", split="test"))
        {'top1': 0.75, 'top5': 1.0, 'count': 4}
        """
        top1, top5, number = np.sum(parts, axis=0, dtype=np.int64).tolist()
        return {"top1": top1 / number, "top5": top5 / number, "count": number}

    def open(self, dataset: str, folder: str, size: tuple[int, int], crop: str) -> Streamed:
        return Streamed(EvaluationSet(dataset, folder), size, crop)

    def identity(
        self,
        images: Images | Streamed,
        folder: str | None,
        model: nnx.Module,
        preprocessing: Preprocessing,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        if folder is None:
            return {}
        limit = {"limit": options["limit"]} if options["limit"] else {}
        prepared = json.loads(json.dumps(dataclasses.asdict(preprocessing)))
        return {"images": folder} | prepared | limit

    def evaluate(
        self,
        evaluator: Evaluator,
        model: nnx.Module,
        images: Images | Streamed,
        pictures: int,
        options: Mapping[str, Any],
    ) -> tuple[Row, list[Any]]:
        """Evaluates a run's own split (without a `crop`), or image files."""
        if options["crop"] is None:
            (row,) = evaluator.score(images)
            note = weights_rule(evaluator.config.averaged)
            return row | {"protocol": images.protocol, "note": note}, []
        check_folders(model, images)
        (row,) = dataclasses.replace(evaluator, config=Config()).score(images)
        preparation = {name: options[name] for name in ("crop", "interpolation")}
        preprocessing = Preprocessing(evaluator.mean, evaluator.std, **preparation)
        described = {"protocol": images.protocol, "note": images.note}
        return row | described | dataclasses.asdict(preprocessing), []


def check_folders(model: nnx.Module, images: Streamed) -> None:
    """Rejects folders whose numbers differ from those of the model's classes of the same names."""
    known, names = model.class_names or (), images.class_names
    if len(names) > len(known) or {*known}.isdisjoint(names):
        return
    if (difference := first_difference(known[: len(names)], names)) is not None:
        number, expected, name = difference
        raise ConfigError(
            f"folder {name!r} of {images.name} would be class {number}, which is {expected!r} for "
            "the model: name folders like its classes, and add an empty one for each class "
            "without images"
        )


def count_correct(
    logits: Float[Array, "B K"], label: Int[Array, "B ..."], mask: Bool[Array, " B"]
) -> Int[Array, "3"]:
    """Counts correct images in an evaluation batch.

    Args:
        logits: of the competing classes.
        label: [B], or [B, M] for images with up to M correct classes, padded with -1.
        mask: False for padding of the batch.

    Returns:
        Images correct in top 1, images correct in top 5, images counted.
    """
    logits = logits.astype(jnp.float32)
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    best = jnp.where(jnp.isnan(logits).any(-1, keepdims=True), -2, best)  # NaN would rank first
    label = label.reshape(len(label), 1, -1)
    hits = (best[:, :, None] == label).any(-1) & mask[:, None]
    return jnp.stack([hits[:, 0].sum(), hits.any(-1).sum(), mask.sum()])
