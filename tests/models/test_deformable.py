import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.deformable import DeformableAttention, find_corners, gather_sum
from rope_jax.models.layers import layer_dtypes

SIZES = [(3, 5), (2, 2)]
TOKENS = sum(h * w for h, w in SIZES)


@pytest.mark.usefixtures("x64")
def test_gradients_match_finite_differences():
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, TOKENS, 1, 2))
    locations, weights = (
        rng.uniform(-0.1, 1.1, (1, 2, 1, 2, 2, 2)),
        rng.uniform(0, 1, (1, 2, 1, 2, 2)),
    )

    def total(values, locations, weights):
        return jnp.sin(gather_sum(values, *find_corners(locations, weights, SIZES))).sum()

    arguments = (values, locations, weights)
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arguments)
    run = jax.jit(total)
    for number, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        moved = [
            [x + s * 1e-6 * direction if i == number else x for i, x in enumerate(arguments)]
            for s in (1, -1)
        ]
        slope = (run(*moved[0]) - run(*moved[1])) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6)


def test_initial_points_lie_in_eight_directions():
    layer = DeformableAttention(
        16, levels=2, heads=8, points=3, rngs=nnx.Rngs(0), dtypes=layer_dtypes(jnp.dtype("float32"))
    )
    offsets = np.asarray(layer.offset.bias[...]).reshape(8, 2, 3, 2)
    steps = np.array([(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)])
    expected = steps[:, None, None] * np.arange(1, 4)[:, None]
    np.testing.assert_allclose(offsets, np.tile(expected, (1, 2, 1, 1)), atol=1e-6)
    assert not np.asarray(layer.offset.kernel[...]).any()
    assert not np.asarray(layer.weight.kernel[...]).any()
