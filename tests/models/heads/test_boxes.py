import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.models.heads.boxes import EPSILON, generalised_iou, iou, to_centres, to_corners

SIDE = 12


def some_boxes(rng, count):
    first, second = np.sort(rng.integers(0, SIDE + 1, (2, count, 2)), axis=0)
    return np.concatenate([first, second], axis=1)


def test_overlaps_match_counted_cells():
    """Boxes with corners on a grid, by counting cells; some have no area."""
    rng = np.random.default_rng(0)
    first, second = some_boxes(rng, 40), some_boxes(rng, 30)
    y, x = np.indices((SIDE, SIDE))
    inside = lambda b: (x >= b[0]) & (x < b[2]) & (y >= b[1]) & (y < b[3])
    pairs = jax.jit(lambda a, b: [f(a[:, None], b) for f in (iou, generalised_iou)])
    overlaps = [np.asarray(x) for x in pairs(jnp.float32(first), jnp.float32(second))]
    for i, j in np.ndindex(40, 30):
        a, b = inside(first[i]), inside(second[j])
        shared, union = (a & b).sum(), (a | b).sum()
        around = [*np.minimum(first[i], second[j])[:2], *np.maximum(first[i], second[j])[2:]]
        around = inside(around).sum()
        np.testing.assert_allclose(overlaps[0][i, j], shared / max(union, 1), atol=1e-6)
        expected = shared / (union + EPSILON) - (around - union) / (around + EPSILON)
        np.testing.assert_allclose(overlaps[1][i, j], expected, atol=1e-6)


def test_a_smaller_epsilon_is_exact_for_small_boxes():
    """Two pixels of 1,000 x 1,000, one of them half over the other; losses have detrex's."""
    boxes = np.float32([[0.1, 0.1, 0.101, 0.101], [0.1, 0.1005, 0.101, 0.1015]])
    run = jax.jit(generalised_iou, static_argnames="epsilon")
    np.testing.assert_allclose(run(boxes[:1], boxes, epsilon=1e-12), [1, 1 / 3], rtol=1e-3)
    np.testing.assert_allclose(run(boxes[0], boxes[0]), 1 / 2, rtol=1e-3)
    np.testing.assert_allclose(jax.jit(iou)(boxes[:1], boxes), [1, 1 / 3], rtol=1e-3)


def test_box_formats_are_inverses():
    boxes = some_boxes(np.random.default_rng(1), 20).astype(np.float32)
    back = jax.jit(lambda boxes: to_corners(to_centres(boxes)))(boxes)
    np.testing.assert_array_equal(back, boxes)
