"""Costs of matching and losses of detection: focal loss of classes, L1 and GIoU of boxes.

Boxes are centres and sizes, 0 to 1 within the image's extent. Losses are sums for every image: a
batch divides them by the number of its boxes.

Source: Zhang et al., arXiv 2203.03605, and detrex.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.heads.boxes import generalised_iou, to_corners
from rope_jax.models.heads.detection import Targets
from rope_jax.models.heads.matching import match_layers

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss (Lin et al., arXiv 1708.02002)
_LEAST = 1e-8  # probability in the logarithm of a cost


class BoxLosses(NamedTuple):
    """Sums over an image, without weights."""

    classes: Float[Array, "*B"]
    l1: Float[Array, "*B"]
    giou: Float[Array, "*B"]

    def total(self) -> Float[Array, "*B"]:
        """The weighted sum."""
        return self.classes + 5 * self.l1 + 2 * self.giou


def costs(
    logits: Float[Array, "Q K"], boxes: Float[Array, "Q 4"], targets: Targets
) -> Float[Array, "M Q"]:
    """Costs of matching each target of an image with each query.

    Args:
        logits, boxes: of the queries.
        targets: of one image, without the axis of the batch.
    """
    p = jax.nn.sigmoid(logits.T[targets.labels])  # of rows that are padding: of any class
    positive = -ALPHA * (1 - p) ** GAMMA * jnp.log(p + _LEAST)
    negative = -(1 - ALPHA) * p**GAMMA * jnp.log(1 - p + _LEAST)
    l1 = jnp.abs(targets.boxes[:, None] - boxes).sum(axis=-1)
    giou = generalised_iou(to_corners(targets.boxes)[:, None], to_corners(boxes))
    return 2 * (positive - negative) + 5 * l1 - 2 * giou


def focal_loss(logits: Float[Array, "*N K"], classes: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """The focal loss of sigmoids, summed over classes.

    >>> [round(x, 4) for x in focal_loss(jnp.zeros((2, 3)), jnp.array([0, -1])).tolist()]
    [0.3033, 0.3899]

    Args:
        logits: of K classes.
        classes: the true class; -1 for none of them.
    """
    right = classes[..., None] == jnp.arange(logits.shape[-1])
    signed = jnp.where(right, logits, -logits)
    weights = jnp.where(right, ALPHA, 1 - ALPHA) * jax.nn.sigmoid(-signed) ** GAMMA
    return -(weights * jax.nn.log_sigmoid(signed)).sum(axis=-1)


def assign(targets: Targets, query: Int[Array, " M"], queries: int) -> Targets:
    """The target of every query of an image, with label -1 where it has none.

    Args:
        targets: of one image, without the axis of the batch.
        query: of each target, from `match`.
        queries: their number.
    """
    boxes = jnp.zeros((queries, 4), targets.boxes.dtype).at[query].set(targets.boxes)
    return Targets(boxes, jnp.full(queries, -1, targets.labels.dtype).at[query].set(targets.labels))


def match_targets(
    logits: Float[Array, "R B Q K"], boxes: Float[Array, "R B Q 4"], targets: Targets
) -> Targets:
    """Assigns targets to the queries of R layers, by the cheapest matching of each image."""
    batch_costs = jax.vmap(jax.vmap(costs), (0, 0, None))  # targets have no axis of layers
    match_costs = batch_costs(*jax.lax.stop_gradient((logits, boxes)), targets)
    assign_each = jax.vmap(jax.vmap(functools.partial(assign, queries=logits.shape[2])), (None, 0))
    return assign_each(targets, match_layers(match_costs, targets.real))


def box_losses(
    logits: Float[Array, "*B Q K"],
    boxes: Float[Array, "*B Q 4"],
    assigned: Targets,
    used: Bool[Array, " Q"] | bool = True,
) -> BoxLosses:
    """The losses of every image.

    Args:
        logits, boxes: of the queries.
        assigned: the target of every query.
        used: False for queries that are ignored.
    """
    real = assigned.real & used
    classes = jnp.where(used, focal_loss(logits, assigned.labels), 0).sum(axis=-1)
    l1 = jnp.abs(boxes - assigned.boxes).sum(axis=-1)
    giou = 1 - generalised_iou(to_corners(boxes), to_corners(assigned.boxes))
    return BoxLosses(classes, *(jnp.where(real, x, 0).sum(axis=-1) for x in (l1, giou)))
