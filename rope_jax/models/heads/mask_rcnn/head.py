"""Mask R-CNN (He et al., arXiv 1703.06870): boxes that are proposed, classified and masked.

As in mmdetection 3.3.0, with the feature pyramid of Lin et al. (arXiv 1612.03144).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rope_jax.models.heads.detection import Detections, Targets, extents, sides
from rope_jax.models.heads.head import Head, Maps, register_head
from rope_jax.models.heads.maps import repeat_cells
from rope_jax.models.heads.mask_rcnn.choices import (
    RATIOS,
    Example,
    choose,
    detect,
    make_anchors,
    propose,
)
from rope_jax.models.heads.mask_rcnn.losses import TrainPredictions, region_losses
from rope_jax.models.heads.mask_rcnn.options import MaskRcnnOptions
from rope_jax.models.heads.mask_rcnn.regions import align
from rope_jax.models.layers import Deconv, Linear, conv, draw_he
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import conv_init, glorot_init, normal_init
from rope_jax.system.sharding import over_batch

_BINS, _MASK_BINS = 7, 14  # rows and columns of the features of boxes and of masks

Levels = list[tuple[Float[Array, "B _A"], Float[Array, "B _A 4"]]]


class FeatureMaps(nnx.Module):
    """Maps of the same channels, each with the coarser ones added; and the last, halved."""

    def __init__(self, channels: Sequence[int], width: int, *, rngs: nnx.Rngs, dtypes: dict):
        init = {"kernel_init": glorot_init, "rngs": rngs}
        self.laterals = nnx.List(Linear(inputs, width, **init, **dtypes) for inputs in channels)
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.outputs = nnx.List(_conv(width, glorot_init, **settings) for _ in channels)

    def __call__(self, maps: Maps) -> list[Float[Array, "B _h _w C"]]:
        levels = [layer(x) for layer, x in zip(self.laterals, maps, strict=True)]
        for level in range(len(levels) - 2, -1, -1):
            levels[level] += repeat_cells(levels[level + 1], levels[level].shape[1:3])
        outputs = [layer(x) for layer, x in zip(self.outputs, levels, strict=True)]
        return [*outputs, outputs[-1][:, ::2, ::2]]


class AnchorHead(nnx.Module):
    """For the anchors of every cell, the logit of an object and the steps to its box."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, dtypes: dict):
        init = normal_init(0.01)
        self.conv = _conv(width, init, rngs=rngs, dtypes=dtypes)
        self.classify, self.steps = (
            Linear(width, count * len(RATIOS), kernel_init=init, rngs=rngs, **dtypes)
            for count in (1, 4)
        )

    def __call__(self, maps: Maps) -> Levels:
        levels = []
        for x in maps:
            hidden = jax.nn.relu(self.conv(x))
            logits, steps = _widen(self.classify(hidden)), _widen(self.steps(hidden))
            levels.append((logits.reshape(x.shape[0], -1), steps.reshape(x.shape[0], -1, 4)))
        return levels


class BoxHead(nnx.Module):
    """The logits of the classes of boxes, and the steps to the box of each class."""

    def __init__(self, options: MaskRcnnOptions, num_classes: int, *, rngs: nnx.Rngs, dtypes: dict):
        hidden, layer = options.hidden, functools.partial(Linear, rngs=rngs, **dtypes)
        self.fc1 = layer(_BINS**2 * options.width, hidden, kernel_init=glorot_init)
        self.fc2 = layer(hidden, hidden, kernel_init=glorot_init)
        self.classify = layer(hidden, num_classes + 1, kernel_init=normal_init(0.01))
        self.steps = layer(hidden, 4 * num_classes, kernel_init=normal_init(0.001))

    def __call__(
        self, features: Float[Array, "B R S S C"]
    ) -> tuple[Float[Array, "B R K1"], Float[Array, "B R K 4"]]:
        x = jnp.moveaxis(features, -1, 2).reshape(*features.shape[:2], -1)  # by channel first
        for layer in (self.fc1, self.fc2):
            x = jax.nn.relu(layer(x))
        logits, steps = _widen(self.classify(x)), _widen(self.steps(x))
        return logits, steps.reshape(*steps.shape[:2], -1, 4)


