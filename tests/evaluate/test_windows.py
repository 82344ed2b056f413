import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.evaluate.windows import Windows, bucket, resize_image, window_starts
from rope_jax.sharding import make_mesh

WEIGHTS = np.random.default_rng(5).standard_normal((3, 4)).astype(np.float32)


def pointwise(weights, images):
    """A model that looks at single pixels: windows and canvases must not show."""
    return images @ weights


def picture(height, width, seed=0):
    return np.random.default_rng(seed).standard_normal((height, width, 3)).astype(np.float32)


def make(**options):
    return Windows(
        pointwise, mesh=make_mesh(), **{"size": (8, 8), "stride": 5, "batch": 3} | options
    )


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize("size", [(8, 8), None])
def test_windows_of_a_pointwise_model_do_not_show(size):
    image = picture(19, 11)
    scores = make(size=size).scores(WEIGHTS, [(image, False)], (19, 11))
    np.testing.assert_allclose(scores[:19, :11], softmax(image @ WEIGHTS), atol=1e-5)


def test_views_are_resized_to_the_original_flipped_back_and_averaged():
    image, original = picture(12, 10), (19, 11)
    views = [(image, False), (image[:, ::-1], True), (resize_image(image, (8, 9)), False)]
    found = np.asarray(make().scores(WEIGHTS, views, original))[:19, :11]
    wanted = [softmax(logits(view, original)) for view in (image, image, views[2][0])]
    np.testing.assert_allclose(found, np.mean(wanted, axis=0), atol=1e-5)


def logits(view, original):
    """Bilinear resizing of each class's logits."""
    planes = np.moveaxis(view @ WEIGHTS, -1, 0)
    return np.stack([resize_image(np.stack([p] * 3, -1), original)[..., 0] for p in planes], -1)


def test_overlapping_windows_are_averaged_before_the_softmax():
    """A model that returns the place within the window: the mean over windows is known."""

    def place(weights, images):
        columns = jnp.arange(images.shape[2], dtype=jnp.float32)
        return jnp.broadcast_to(jnp.stack([columns, 0 * columns], -1), (*images.shape[:3], 2))

    windows = Windows(place, size=(4, 4), stride=3, batch=2, mesh=make_mesh())
    found = windows.scores(None, [(picture(4, 9), False)], (4, 9))[0, :9]
    total, count = np.zeros(9), np.zeros(9)
    for start in (0, 3, 5):
        total[start : start + 4] += np.arange(4)
        count[start : start + 4] += 1
    np.testing.assert_allclose(found[:, 0], jax.nn.sigmoid(total / count), atol=1e-6)


def test_scores_that_are_no_logits_are_averaged_over_windows_and_views():
    """As Mask2Former's: no softmax makes differences between views smaller."""
    image, original = picture(12, 10), (19, 11)
    views = [(image, False), (resize_image(image, (8, 9)), False)]
    own = make(probabilities=lambda scores: scores)
    found = np.asarray(own.scores(WEIGHTS, views, original))[:19, :11]
    wanted = [logits(view, original) for view, _ in views]
    np.testing.assert_allclose(found, np.mean(wanted, axis=0), atol=1e-5)


def test_images_of_all_sizes_share_programs():
    windows = make()
    for height, width in [(17, 20), (18, 24), (23, 19), (24, 24)]:  # one bucket, 24 x 24
        windows.scores(WEIGHTS, [(picture(height, width), False)], (height, width))
    assert windows.programs() == {"model": 1, "windows": 1, "canvas": 1}
    windows.scores(WEIGHTS, [(picture(33, 40), False)], (17, 17))
    assert windows.programs() == {"model": 1, "windows": 2, "canvas": 2}


def test_images_smaller_than_a_window_are_padded():
    image = picture(5, 20)
    found = make().scores(WEIGHTS, [(image, False)], (5, 20))
    np.testing.assert_allclose(found[:5, :20], softmax(image @ WEIGHTS), atol=1e-5)


def test_windows_end_with_the_image():
    assert window_starts(512, 512, 341) == [0]
    assert window_starts(683, 512, 341) == [0, 171]
    assert window_starts(1000, 512, 341) == [0, 341, 488]
    assert [bucket(n) for n in (2, 3, 4, 5, 6, 7, 9, 13, 1024, 1025)] == [
        2, 3, 4, 6, 6, 8, 12, 16, 1024, 1536,
    ]  # fmt: skip
