"""Input and output of detection heads: the boxes of a batch, and detections."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from rope_jax.models.heads.boxes import to_centres, to_corners
from rope_jax.positions.grids import Grid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detections:
    """Boxes with classes that a model finds in each image, the highest-scoring first.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels of the model's input.
        scores: 0 to 1; 0 in rows without a detection.
        classes: int32.
        masks: probabilities of the cells of each box to belong to its object; None without masks.
    """

    boxes: Float[Array, "B N 4"]
    scores: Float[Array, "B N"]
    classes: Int[Array, "B N"]
    masks: Float[Array, "B N S S"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """The boxes of a batch, as many rows for every image; or of one image, without that axis.

    Attributes:
        boxes: x and y of the centre, width, height, 0 to 1 within the image's extent.
        labels: classes; -1 in rows that are padding.
        masks: the pixels of each object, eight to a byte along rows; None without masks.
    """

    boxes: Float[Array, "*B M 4"]
    labels: Int[Array, "*B M"]
    masks: UInt8[Array, "*B M H W8"] | None = None

    @property
    def real(self) -> Bool[Array, "*B M"]:
        """False for rows that are padding."""
        return self.labels >= 0


def sides(extent: Int[Array, "*B 2"]) -> Float[Array, "*B 1 4"]:
    """Width, height, width, height of images of the given rows and columns."""
    return jnp.concatenate([extent[..., None, ::-1]] * 2, axis=-1).astype(jnp.float32)


def scale_boxes(corners: Float[Array, "B M 4"], extent: Int[Array, "B 2"]) -> Float[Array, "B M 4"]:
    """Converts boxes in pixels to centres and sizes, 0 to 1 within the extent.

    >>> scale_boxes(jnp.array([[[0.0, 0.0, 5.0, 8.0]]]), jnp.array([[8, 10]])).tolist()
    [[[0.25, 0.5, 0.5, 1.0]]]

    Args:
        corners: x1, y1, x2, y2 in pixels.
        extent: rows and columns of each image.
    """
    return to_centres(corners / sides(extent))


def extents(extent: Int[Array, "B 2"] | None, image_size: Grid, batch: Any) -> Int[Array, "B 2"]:
    """The given extents, or those of images without padding."""
    full_size = jnp.asarray(image_size, jnp.int32)
    return jnp.broadcast_to(full_size, (batch, 2)) if extent is None else extent


def best_detections(
    logits: Float[Array, "B Q K"],
    boxes: Float[Array, "B Q 4"],
    extent: Int[Array, "B 2"],
    number: int,
) -> Detections:
    """The highest-scoring pairs of a box and a class, without suppression of boxes that overlap.

    Args:
        logits: of every class; a box may be detected as several of them.
        boxes: centres and sizes, 0 to 1 within the extent, to which they are clipped.
        extent: rows and columns of each image, in pixels.
        number: of detections; all pairs where they are fewer.
    """
    batch, queries, classes = logits.shape
    scores = jax.nn.sigmoid(logits).reshape(batch, -1)
    scores, best = jax.lax.top_k(scores, min(number, queries * classes))
    corners = jnp.clip(to_corners(boxes), 0, 1) * sides(extent)
    corners = jnp.take_along_axis(corners, best[..., None] // classes, axis=1)
    return Detections(corners, scores, (best % classes).astype(jnp.int32))
