"""Boxes: two notations, steps between them, overlaps, and the suppression of those that overlap.

Functions are elementwise in all axes but the last, which they broadcast: pairs of N and M boxes are
`iou(first[:, None], second)`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

EPSILON = 1e-6
"""Smallest divisor of an area; `generalised_iou` adds it instead."""
_LARGEST_STEP = math.log(1000 / 16)  # of the logarithm of a side


def to_corners(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """From centre and size to the upper left and lower right corner.

    >>> to_corners(jnp.array([3.0, 4.0, 2.0, 4.0])).tolist()
    [2.0, 2.0, 4.0, 6.0]

    Args:
        boxes: x and y of the centre, width, height.

    Returns:
        x1, y1, x2, y2.
    """
    centre, size = jnp.split(boxes, 2, axis=-1)
    return jnp.concatenate([centre - size / 2, centre + size / 2], axis=-1)


def to_centres(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N 4"]:
    """The inverse of `to_corners`.

    >>> to_centres(jnp.array([2.0, 2.0, 4.0, 6.0])).tolist()
    [3.0, 4.0, 2.0, 4.0]

    Args:
        boxes: x1, y1, x2, y2.

    Returns:
        x and y of the centre, width, height.
    """
    first, second = jnp.split(boxes, 2, axis=-1)
    return jnp.concatenate([(first + second) / 2, second - first], axis=-1)


def area(boxes: Float[Array, "*N 4"]) -> Float[Array, "*N"]:
    """Areas of boxes given by their corners."""
    width, height = jnp.moveaxis(boxes[..., 2:] - boxes[..., :2], -1, 0)
    return width * height


def _intersection_and_union(
    first: Float[Array, "*N 4"], second: Float[Array, "*M 4"]
) -> tuple[Float[Array, "*K"], Float[Array, "*K"]]:
    upper = jnp.maximum(first[..., :2], second[..., :2])
    lower = jnp.minimum(first[..., 2:], second[..., 2:])
    width, height = jnp.moveaxis(jnp.maximum(lower - upper, 0), -1, 0)
    shared = width * height
    return shared, area(first) + area(second) - shared


def iou(first: Float[Array, "*N 4"], second: Float[Array, "*M 4"]) -> Float[Array, "*K"]:
    """Intersection over union, 0 to 1; boxes without area overlap with none.

    >>> float(iou(jnp.array([0.0, 0.0, 2.0, 2.0]), jnp.array([1.0, 0.0, 3.0, 2.0]))).__round__(4)
    0.3333
    >>> float(iou(jnp.zeros(4), jnp.array([0.0, 0.0, 2.0, 2.0])))
    0.0

    Args:
        first, second: corners, of shapes that broadcast.
    """
    shared, union = _intersection_and_union(first, second)
    return shared / jnp.maximum(union, EPSILON)


def generalised_iou(
    first: Float[Array, "*N 4"], second: Float[Array, "*M 4"]
) -> Float[Array, "*K"]:
    """Intersection over union, less the fraction of the smallest enclosing box that is empty.

    Above -1, and lower the farther apart two boxes are (Rezatofighi et al., arXiv 1902.09630,
    algorithm 1). As in detrex, 1e-6 is added to both areas before the division. That underestimates
    the overlap of small boxes: by half for a box of one pixel in 1,000 x 1,000, if boxes are
    fractions of the image.

    >>> boxes = jnp.array([[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0], [3.0, 0.0, 4.0, 1.0]])
    >>> [round(x, 4) for x in generalised_iou(boxes[0], boxes).tolist()]
    [1.0, 0.0, -0.5]

    Args:
        first, second: corners, of shapes that broadcast.
    """
    shared, union = _intersection_and_union(first, second)
    upper = jnp.minimum(first[..., :2], second[..., :2])
    lower = jnp.maximum(first[..., 2:], second[..., 2:])
    around = area(jnp.concatenate([upper, lower], axis=-1))
    return shared / (union + EPSILON) - (around - union) / (around + EPSILON)


def encode(
    boxes: Float[Array, "*N 4"], targets: Float[Array, "*N 4"], spread: Sequence[float]
) -> Float[Array, "*N 4"]:
    """The steps from boxes to their targets, in units of `spread`.

    They are the moves of the centre in x and y, relative to the box's sides, and the logarithms of
    the ratios of the sides (Ren et al., arXiv 1506.01497, equation 2).

    Args:
        boxes, targets: corners, with areas.
        spread: of the four steps.
    """
    (place, sides), (goal, goal_sides) = (
        jnp.split(to_centres(x), 2, axis=-1) for x in (boxes, targets)
    )
    steps = jnp.concatenate([(goal - place) / sides, jnp.log(goal_sides / sides)], axis=-1)
    return steps / jnp.asarray(spread, steps.dtype)


def decode(
    boxes: Float[Array, "*N 4"],
    steps: Float[Array, "*M 4"],
    spread: Sequence[float],
    limits: Num[Array, " 4"],
) -> Float[Array, "*K 4"]:
    """Corners of the boxes that steps lead to: the inverse of `encode`, clipped to an image.

    >>> boxes, spread = jnp.array([[0.0, 0.0, 4.0, 4.0]]), (0.1, 0.1, 0.2, 0.2)
    >>> decode(boxes, encode(boxes, boxes + 2, spread), spread, jnp.full(4, 5)).tolist()
    [[2.0, 2.0, 5.0, 5.0]]

    Args:
        boxes: corners.
        steps: from `encode`. A side changes at most 62.5-fold, as in mmdetection.
        spread: see `encode`.
        limits: width, height, width, height of the image.
    """
    place, sides = jnp.split(to_centres(boxes), 2, axis=-1)
    moves, growths = jnp.split(steps * jnp.asarray(spread, steps.dtype), 2, axis=-1)
    grown = sides * jnp.exp(jnp.clip(growths, -_LARGEST_STEP, _LARGEST_STEP))
    corners = to_corners(jnp.concatenate([place + sides * moves, grown], axis=-1))
    return jnp.clip(corners, 0, limits)


def suppress(
    boxes: Float[Array, "N 4"], valid: Bool[Array, " N"], threshold: float
) -> Bool[Array, " N"]:
    """Mask of the boxes that no better one overlaps: non-maximum suppression.

    In the order of the boxes, each is kept unless its overlap with a kept one is above the
    threshold. All boxes are judged at once, until nothing changes: round k settles the k-th.

    >>> boxes = jnp.array([[0.0, 0, 4, 4], [1, 0, 5, 4], [2, 0, 6, 4]])
    >>> suppress(boxes, jnp.ones(3, bool), 0.5).tolist()  # the second overlaps both by 0.6
    [True, False, True]

    Args:
        boxes: corners, the best first.
        valid: False for boxes that are neither kept nor suppress others.
        threshold: of intersection over union.
    """
    overlapping = jnp.triu(iou(boxes[:, None], boxes) > threshold, 1)

    def judge(kept: Bool[Array, " N"]) -> Bool[Array, " N"]:
        return valid & ~(overlapping & kept[:, None]).any(axis=0)

    changes = lambda pair: (pair[0] != pair[1]).any()
    step = lambda pair: (pair[1], judge(pair[1]))
    return jax.lax.while_loop(changes, step, (valid, judge(valid)))[1]
