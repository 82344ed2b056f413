"""Layers in bfloat16: outputs, and the precision of float32 gradients. Dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models import layers
from rope_jax.models.layers import (
    PatchProjection,
    dropout,
    layer_dtypes,
    layer_norm,
    layer_scale,
    linear,
)


def make_layer(kind, dtype):
    """A layer with random parameters, and images for it: many, so that sums are long."""
    rngs, dtypes = nnx.Rngs(0), layer_dtypes(jnp.dtype(dtype))
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
    side = 4 if kind == "patches" else 16
    images, d_out = rng.normal(size=(64, 16, 16, 3)), rng.normal(1, 0.1, (64, side, side, 8))
    return lambda params, x: nnx.merge(graph, params, rest)(x), params, images, d_out


@functools.partial(jax.jit, static_argnums=0)
def differentiate(call, params, images, d_out):
    """The output, and the gradients of parameters and images."""
    out, pull = jax.vjp(call, params, images)
    return out, *pull(d_out)


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("kind", ["bias", "no bias", "patches"])
def test_parameter_gradients_are_summed_in_float32(kind, instructions, x64, monkeypatch):
    """Gradients of a bfloat16 layer are the exact ones of its rounded inputs."""
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: instructions)
    call, params, images, d_out = make_layer(kind, jnp.bfloat16)
    images, d_out = (jnp.asarray(x, jnp.bfloat16) for x in (images, d_out))
    out, grads, d_images = differentiate(call, params, images, d_out)
    assert (out.dtype, d_images.dtype) == (jnp.bfloat16, jnp.bfloat16)
    exact_call, *_ = make_layer(kind, jnp.float64)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float64), params)
    images, d_out = (np.asarray(x, np.float64) for x in (images, d_out))
    exact_out, exact, exact_d_images = differentiate(exact_call, rounded, images, d_out)
    # Rounding of a float32 sum, in any order, is judged by the sizes of its terms; that of plain
    # products, in XLA's order, also by the largest sum.
    _, sizes, _ = differentiate(exact_call, rounded, abs(images), abs(d_out))
    for name, gradient in grads.items():
        assert gradient.dtype == jnp.float32
        errors = np.abs(gradient - exact[name])
        assert np.all(errors < 2**-24 * sizes[name]), name
        assert instructions or errors.max() <= 3e-6 * np.abs(exact[name]).max(), name
    for result, reference in ((out, exact_out), (d_images, exact_d_images)):
        np.testing.assert_allclose(
            np.asarray(result, np.float64), reference, rtol=0, atol=2**-7 * np.abs(reference).max()
        )


@pytest.mark.parametrize(
    ("dtype", "platform", "halves"),
    [("bfloat16", "cpu", True), ("bfloat16", "cuda", False), ("float32", "cpu", False)],
)
def test_products_in_bfloat16_have_the_form_that_is_fast_on_a_cpu(
    dtype, platform, halves, monkeypatch
):
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: True)
    x, kernel, d_out = (jnp.ones(shape, dtype) for shape in ((6, 4), (4, 2), (6, 2)))
    layer = lambda x, kernel: layers.affine(x, kernel, None)
    backward = jax.jit(lambda x, kernel, d_out: jax.vjp(layer, x, kernel)[1](d_out))
    lowered = backward.trace(x, kernel, d_out).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert text.count("contracting_dims = [0, 1] x [0, 1]") == halves
    assert text.count("contracting_dims = [1, 2] x [1, 2]") == halves


def apply_normalized(dtype, params, x, *, apart):
    """A linear layer between a layer norm and a LayerScale, given to it or applied by themselves.

    Computed in `dtype`, with parameters of their own dtype.
    """
    rngs, dtypes = nnx.Rngs(0), layer_dtypes(jnp.dtype(dtype))
    norm = layer_norm(12, 1e-6, rngs=rngs, dtypes=dtypes)
    layer = linear(12, 8, rngs=rngs, dtypes=dtypes)
    scale = layer_scale(8, 1.0, dtypes["param_dtype"])
    graph, _, rest = nnx.split(nnx.List([norm, layer, scale]), nnx.Param, ...)
    norm, layer, scale = nnx.merge(graph, params, rest)
    return scale(layer(norm(x))) if apart else layer(x, norm, layer_scale=scale)


def test_norm_and_scale_folded_into_weights_keep_gradients(x64):
    rng = np.random.default_rng(0)
    params = {
        0: {"scale": 1 + 0.3 * rng.normal(size=12), "bias": rng.normal(size=12)},
        1: {"kernel": rng.normal(size=(12, 8)), "bias": rng.normal(size=8)},
        2: {"gamma": rng.normal(size=8)},
    }
    as_dtype = lambda tree, dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    x, d_out = as_dtype(
        (3 + 2 * rng.normal(size=(64, 49, 12)), rng.normal(size=(64, 49, 8))), "bfloat16"
    )

    def run(dtype, wide, apart):
        call = lambda params, x: apply_normalized(dtype, params, x, apart=apart)

        @jax.jit
        def pull_back(params, x, d_out):
            out, pull = jax.vjp(call, params, x)
            return out, *pull(d_out)

        out, d_params, d_x = pull_back(as_dtype(params, wide), x.astype(dtype), d_out.astype(dtype))
        assert all(leaf.dtype == jnp.dtype(wide) for leaf in jax.tree.leaves(d_params))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), (out, d_x, d_params))

    exact = run("float64", "float64", apart=True)

    def error(result):
        return [
            np.abs(value - reference).max() / np.abs(reference).max()
            for value, reference in zip(*map(jax.tree.leaves, (result, exact)), strict=True)
        ]

    assert max(error(run("float32", "float64", apart=False))) < 1e-6
    folded_errors, apart = (error(run("bfloat16", "float32", apart)) for apart in (False, True))
    assert max(folded_errors) < 2**-6
    assert all(
        ours < 1.5 * theirs + 2**-12 for ours, theirs in zip(folded_errors, apart, strict=True)
    )


@pytest.mark.parametrize(("rate", "shared"), [(0.1, ()), (0.25, (1, 2))])
def test_dropout_drops_values_or_channels_and_keeps_the_mean(rate, shared):
    x = jnp.ones((100, 4, 4, 64))
    dropped = np.asarray(dropout(x, rate, jax.random.key(0), shared=shared))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / (1 - rate))}
    assert (dropped == dropped[:, :1, :1]).all() == bool(shared)
    draws = 100 * 64 * (1 if shared else 16)
    deviation = (rate * (1 - rate) / draws) ** 0.5
    assert abs((dropped == 0).mean() - rate) < 5 * deviation
    assert dropout(x, rate, None, shared=shared) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
    assert dropout(x.astype(jnp.bfloat16), rate, jax.random.key(0)).dtype == jnp.bfloat16
