import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.system.sharding import make_mesh
from rope_jax.tasks.windows import Windows, resize_image

WEIGHTS = np.random.default_rng(5).standard_normal((3, 4)).astype(np.float32)


def pointwise(weights, images):
    """A model of single pixels, which windows and canvases must not change."""
    return images @ weights


def picture(height, width, seed=0):
    return np.random.default_rng(seed).standard_normal((height, width, 3)).astype(np.float32)


def make(**options):
    return Windows(
        pointwise, mesh=make_mesh(), **{"size": (8, 8), "stride": 5, "batch": 3} | options
    )


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("window", "size"),
    [((8, 8), (19, 11)), (None, (19, 11)), ((8, 8), (5, 20))],  # the last is padded
)
def test_windows_do_not_change_a_pointwise_model(window, size):
    image = picture(*size)
    scores = make(size=window).scores(WEIGHTS, [(image, False)], size)
    np.testing.assert_allclose(scores[: size[0], : size[1]], softmax(image @ WEIGHTS), atol=1e-5)


@pytest.mark.parametrize(
    ("probabilities", "definition"),
    [(jax.nn.softmax, softmax), (lambda scores: scores, lambda scores: scores)],
)
def test_views_are_resized_flipped_back_and_averaged(probabilities, definition):
    """Scores other than logits, like those of Mask2Former, are not changed."""
    image, original = picture(12, 10), (19, 11)
    small = resize_image(image, (8, 9))
    windows = make(probabilities=probabilities)
    views = [(image, False), (image[:, ::-1], True), (small, False)]
    scores = np.asarray(windows.scores(WEIGHTS, views, original))[:19, :11]
    expected = [definition(logits(view, original)) for view in (image, image, small)]
    np.testing.assert_allclose(scores, np.mean(expected, axis=0), atol=1e-5)


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
    scores = windows.scores(None, [(picture(4, 9), False)], (4, 9))[0, :9]
    total, count = np.zeros(9), np.zeros(9)
    for start in (0, 3, 5):
        total[start : start + 4] += np.arange(4)
        count[start : start + 4] += 1
    np.testing.assert_allclose(scores[:, 0], jax.nn.sigmoid(total / count), atol=1e-6)


def test_images_of_similar_sizes_share_programs(caplog):
    def model(weights, images):
        return images @ weights

    windows = Windows(model, size=(8, 8), stride=5, batch=3, mesh=make_mesh())

    def compiled(*sizes):
        """Names of the programs that images of these sizes need."""
        caplog.clear()
        with jax.log_compiles():
            for size in sizes:
                windows.scores(WEIGHTS, [(picture(*size), False)], size)
        return [x.message for x in caplog.records if x.message.startswith("Compiling jit")]

    assert "jit(model)" in str(compiled((17, 20)))
    assert compiled((18, 24), (23, 19), (24, 24)) == []  # one bucket, 24 x 24
    assert "jit(model)" not in str(compiled((33, 40)))