class MaskHead(nnx.Module):
    """The logits of the masks of boxes, for one class each."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.convs = nnx.List(_conv(width, conv_init, **settings) for _ in range(4))
        self.up = Deconv(width, width, rngs=rngs, dtypes=dtypes)
        self.classify = Linear(width, num_classes, rngs=rngs, **dtypes)
        for layer in self.convs:
            draw_he(layer, 9 * width, rngs)
        draw_he(self.up, 4 * width, rngs)
        draw_he(self.classify, num_classes, rngs)

    def __call__(
        self, features: Float[Array, "B R S S C"], classes: Int[Array, "B R"]
    ) -> Float[Array, "B R T T"]:
        x = features.reshape(-1, *features.shape[2:])
        for layer in self.convs:
            x = jax.nn.relu(layer(x))
        logits = _widen(self.classify(jax.nn.relu(self.up(x))))
        chosen = jnp.take_along_axis(logits, classes.reshape(-1, 1, 1, 1), axis=-1)
        return chosen.reshape(*classes.shape, *logits.shape[1:3])


def _conv(width: int, kernel_init: Callable, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Conv:
    """A convolution of 3 x 3 with a bias that is 0 at first."""
    init = {"kernel_init": kernel_init, "bias_init": jax.nn.initializers.zeros}
    settings = {"stride": 1, "padding": 1, "use_bias": True, "rngs": rngs, "dtypes": dtypes}
    return conv(width, width, 3, **settings, **init)


def _widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MaskRcnn(Head):
    """Boxes with classes and masks.

    Anchors of all maps propose boxes, whose features decide on their class, refine them, and draw
    the mask of the object inside. In training it also takes the objects (`Targets`), from which it
    samples boxes for the losses.

    >>> from flax import nnx
    >>> from rope_jax import create_model
    >>> head = "mask_rcnn(width=8,hidden=8,proposals=4,detections=3)"
    >>> options = {"patch_size": 8, "width": 32, "heads": 1, "depth": 4}
    >>> model = create_model("vit_digits", head=head, num_classes=2, **options)
    >>> detections = nnx.jit(model)(jnp.ones((1, 24, 32, 3)))
    >>> detections.boxes.shape, detections.masks.shape
    ((1, 3, 4), (1, 3, 28, 28))
    >>> bool((detections.boxes <= jnp.array([32, 24, 32, 24])).all())
    True
    """

    task: ClassVar[str] = "instances"
    padded: ClassVar[bool] = True
    strides: ClassVar[tuple[int, ...]] = (4, 8, 16, 32)
    normalised: ClassVar[bool] = False

    def __init__(
        self,
        options: MaskRcnnOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.options, self.out_features = options, num_classes
        settings, width = {"rngs": rngs, "dtypes": dtypes}, options.width
        self.pyramid = FeatureMaps(channels, width, **settings)
        self.anchor_head = AnchorHead(width, **settings)
        self.box_head = BoxHead(options, num_classes, **settings)
        self.mask_head = MaskHead(width, num_classes, **settings)

    def __call__(
        self,
        maps: Maps,
        *,
        image_size: Grid,
        extent: Int[Array, "B 2"] | None = None,
        targets: Targets | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> TrainPredictions | Detections:
        """Predictions for samples in training, detections otherwise.

        Args:
            maps: of the backbone or its neck, each of half the size of the one before.
            image_size: (height, width) in pixels.
            extent: rows and columns of each image before padding; None without padding.
            targets: in training, with masks; None for detections.
            train: whether as many boxes compete to be proposals as in training.
            key: for samples; needed with `targets`.

        Raises:
            ValueError: targets without masks or without a key, or images whose sides are no whole
                multiple of those of the first map.
        """
        if targets is not None and (targets.masks is None or key is None):
            raise ValueError(
                "the head 'mask_rcnn' samples boxes from its targets, which need masks, and a key: "
                "call it with targets=Targets(boxes, labels, masks) and key=jax.random.key(...)"
            )
        batch, rows, columns, _ = maps[0].shape
        height, width = image_size
        stride = height // rows
        if (height, width) != (stride * rows, stride * columns):
            raise ValueError(
                "the head 'mask_rcnn' takes images whose sides are a whole multiple of those of "
                f"its first map, but {height}x{width} pixels have one of {rows}x{columns} cells: "
                "use a patch size that is a multiple of 4, or another image size"
            )
        maps = self.pyramid(maps)
        levels = self.anchor_head(maps)
        extent = extents(extent, image_size, batch)
        anchors = [
            jnp.asarray(x, levels[0][0].dtype)
            for x in make_anchors([x.shape[1:3] for x in maps], stride)
        ]
        candidates = self.options.train_candidates if train else self.options.candidates
        proposals, scores = self.propose(levels, anchors, extent, candidates)
        regions = functools.partial(align, maps[:-1], stride=stride)
        if targets is None:
            return self.detect(regions, proposals, scores, extent)
        counts = (sum(map(len, anchors)), targets.labels.shape[1] + scores.shape[1])
        draws = tuple(
            jax.random.uniform(k, (batch, n), scores.dtype)
            for k, n in zip(jax.random.split(key), counts, strict=True)
        )
        examples = Example(targets, extent, proposals, scores, draws)
        return self.predict_samples(regions, levels, examples, jnp.concatenate(anchors), stride)

    def propose(
        self,
        levels: Levels,
        anchors: Sequence[Float[Array, "_A 4"]],
        extent: Int[Array, "B 2"],
        candidates: int,
    ) -> tuple[Float[Array, "B P 4"], Float[Array, "B P"]]:
        """The proposals of every image, from `candidates` boxes of a map: `choices.propose`."""
        numbers = (candidates, self.options.proposals)

        def of_image(image: tuple, anchors: list[Array]) -> tuple[Array, Array]:
            levels, extent = image
            return propose(*zip(*levels, strict=True), anchors, sides(extent)[0], numbers)

        return _each_image(of_image, (levels, extent), anchors)

    def predict_samples(
        self,
        regions: Callable[..., Array],
        levels: Levels,
        examples: Example,
        anchors: Float[Array, "A 4"],
        stride: int,
    ) -> TrainPredictions:
        """Predictions for the samples of every image.

        Args:
            regions: (boxes, bins=...) -> their features.
            levels: predictions for anchors.
            examples: of the batch.
            anchors: of all maps.
            stride: of the finest map.
        """
        of_image = functools.partial(
            choose, stride=stride, options=self.options, classes=self.out_features
        )
        targets = _each_image(of_image, examples, anchors)
        index = targets.anchors.index
        anchor_logits, anchor_steps = (
            jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True)
        )
        logits, steps = self.box_head(regions(targets.boxes, bins=_BINS))
        classes = jnp.clip(targets.labels, 0, self.out_features - 1)
        count = targets.masks.shape[1]
        return TrainPredictions(
            targets,
            jnp.take_along_axis(anchor_logits, index, axis=1),
            jnp.take_along_axis(anchor_steps, index[..., None], axis=1),
            logits,
            jnp.take_along_axis(steps, classes[..., None, None], axis=2)[:, :, 0],
            self.mask_head(regions(targets.boxes[:, :count], bins=_MASK_BINS), classes[:, :count]),
        )

    def detect(
        self,
        regions: Callable[..., Array],
        proposals: Float[Array, "B P 4"],
        scores: Float[Array, "B P"],
        extent: Int[Array, "B 2"],
    ) -> Detections:
        """The detections of every image. `regions` as in `predict_samples`."""
        logits, steps = self.box_head(regions(proposals, bins=_BINS))
        probabilities = jax.nn.softmax(logits)[..., :-1]
        probabilities = jnp.where(scores[..., None] >= 0, probabilities, 0)

        def of_image(image: tuple, _: None) -> tuple[Array, Array, Array]:
            *predicted, extent = image
            return detect(*predicted, sides(extent)[0], self.options.detections)

        images = (proposals, probabilities, steps, extent)
        boxes, scores, classes = _each_image(of_image, images, None)
        masks = self.mask_head(regions(boxes, bins=_MASK_BINS), classes)
        return Detections(boxes, scores, classes, jax.nn.sigmoid(masks))

    def result(self, predictions: Detections, image_size: Grid) -> Detections:
        return predictions

    def loss(
        self,
        predictions: TrainPredictions,
        batch: Mapping[str, Array],
        *,
        key: Array | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The sum of all losses, and the fraction of sampled boxes that are classified correctly.

        With `accumulate`, the losses of each part of a batch are divided by the samples of that
        part, as mmdetection divides by those of each GPU.

        Args:
            predictions: of this head in training.
            batch: not used: its objects are those of the predictions.
            key: not used.
        """
        labels = predictions.targets.labels
        used = labels >= 0
        right = (predictions.logits.argmax(axis=-1) == labels) & used
        value = sum(region_losses(predictions).values())
        return value, right.sum() / jnp.maximum(used.sum(), 1)


def _each_image(function: Callable, images: Any, shared: Any) -> Any:
    """function(image, shared) of every image of a batch, one after the other, without gradients."""
    batched = lambda images, shared: jax.lax.map(lambda image: function(image, shared), images)
    return over_batch(batched, *jax.lax.stop_gradient((images, shared)))


register_head("mask_rcnn", MaskRcnn, MaskRcnnOptions())
