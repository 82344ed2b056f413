"""Losses of Mask R-CNN, of a whole batch.

Source: He et al., arXiv 1703.06870, and mmdetection 3.3.0. mmdetection divides by the same counts,
per GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rope_jax.models.heads.mask_rcnn.choices import SampleTargets

_EPSILON = float(jnp.finfo(jnp.float32).eps)  # which mmdetection adds to divisors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainPredictions:
    """Predictions for the samples of a batch.

    Attributes:
        targets: the samples of every image.
        anchor_logits, anchor_steps: of the sampled anchors.
        logits: of the classes of sampled boxes; the last one is that of background.
        steps: from the sampled boxes to those of their classes.
        masks: logits of the masks of the classes of the first sampled boxes.
    """

    targets: SampleTargets
    anchor_logits: Float[Array, "B S"]
    anchor_steps: Float[Array, "B S 4"]
    logits: Float[Array, "B R K1"]
    steps: Float[Array, "B R 4"]
    masks: Float[Array, "B P T T"]


def region_losses(predictions: TrainPredictions) -> dict[str, Float[Array, ""]]:
    """The five losses by mmdetection's names; the training loss is their sum.

    The losses of anchors are divided by the number of sampled ones (of either kind at least one in
    an image), those of boxes by the number of sampled boxes, and that of masks by its pixels.
    """
    targets = predictions.targets
    owners, labels = targets.anchors.owner, targets.labels
    background = predictions.logits.shape[-1] - 1
    kinds = (owners > 0, owners == 0)
    anchors = sum(jnp.maximum(kind.sum(axis=1), 1).sum() for kind in kinds) + _EPSILON
    used = labels >= 0
    objects, boxes = used & (labels < background), used.sum()
    entropy = optax.sigmoid_binary_cross_entropy
    by_class = optax.softmax_cross_entropy_with_integer_labels(predictions.logits, labels)
    masked = objects[:, : predictions.masks.shape[1], None, None]
    pixels = masked.sum() * targets.masks[0, 0].size

    def total(where: Array, values: Array) -> Float[Array, ""]:
        return jnp.where(where, values, 0).sum()

    anchor_distance = jnp.abs(predictions.anchor_steps - targets.anchor_steps)
    distance = jnp.abs(predictions.steps - targets.steps)
    return {
        "loss_rpn_cls": total(owners >= 0, entropy(predictions.anchor_logits, kinds[0])) / anchors,
        "loss_rpn_bbox": total(kinds[0][..., None], anchor_distance) / anchors,
        "loss_cls": total(used, by_class) / (jnp.maximum(boxes, 1) + _EPSILON),
        "loss_bbox": total(objects[..., None], distance) / (boxes + _EPSILON),
        "loss_mask": total(masked, entropy(predictions.masks, targets.masks))
        / jnp.maximum(pixels, 1),
    }
