"""Denoising: queries in training that start from disturbed boxes of the targets.

They show the decoder, without any matching, which boxes to refine and which to reject.

Source: Zhang et al., arXiv 2203.03605, section 3.3 (contrastive denoising), as in detrex.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rope_jax.models.heads.boxes import to_centres, to_corners
from rope_jax.models.heads.detection import Targets

_REPLACED = 0.25  # probability of another label


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The places of denoising queries.

    With m boxes in the image that has most of them, a group has 2 m slots: for every row of the
    targets a positive one, which is near its box, and then for every row a negative one. The number
    of slots is fixed. As many groups as fit are used; their number depends on the batch.

    Attributes:
        group: of each slot; those of `groups` and above are not used.
        row: of the targets, to which a slot belongs.
        negative: whether a slot is to be rejected.
        groups: their number; 0 for a batch without boxes.
    """

    group: Int[Array, " D"]
    row: Int[Array, " D"]
    negative: Bool[Array, " D"]
    groups: Int[Array, ""]

    @property
    def used(self) -> Bool[Array, " D"]:
        """True for slots of one of the groups."""
        return self.group < self.groups


def make_slots(real: Bool[Array, "B M"], number: int) -> Slots:
    """Makes the slots for the boxes of a batch.

    >>> slots = make_slots(jnp.array([[True, True, False], [True, False, False]]), 4)
    >>> slots.group.tolist(), slots.row.tolist(), int(slots.groups)
    ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1], 2)

    Args:
        real: True for rows of the targets that are boxes, the first ones of each image.
        number: of pairs of a positive and a negative slot, of all groups; there are more where
            targets have more rows, for a group of them.
    """
    boxes = real.sum(axis=1).max()
    most = jnp.maximum(boxes, 1)
    slots = jnp.arange(2 * max(number, real.shape[1]))
    group, place = slots // (2 * most), slots % (2 * most)
    groups = jnp.where(boxes > 0, jnp.maximum(number // most, 1), 0)
    return Slots(group, place % most, place >= most, groups)


def attention_mask(slots: Slots, queries: int) -> Bool[Array, "T T"]:
    """Mask of queries that attend: all to the chosen ones, slots also to those of their group.

    >>> attention_mask(make_slots(jnp.array([[True]]), 2), 1).astype(int).tolist()
    [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]

    Args:
        slots: of denoising, which come first.
        queries: number of chosen ones.
    """
    group = jnp.concatenate([slots.group, jnp.full(queries, -1)])
    return (group[:, None] == group) | (group == -1)


def disturb(
    targets: Targets, slots: Slots, num_classes: int, key: Array
) -> tuple[Float[Array, "B D 4"], Int[Array, "B D"]]:
    """Boxes and labels of all slots, disturbed.

    Every side of a box moves by less than half of the box's size, of a negative slot by half of it
    to all of it, towards either side. A label is replaced with probability 1/4, by any.

    Args:
        targets: boxes are the first rows of each image.
        slots: of denoising.
        num_classes: that labels are drawn from.
        key: of this step.
    """
    keys = jax.random.split(key, 4)
    boxes, labels = targets.boxes[:, slots.row], targets.labels[:, slots.row]
    distance = jax.random.uniform(keys[0], boxes.shape, boxes.dtype) + slots.negative[:, None]
    sign = jax.random.rademacher(keys[1], boxes.shape, boxes.dtype)
    half = jnp.tile(boxes[..., 2:] / 2, 2)
    moved = jnp.clip(to_corners(boxes) + sign * distance * half, 0, 1)
    replaced = jax.random.bernoulli(keys[2], _REPLACED, labels.shape)
    random_labels = jax.random.randint(keys[3], labels.shape, 0, num_classes, labels.dtype)
    return to_centres(moved), jnp.where(replaced, random_labels, labels)


def real_first(targets: Targets) -> Targets:
    """Targets whose boxes are the first rows of each image, in the same order."""
    order = jnp.argsort(~targets.real, axis=1, stable=True)
    boxes = jnp.take_along_axis(targets.boxes, order[..., None], axis=1)
    return Targets(boxes, jnp.take_along_axis(targets.labels, order, axis=1))
