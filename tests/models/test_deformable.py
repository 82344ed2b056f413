import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.layers import layer_dtypes


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
