import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from rope_jax_kernels import Global, Rotation, Window, attention
from rope_jax_kernels.adapters import flax_attention_fn


@pytest.fixture(scope="module")
def rotation():
    coords = jnp.stack(jnp.meshgrid(jnp.arange(2.0), jnp.arange(3.0), indexing="ij"), -1).reshape(-1, 2)
    return Rotation(coords, jax.random.normal(jax.random.key(0), (2, 2, 4)))


def test_nnx_and_linen_modules_rotate(rotation):
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    attend = flax_attention_fn(rotation)
    module = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    ours = module(x)
    q, k, v = (layer(x) for layer in (module.query, module.key, module.value))
    np.testing.assert_allclose(ours, module.out(attention(q, k, v, pattern=Global(), rotation=rotation)), atol=1e-6)
    assert float(jnp.abs(ours - nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))(x)).max()) > 1e-3
    theirs = linen.MultiHeadDotProductAttention(2, attention_fn=attend)
    variables = theirs.init(jax.random.key(0), x, x)
    assert theirs.apply(variables, x, x).shape == x.shape


def test_windows_need_the_grid(rotation):
    with pytest.raises(ValueError, match=r"pass grid=\(H, W\)"):
        flax_attention_fn(rotation, pattern=Window(size=(2, 3)))
    attend = flax_attention_fn(rotation, pattern=Window(size=(2, 3)), grid=(4, 3))
    q = jax.random.normal(jax.random.key(2), (1, 12, 2, 8))
    expected = attention(*[q.reshape(1, 4, 3, 2, 8)] * 3, pattern=Window(size=(2, 3)), rotation=rotation)
    np.testing.assert_allclose(attend(q, q, q), expected.reshape(q.shape), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": jnp.ones((6, 6), bool)}, "a mask"),
        ({"dropout_rate": 0.1}, "attention dropout"),
        ({"is_causal": True}, "causal attention"),
        ({"module": object()}, "attention weights"),
    ],
)
def test_what_has_no_place_is_refused(rotation, settings, message):
    q = jnp.ones((1, 6, 2, 8))
    with pytest.raises(ValueError, match=message):
        flax_attention_fn(rotation)(q, q, q, **settings)
