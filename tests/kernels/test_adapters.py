"""Flax' attention modules with `flax_attention_fn`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from rope_jax_kernels import Global, Rotation, Window, attention
from rope_jax_kernels.adapters import flax_attention_fn

ROTATION = Rotation(
    jnp.stack(jnp.indices((2, 3)), axis=-1).reshape(6, 2).astype(jnp.float32),
    jax.random.normal(jax.random.key(0), (2, 2, 4)),
)
X = np.random.default_rng(1).standard_normal((2, 6, 16)).astype(np.float32)


def test_flax_modules_rotate():
    attend = flax_attention_fn(ROTATION)
    module = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    @jax.jit
    def outputs(x):
        module = nnx.merge(graph, state)
        q, k, v = (layer(x) for layer in (module.query, module.key, module.value))
        expected = [
            module.out(attention(q, k, v, pattern=Global(), rotation=r)) for r in (ROTATION, None)
        ]
        return module(x), *expected

    result, rotated, plain = outputs(X)
    np.testing.assert_allclose(result, rotated, atol=1e-6)
    assert np.abs(result - plain).max() > 1e-3
    linen_module = linen.MultiHeadDotProductAttention(2, attention_fn=attend)
    out, _ = jax.eval_shape(lambda x: linen_module.init_with_output(jax.random.key(0), x, x), X)
    assert out.shape == X.shape


def test_windows_need_the_grid():
    window = Window(size=(2, 3))
    with pytest.raises(ValueError, match=r"pass grid=\(H, W\)"):
        flax_attention_fn(ROTATION, pattern=window)
    with pytest.raises(ValueError, match=r"and none for Global\(\)"):
        flax_attention_fn(ROTATION, grid=(4, 3))
    attend = flax_attention_fn(ROTATION, pattern=window, grid=(4, 3))
    q = jnp.asarray(np.random.default_rng(2).standard_normal((1, 12, 2, 8)), jnp.float32)

    @jax.jit
    def attend_twice(q):
        as_map = [q.reshape(1, 4, 3, 2, 8)] * 3
        return attend(q, q, q), attention(*as_map, pattern=window, rotation=ROTATION)

    result, expected = attend_twice(q)
    np.testing.assert_allclose(result, expected.reshape(q.shape), atol=1e-6)
    two = jnp.concatenate([q, q])  # 24 tokens in all, as one map of the grid below has
    for x in (q, two):
        with pytest.raises(ValueError, match="query has 12 tokens, but grid=4x6 has 24"):
            flax_attention_fn(pattern=window, grid=(4, 6))(x, x, x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": jnp.ones((6, 6), bool)}, "a mask"),
        ({"dropout_rate": 0.1}, "attention dropout"),
        ({"is_causal": True}, "causal attention"),
        ({"module": object()}, "attention weights"),
        ({"input_positions": jnp.arange(6)}, "input_positions, as the rotation"),
    ],
)
def test_unsupported_arguments_are_refused(settings, message):
    q = jnp.ones((1, 6, 2, 8))
    with pytest.raises(ValueError, match=message):
        flax_attention_fn(ROTATION)(q, q, q, **settings)
