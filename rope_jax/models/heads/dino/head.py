"""DINO (Zhang et al., arXiv 2203.03605): detection by queries that are matched with boxes.

As in detrex (e244e6c), with the same defaults.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.heads.boxes import iou, to_corners
from rope_jax.models.heads.detection import Detections, Targets, best_detections, extents
from rope_jax.models.heads.dino.denoising import (
    Slots,
    attention_mask,
    disturb,
    make_slots,
    real_first,
)
from rope_jax.models.heads.dino.levels import padding_mask
from rope_jax.models.heads.dino.losses import box_losses, match_targets
from rope_jax.models.heads.dino.options import DinoOptions
from rope_jax.models.heads.dino.transformer import Transformer, inverse_sigmoid
from rope_jax.models.heads.head import Head, Maps, register_head
from rope_jax.models.heads.maps import group_norm
from rope_jax.models.layers import conv
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import glorot_init, normal_init


class Projection(nnx.Module):
    """A convolution to the head's channels and a group norm."""

    def __init__(
        self,
        inputs: int,
        options: DinoOptions,
        kernel: int,
        *,
        stride: int = 1,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        width = options.width
        shape = {"kernel": kernel, "stride": stride, "padding": kernel // 2}
        init = {"kernel_init": glorot_init, "bias_init": jax.nn.initializers.zeros}
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.conv = conv(inputs, width, **shape, use_bias=True, **init, **settings)
        self.norm = group_norm(width, options.groups, **settings)

    def __call__(self, x: Float[Array, "B H W I"]) -> Float[Array, "B h w O"]:
        return self.norm(self.conv(x))


class ChannelNeck(nnx.Module):
    """Maps of the same channels, and further ones, each of half the size of the one before."""

    def __init__(
        self, channels: tuple[int, ...], options: DinoOptions, *, rngs: nnx.Rngs, dtypes: dict
    ):
        settings = {"rngs": rngs, "dtypes": dtypes}
        channels = channels[: options.levels]
        self.same = nnx.List(Projection(inputs, options, 1, **settings) for inputs in channels)
        self.extra, inputs = nnx.List([]), channels[-1]
        for _ in range(options.levels - len(channels)):
            self.extra.append(Projection(inputs, options, 3, stride=2, **settings))
            inputs = options.width

    def __call__(self, maps: Maps) -> list[Float[Array, "B _h _w C"]]:
        maps = maps[: len(self.same)]
        outputs = [layer(x) for layer, x in zip(self.same, maps, strict=True)]
        x = maps[-1]
        for layer in self.extra:
            outputs.append(x := layer(x))
        return outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DinoPredictions:
    """Predictions after the layers of the decoder and, last, of the choice of queries.

    Boxes are centres and sizes, 0 to 1 within the extent.

    Attributes:
        logits, boxes: of Q queries.
        extent: rows and columns of each image; None where nothing is padded.
        denoising: logits and boxes of the queries of denoising, and their slots; or None.
    """

    logits: Float[Array, "R B Q K"]
    boxes: Float[Array, "R B Q 4"]
    extent: Int[Array, "B 2"] | None
    denoising: tuple[Float[Array, "R2 B D K"], Float[Array, "R2 B D 4"], Slots] | None = None


class Dino(Head):
    """Boxes with classes, from queries that attend to each other and to maps of several strides.

    In training it takes the boxes too, for denoising: `Targets`.
    """

    task: ClassVar[str] = "detection"
    padded: ClassVar[bool] = True
    strides: ClassVar[tuple[int, ...]] = (8, 16, 32, 64)
    scales: ClassVar[tuple[float, ...]] = (2.0, 1.0, 0.5)
    normalised: ClassVar[bool] = False

    def __init__(
        self,
        options: DinoOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.options, self.out_features = options, num_classes
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.neck = ChannelNeck(channels, options, **settings)
        self.transformer = Transformer(options, num_classes, **settings)
        shape = (num_classes, options.width)
        labels = normal_init(1.0)(rngs.params(), shape, dtypes["param_dtype"])
        self.label_embed = nnx.Param(labels)

    def __call__(
        self,
        maps: Maps,
        *,
        image_size: Grid,
        extent: Int[Array, "B 2"] | None = None,
        targets: Targets | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> DinoPredictions:
        """Predictions of all layers.

        Args:
            maps: of the backbone or its pyramid, of strides 8 to 32 or 64.
            image_size: (height, width) in pixels.
            extent: rows and columns of each image before padding; None without padding.
            targets: in training, for denoising; None for none.
            train: whether to add queries of denoising.
            key: for denoising.

        Raises:
            ValueError: there are fewer tokens than queries.
        """
        maps = self.neck(maps)
        sizes, batch = [x.shape[1:3] for x in maps], maps[0].shape[0]
        tokens, queries = sum(math.prod(size) for size in sizes), self.options.queries
        if tokens < queries:
            raise ValueError(
                f"queries={queries} are chosen among the tokens of all maps, which are {tokens} "
                f"for images of {image_size[0]}x{image_size[1]} pixels: use larger images, or "
                f"fewer queries, head=dino(queries={tokens})"
            )
        if extent is None:
            padding = [jnp.zeros((batch, *size), bool) for size in sizes]
        else:
            padding = [padding_mask(extent, image_size, size) for size in sizes]
        slots = extra = None
        if train and targets is not None and self.options.denoising:
            targets = real_first(targets)
            slots = make_slots(targets.real, self.options.denoising)
            extra = self.start(targets, slots, key)
        model, count = self.transformer, 0 if slots is None else len(slots.row)
        decoded = model(maps, padding, extra)
        before = [decoded.initial, *decoded.references[:-1]]
        boxes = [model.refine(n, x, before[n]) for n, x in enumerate(decoded.states)]
        logits = [model.classes[n](x) for n, x in enumerate(decoded.states)]
        denoising = None
        if slots is not None:
            denoising = (*(jnp.stack(x)[:, :, :count] for x in (logits, boxes)), slots)
        logits = [*(x[:, count:] for x in logits), model.classes[-1](decoded.chosen)]
        boxes = [*(x[:, count:] for x in boxes), decoded.proposals]
        return DinoPredictions(jnp.stack(logits), jnp.stack(boxes), extent, denoising)

    def start(
        self, targets: Targets, slots: Slots, key: Array
    ) -> tuple[Float[Array, "B D C"], Float[Array, "B D 4"], Bool[Array, "T T"]]:
        """The queries of denoising: content, boxes, and the mask of all queries that attend.

        Content of rows that are padding is 0, and their boxes are 1/2.
        """
        boxes, labels = disturb(targets, slots, self.out_features, key)
        real = (targets.real[:, slots.row] & slots.used)[..., None]
        content = jnp.where(real, self.label_embed[...][labels], 0)
        references = jnp.where(real, jax.nn.sigmoid(inverse_sigmoid(boxes)), 0.5)
        return content, references, attention_mask(slots, self.options.queries)

    def result(self, predictions: DinoPredictions, image_size: Grid) -> Detections:
        """The highest-scoring detections of the last layer, in pixels."""
        logits, boxes = (x[-2] for x in (predictions.logits, predictions.boxes))
        extent = extents(predictions.extent, image_size, logits.shape[0])
        return best_detections(logits, boxes, extent, self.options.detections)

    def loss(
        self, predictions: DinoPredictions, batch: Mapping[str, Array], *, key: Array | None = None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The losses of all layers and of denoising, and the fraction of boxes that are detected.

        A box is detected if the query matched with it has its class and overlaps it by half.

        Args:
            predictions: of this head in training.
            batch: `boxes` and `label` as in `Targets`, and `share`, the batch's number of images
                divided by that of its boxes, for every image.
            key: not used.
        """
        targets = real_first(Targets(batch["boxes"], batch["label"]))
        logits, boxes = predictions.logits, predictions.boxes
        assigned = match_targets(logits, boxes, targets)
        total = box_losses(logits, boxes, assigned).total().sum(axis=0)
        if predictions.denoising is not None:
            *predicted, slots = predictions.denoising
            negative = slots.negative | ~slots.used
            labels = jnp.where(negative, -1, targets.labels[:, slots.row])
            slot_targets = Targets(targets.boxes[:, slots.row], labels)
            losses = jax.vmap(box_losses, (0, 0, None, None))(*predicted, slot_targets, slots.used)
            total += losses.total().sum(axis=0) / jnp.maximum(slots.groups, 1)
        last = jax.tree.map(lambda x: x[-2], assigned)
        overlap = iou(to_corners(boxes[-2]), to_corners(last.boxes))
        detected = last.real & (overlap >= 0.5) & (logits[-2].argmax(-1) == last.labels)
        return (total * batch["share"]).mean(), detected.sum() / jnp.maximum(targets.real.sum(), 1)


register_head("dino", Dino, DinoOptions())
