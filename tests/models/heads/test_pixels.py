import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.heads.pixels import pixel_loss
from tests.models.definition import softmax


@pytest.mark.parametrize("divisor", ["all", "valid"])
def test_the_loss_is_the_cross_entropy_of_pixels_with_a_class(divisor):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    labels = rng.integers(0, 5, (2, 6, 8), dtype=np.uint8)
    labels[rng.random(labels.shape) < 0.3] = 255
    probabilities = softmax(np.asarray(resize_maps(jnp.asarray(logits), (6, 8)), np.float64))
    valid = labels != 255
    picked = np.take_along_axis(probabilities, np.where(valid, labels, 0)[..., None], -1)[..., 0]
    count = valid.sum() if divisor == "valid" else labels.size
    expected = -np.log(picked)[valid].sum() / count
    run = jax.jit(jax.value_and_grad(functools.partial(pixel_loss, divisor=divisor)))
    np.testing.assert_allclose(run(logits, labels)[0], expected, rtol=1e-6)
    # Ignored pixels have no gradient: that of an image of them is 0.
    np.testing.assert_array_equal(run(logits, np.full_like(labels, 255))[1], 0)
