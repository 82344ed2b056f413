"""Choices of Mask R-CNN, which have no gradients: anchors, proposals, samples, detections.

Boxes are corners in pixels. Functions treat one image; their results have static shapes, with rows
that are padding.

Source: Ren et al., arXiv 1506.01497, section 3, as in mmdetection 3.3.0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.heads.boxes import decode, encode, iou, suppress, to_centres, to_corners
from rope_jax.models.heads.detection import Targets, sides
from rope_jax.models.heads.mask_rcnn.options import MaskRcnnOptions
from rope_jax.models.heads.mask_rcnn.regions import cut_masks
from rope_jax.positions.grids import Grid

RATIOS = (0.5, 1.0, 2.0)
"""Heights of anchors divided by their widths."""
ANCHOR_SPREAD, BOX_SPREAD = (1.0, 1.0, 1.0, 1.0), (0.1, 0.1, 0.2, 0.2)
"""Units of the steps from anchors to objects, and from proposals."""
_SCALE = 8  # of an anchor's side to its stride
_PROPOSALS_OVERLAP, _DETECTIONS_OVERLAP = 0.7, 0.5  # above which the lower-scoring box is dropped
_LEAST_SCORE = 0.05  # of a detection


def make_anchors(sizes: Sequence[Grid], stride: int) -> list[Float[np.ndarray, "_A 4"]]:
    """For each map three boxes around the upper left corner of every cell: by row, column, ratio.

    >>> make_anchors([(1, 2)], 4)[0][[1, 4]].tolist()
    [[-16.0, -16.0, 16.0, 16.0], [-12.0, -16.0, 20.0, 16.0]]

    Args:
        sizes: (rows, columns) of the maps, the finest first.
        stride: pixels of a cell of the first map; each further one has twice as many.
    """
    anchors = []
    for level, size in enumerate(sizes):
        step = stride * 2**level
        cells = (step * np.arange(count) for count in size)
        y, x, root = np.meshgrid(*cells, np.sqrt(RATIOS), indexing="ij")
        half_height, half_width = _SCALE / 2 * step * root, _SCALE / 2 * step / root
        corners = [x - half_width, y - half_height, x + half_width, y + half_height]
        anchors.append(np.stack(corners, axis=-1).reshape(-1, 4))
    return anchors


def anchors_inside(anchors: Float[Array, "A 4"], size: Int[Array, " 2"]) -> Bool[Array, " A"]:
    """Mask of the anchors of cells that begin inside a padded image of (rows, columns)."""
    return (jnp.round(to_centres(anchors)[:, 1::-1]) < size).all(axis=-1)


def assign(
    objects: Float[Array, "M 4"],
    real: Bool[Array, " M"],
    boxes: Float[Array, "N 4"],
    valid: Bool[Array, " N"],
    *,
    low: float,
    high: float,
) -> Int[Array, " N"]:
    """The object of each box, from 1; 0 for background, -1 for boxes that are left out.

    A box belongs to the object that it overlaps most if that overlap is at least `high`, and to the
    background if it is below `low`. Then each object gets the boxes that overlap it most, if by
    `low` at least; of several such objects the last one.

    Args:
        objects: boxes of the image's objects.
        real: False for rows of `objects` that are padding.
        boxes: of any kind.
        valid: False for boxes that are left out.
        low, high: intersections over union.
    """
    overlaps = jnp.where(real[:, None] & valid, iou(objects[:, None], boxes), -1)
    overlaps = jax.lax.optimization_barrier(overlaps)  # rounded once, for the test of equality
    best = overlaps.max(axis=0)
    owners = jnp.where(best < low, 0, jnp.where(best >= high, overlaps.argmax(axis=0) + 1, -1))
    most = overlaps.max(axis=1, keepdims=True)
    numbers = jnp.arange(1, len(overlaps) + 1)[:, None]
    last = jnp.where((overlaps == most) & (most >= low), numbers, 0).max(axis=0)
    return jnp.where(valid, jnp.where(last > 0, last, owners), -1)


class Samples(NamedTuple):
    """Sampled boxes, the positive ones first.

    Attributes:
        index: of each box.
        owner: as of `assign`; -1 for rows that are padding.
    """

    index: Int[Array, " S"]
    owner: Int[Array, " S"]


def sample(
    owners: Int[Array, " N"], draws: Float[Array, " N"], number: int, positives: int
) -> Samples:
    """Draws boxes: up to `positives` of those with objects, and background to `number` in all.

    >>> sample(jnp.array([0, 2, -1, 0, 1]), jnp.array([0.1, 0.3, 0.9, 0.4, 0.2]), 3, 1)
    Samples(index=Array([1, 3, 0], dtype=int32), owner=Array([2, 0, 0], dtype=int32))

    Args:
        owners: of `assign`.
        draws: random numbers; the boxes with the largest ones are taken.
        number, positives: of samples; fewer where there are fewer boxes.
    """
    number = min(number, len(owners))
    kinds = (owners > 0, owners == 0)
    first, others = (jax.lax.top_k(jnp.where(x, draws, -1), number)[1] for x in kinds)
    count = jnp.minimum(kinds[0].sum(), positives)
    place = jnp.arange(number)
    index = jnp.where(place < count, first, others[place - count])
    used = place < count + kinds[1].sum()
    return Samples(index, jnp.where(used, owners[index], -1))


def propose(
    logits: Sequence[Float[Array, " _A"]],
    steps: Sequence[Float[Array, "_A 4"]],
    anchors: Sequence[Float[Array, "_A 4"]],
    limits: Float[Array, " 4"],
    numbers: tuple[int, int],
) -> tuple[Float[Array, "P 4"], Float[Array, " P"]]:
    """The highest-scoring boxes that do not overlap another of their map.

    Args:
        logits: of the anchors of each map to have an object.
        steps: from the anchors to boxes.
        anchors: of each map.
        limits: see `decode`.
        numbers: of the boxes of a map that compete, and of the proposals.

    Returns:
        Boxes and scores, in descending order; -1 for rows that are padding.
    """
    candidates, proposals = numbers
    boxes, scores = [], []
    for logit, step, anchor in zip(logits, steps, anchors, strict=True):
        best, chosen = jax.lax.top_k(jax.nn.sigmoid(logit), min(candidates, len(logit)))
        boxes.append(decode(anchor[chosen], step[chosen], ANCHOR_SPREAD, limits))
        valid = (boxes[-1][:, 2:] > boxes[-1][:, :2]).all(axis=1)
        scores.append(jnp.where(suppress(boxes[-1], valid, _PROPOSALS_OVERLAP), best, -1))
    scores = jnp.concatenate(scores)
    scores, best = jax.lax.top_k(scores, min(proposals, len(scores)))
    return jnp.concatenate(boxes)[best], scores


class SampleTargets(NamedTuple):
    """The samples of an image, and what the head should predict for them.

    Attributes:
        anchors: samples of the anchors.
        anchor_steps: from these to their objects.
        boxes: samples of objects and proposals, the positive ones first.
        labels: of these; the number of classes for background, -1 for rows that are padding.
        steps: from these to their objects.
        masks: of the objects inside the first of these boxes.
    """

    anchors: Samples
    anchor_steps: Float[Array, "S 4"]
    boxes: Float[Array, "R 4"]
    labels: Int[Array, " R"]
    steps: Float[Array, "R 4"]
    masks: Bool[Array, "P T T"]


class Example(NamedTuple):
    """An image, as samples are chosen from it.

    Attributes:
        targets: the objects with their masks.
        extent: rows and columns of the image.
        proposals, scores: of `propose`.
        draws: random numbers of the anchors, and of the objects and proposals.
    """

    targets: Targets
    extent: Int[Array, " 2"]
    proposals: Float[Array, "P 4"]
    scores: Float[Array, " P"]
    draws: tuple[Float[Array, " A"], Float[Array, " N"]]


def choose(
    example: Example,
    anchors: Float[Array, "A 4"],
    stride: int,
    options: MaskRcnnOptions,
    classes: int,
) -> SampleTargets:
    """Samples anchors and boxes of an image, and finds their targets.

    Args:
        example: the image.
        anchors: of all maps.
        stride: of the finest map.
        options: of the head.
        classes: number of classes.
    """
    targets, extent, proposals, scores, draws = example
    real = targets.real
    objects = to_corners(targets.boxes) * sides(extent)[0]
    coarse = 8 * stride  # to cells of which images are padded; padding beyond is that of the batch
    valid = anchors_inside(anchors, -(-extent // coarse) * coarse)
    owners = assign(objects, real, anchors, valid, low=0.3, high=0.7)
    number = options.anchor_samples
    chosen_anchors = sample(owners, draws[0], number, number // 2)
    proposed = assign(objects, real, proposals, scores >= 0, low=0.5, high=0.5)
    owners = jnp.concatenate([jnp.where(real, jnp.arange(len(real)) + 1, -1), proposed])
    number, masks = options.box_samples, options.box_samples // 4
    samples = sample(owners, draws[1], number, masks)
    boxes = jnp.concatenate([objects, proposals])[samples.index]
    positive, row = samples.owner > 0, samples.owner - 1
    labels = jnp.where(positive, targets.labels[row], jnp.where(samples.owner == 0, classes, -1))
    return SampleTargets(
        chosen_anchors,
        _steps_to_objects(anchors[chosen_anchors.index], chosen_anchors, objects, ANCHOR_SPREAD),
        boxes,
        labels,
        _steps_to_objects(boxes, samples, objects, BOX_SPREAD),
        cut_masks(targets.masks, row[:masks], boxes[:masks]),
    )


def _steps_to_objects(
    boxes: Float[Array, "S 4"],
    samples: Samples,
    objects: Float[Array, "M 4"],
    spread: Sequence[float],
) -> Float[Array, "S 4"]:
    """The steps from samples to their objects; 0 for those without an object."""
    steps = encode(boxes, objects[samples.owner - 1], spread)
    return jnp.where(samples.owner[:, None] > 0, steps, 0)


def detect(
    proposals: Float[Array, "P 4"],
    probabilities: Float[Array, "P K"],
    steps: Float[Array, "P K 4"],
    limits: Float[Array, " 4"],
    number: int,
) -> tuple[Float[Array, "D 4"], Float[Array, " D"], Int[Array, " D"]]:
    """The highest-scoring pairs of a proposal and a class that no other of their class overlaps.

    Args:
        proposals: of the image.
        probabilities: of the classes, without background; 0 for rows that are padding.
        steps: from a proposal to the box of each class.
        limits: see `decode`.
        number: of detections.

    Returns:
        Boxes, scores and classes, in descending order of scores; rows that are padding are 0.
    """
    boxes = decode(proposals[:, None], steps, BOX_SPREAD, limits)

    def suppress_class(pair: tuple[Array, Array]) -> Float[Array, " P"]:
        scores, boxes = pair
        order = jnp.argsort(-scores, stable=True)
        kept = suppress(boxes[order], scores[order] > _LEAST_SCORE, _DETECTIONS_OVERLAP)
        return jnp.zeros_like(scores).at[order].set(jnp.where(kept, scores[order], 0))

    scores = jax.lax.map(suppress_class, (probabilities.T, boxes.swapaxes(0, 1))).T
    scores, best = jax.lax.top_k(scores.reshape(-1), min(number, scores.size))
    boxes = jnp.where(scores[:, None] > 0, boxes.reshape(-1, 4)[best], 0)
    classes = jnp.where(scores > 0, best % probabilities.shape[1], 0)
    return boxes, scores, classes.astype(jnp.int32)
