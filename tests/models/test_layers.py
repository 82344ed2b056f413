"""Layers in bfloat16: outputs, and the precision of float32 gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.layers import PatchProjection, dtypes_of, linear


def made(kind, dtype):
    """A layer with random parameters, and images for it: many, so that sums are long."""
    rngs, dtypes = nnx.Rngs(0), dtypes_of(jnp.dtype(dtype))
    layer = (
        PatchProjection(4, 8, rngs=rngs, dtypes=dtypes)
        if kind == "patches"
        else linear(3, 8, rngs=rngs, dtypes=dtypes, use_bias=kind == "bias")
    )
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), nnx.to_pure_dict(params)
    )
    images, d_out = (
        rng.normal(size=(64, 16, 16, 3)),
        1 + 0.1 * rng.normal(size=(64, *((4, 4) if kind == "patches" else (16, 16)), 8)),
    )
    return lambda params, x: nnx.merge(graph, params, rest)(x), params, images, d_out


@pytest.mark.parametrize("kind", ["bias", "no bias", "patches"])
def test_gradients_of_parameters_are_sums_in_their_own_dtype(kind, x64):
    """Gradients of a bfloat16 layer are the exact ones of its rounded inputs."""
    call, params, images, d_out = made(kind, jnp.bfloat16)
    images, d_out = (jnp.asarray(x, jnp.bfloat16) for x in (images, d_out))
    out, pull = jax.vjp(call, params, images)
    found, d_images = pull(d_out)
    assert (out.dtype, d_images.dtype) == (jnp.bfloat16, jnp.bfloat16)
    exact_call, *_ = made(kind, jnp.float64)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float64), params)
    exact_out, exact_pull = jax.vjp(exact_call, rounded, images.astype(jnp.float64))
    exact, exact_d_images = exact_pull(d_out.astype(jnp.float64))
    for name, gradient in found.items():
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(
            gradient, exact[name], rtol=0, atol=3e-6 * np.abs(exact[name]).max(), err_msg=name
        )
    for ours, theirs in ((out, exact_out), (d_images, exact_d_images)):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), theirs, rtol=0, atol=2**-7 * np.abs(theirs).max()
        )
