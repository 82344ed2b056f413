import jax
import numpy as np

from rope_jax.models.heads.boxes import generalised_iou, iou


def test_a_smaller_epsilon_is_exact_for_small_boxes():
    """Two pixels of 1,000 x 1,000, one of them half over the other; losses have detrex's."""
    boxes = np.float32([[0.1, 0.1, 0.101, 0.101], [0.1, 0.1005, 0.101, 0.1015]])
    run = jax.jit(generalised_iou, static_argnames="epsilon")
    np.testing.assert_allclose(run(boxes[:1], boxes, epsilon=1e-12), [1, 1 / 3], rtol=1e-3)
    np.testing.assert_allclose(run(boxes[0], boxes[0]), 1 / 2, rtol=1e-3)
    boxes = np.concatenate([boxes, 0 * boxes[:1]])  # the last one has no area
    overlaps = jax.jit(iou)(boxes[:, None], boxes)
    np.testing.assert_allclose(overlaps[::2], [[1, 1 / 3, 0], [0, 0, 0]], rtol=1e-3)
