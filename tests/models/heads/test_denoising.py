import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.models.heads.boxes import to_corners
from rope_jax.models.heads.detection import Targets
from rope_jax.models.heads.dino.denoising import disturb, make_slots, real_first

CLASSES = 4


disturb_boxes = jax.jit(lambda targets, slots, key: disturb(targets, slots, CLASSES, key))
slots_for = jax.jit(make_slots, static_argnums=1)


def some_targets(counts, rows, seed=0):
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.02, 0.2, (len(counts), rows, 2))
    centre = rng.uniform(0.3, 0.7, size.shape)
    boxes = np.concatenate([centre, size], axis=-1).astype(np.float32)
    labels = rng.integers(0, CLASSES, boxes.shape[:2]).astype(np.int32)
    labels[np.arange(rows) >= np.array(counts)[:, None]] = -1
    return Targets(jnp.asarray(boxes), jnp.asarray(labels))


@pytest.mark.parametrize(
    ("counts", "rows", "number"),
    [((3, 0, 2), 5, 10), ((1, 1), 4, 7), ((4, 6), 6, 3), ((0, 0), 2, 4)],
)
def test_slots_are_groups_of_positives_and_negatives(counts, rows, number):
    slots = slots_for(some_targets(counts, rows).real, number)
    most = max(*counts, 1)
    groups = max(1, number // most) if any(counts) else 0  # detrex skips denoising without boxes
    assert int(slots.groups) == groups
    assert len(slots.group) == 2 * max(number, rows)
    expected = [
        (group, row, negative)
        for group in range(groups)
        for negative in (False, True)
        for row in range(most)
    ]
    triples = zip(slots.group.tolist(), slots.row.tolist(), slots.negative.tolist(), strict=True)
    assert list(triples)[: len(expected)] == expected
    np.testing.assert_array_equal(slots.used, np.arange(len(slots.group)) < len(expected))


def test_sides_move_by_a_fraction_of_half_the_size():
    targets = some_targets((40, 31), 40)
    slots = slots_for(targets.real, 4000)
    boxes, labels = disturb_boxes(targets, slots, jax.random.key(0))
    before = np.asarray(targets.boxes)[:, slots.row]
    half = np.tile(before[..., 2:] / 2, 2)
    corners = jax.jit(to_corners)
    moved = (np.asarray(corners(boxes)) - np.asarray(corners(before))) / half
    fraction = np.abs(moved)
    negative = np.asarray(slots.negative)
    assert fraction[:, ~negative].max() <= 1.001
    assert 0.999 <= fraction[:, negative].min() < fraction[:, negative].max() <= 2.001
    np.testing.assert_allclose(fraction.mean((0, 2)).mean(where=negative), 1.5, atol=0.01)
    np.testing.assert_allclose(fraction.mean((0, 2)).mean(where=~negative), 0.5, atol=0.01)
    np.testing.assert_allclose((moved > 0).mean(), 0.5, atol=0.01)
    # A quarter of the labels is replaced by any class, possibly the same one.
    real = np.asarray(targets.real)[:, slots.row]
    kept = (np.asarray(labels) == np.asarray(targets.labels)[:, slots.row])[real]
    np.testing.assert_allclose(kept.mean(), 1 - 0.25 * (CLASSES - 1) / CLASSES, atol=0.02)
    whole = Targets(jnp.full_like(targets.boxes, 0.5).at[..., 2:].set(1), targets.labels)
    moved = np.asarray(corners(disturb_boxes(whole, slots, jax.random.key(1))[0]))
    assert ((moved > -1e-6) & (moved < 1 + 1e-6)).all()  # within the image


def test_boxes_precede_padding_in_order():
    targets = some_targets((4, 4), 4)
    labels = jnp.array([[-1, 2, -1, 1], [0, -1, 3, -1]])
    ordered = jax.jit(real_first)(Targets(targets.boxes, labels))
    assert ordered.labels.tolist() == [[2, 1, -1, -1], [0, 3, -1, -1]]
    np.testing.assert_array_equal(ordered.boxes[0, :2], targets.boxes[0, 1::2])
