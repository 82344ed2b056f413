"""Boxes: two notations, intersection over union, and its generalisation.

Functions are elementwise in all axes but the last, which they broadcast: pairs of N and M boxes are
`iou(first[:, None], second)`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6
"""Added to areas before a division, as in detrex, whose boxes are fractions of the image."""


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


def iou(
    first: Float[Array, "*N 4"], second: Float[Array, "*M 4"], epsilon: float = EPSILON
) -> Float[Array, "*K"]:
    """Intersection over union, 0 to 1.

    >>> float(iou(jnp.array([0.0, 0.0, 2.0, 2.0]), jnp.array([1.0, 0.0, 3.0, 2.0]))).__round__(4)
    0.3333

    Args:
        first, second: corners, of shapes that broadcast.
        epsilon: added to the union: boxes without area overlap with none. That of detrex, the
            default, underestimates the overlap of small boxes: by half for a box of one pixel in
            1,000 x 1,000, if boxes are fractions of the image; 1e-12 is below their rounding.
    """
    shared, union = _intersection_and_union(first, second)
    return shared / (union + epsilon)


def generalised_iou(
    first: Float[Array, "*N 4"], second: Float[Array, "*M 4"], epsilon: float = EPSILON
) -> Float[Array, "*K"]:
    """Intersection over union, less the fraction of the smallest enclosing box that is empty.

    Above -1, and lower the farther apart two boxes are (Rezatofighi et al., arXiv 1902.09630,
    algorithm 1).

    >>> boxes = jnp.array([[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0], [3.0, 0.0, 4.0, 1.0]])
    >>> [round(x, 4) for x in generalised_iou(boxes[0], boxes).tolist()]
    [1.0, 0.0, -0.5]

    Args:
        first, second: corners, of shapes that broadcast.
        epsilon: added to both areas before the division, see `iou`.
    """
    shared, union = _intersection_and_union(first, second)
    upper = jnp.minimum(first[..., :2], second[..., :2])
    lower = jnp.maximum(first[..., 2:], second[..., 2:])
    around = area(jnp.concatenate([upper, lower], axis=-1))
    return shared / (union + epsilon) - (around - union) / (around + epsilon)
