"""A layer in bfloat16 is as close to float64 as bfloat16 allows: its terms are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.attention import SelfAttention, _spread
from rope_jax_kernels import Global
from tests.positions.schemes import ALL, compiled, compiled_terms, trained_scheme

pytestmark = pytest.mark.usefixtures("x64")

GRID, HEADS, WIDTH = (6, 7), 2, 32
SETTINGS = {"depth": 1, "heads": HEADS, "grid": GRID, "prefix": 1, "embed_prefix": 1}


def typed_scheme(text, dtype):
    return trained_scheme(text, dtype=np.dtype(dtype), **SETTINGS)


def make_layer(dtype, param_dtype):
    layer = SelfAttention(
        WIDTH, HEADS, rngs=nnx.Rngs(0), dtypes={"dtype": dtype, "param_dtype": param_dtype}
    )
    rng = np.random.default_rng(1)
    for _, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        values = (rng.standard_normal(param.shape) / 4).astype(np.float32)
        param.set_value(jax.device_put(values.astype(param_dtype)))
    return layer


def output(position, dtype, tokens):
    """The output of the layer of a model."""
    layer = make_layer(jnp.dtype(dtype), position.stage.dtype)
    run = lambda position: layer(
        tokens.astype(dtype), GRID, Global(), position.terms(GRID).layer(0)
    )
    return compiled(run, position)


def plain(position, tokens):
    """Computes the formulas with all numbers in bfloat16: angles, biases, logits and weights."""
    layer = make_layer(jnp.dtype(jnp.bfloat16), position.stage.dtype)
    terms = compiled_terms(position, GRID).layer(0)
    terms = jax.tree.map(lambda x: x.astype(jnp.bfloat16), terms)
    bias_of_pairs = 0 if terms.bias is None else _spread(terms.bias, GRID, 1)

    def rotate(x):
        if terms.rotation is None:
            return x
        theta = jnp.einsum("la,nar->lnr", terms.rotation.coords, terms.rotation.freqs)
        first, second = jnp.split(x[..., : 2 * theta.shape[-1]], 2, axis=-1)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        halves = (
            first * cos - second * sin,
            second * cos + first * sin,
            x[..., 2 * theta.shape[-1] :],
        )
        return jnp.concatenate(halves, axis=-1)

    def attend(q, k, v, bias=0):
        logits = (
            jnp.einsum("blnd,bmnd->bnlm", rotate(q), rotate(k)) / q.shape[-1] ** 0.5
            + bias_of_pairs
            + bias
        )
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return jnp.einsum("bnlm,bmnd->blnd", weights / weights.sum(axis=-1, keepdims=True), v)

    x = tokens if terms.add is None else tokens + terms.add
    q, k, v = jnp.moveaxis(layer.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    out = attend(q, k, v) if terms.transform is None else terms.transform(q, k, v, attend)
    assert out.dtype == jnp.bfloat16
    return layer.proj(out.reshape(x.shape))


# Embeddings and convolutions between layers are not part of an attention layer.
NO_PART = ("+", "interleaved", "ape", "sincos", "gpe", "peg", "none")
FAST = ("rpb(prefix=True)", "lpe")
TEXTS = [
    text for text in ALL if text.startswith("lape") or not any(word in text for word in NO_PART)
]


@pytest.mark.parametrize(
    "text",
    [text if text in FAST else pytest.param(text, marks=pytest.mark.slow) for text in TEXTS],
)
def test_bfloat16_is_at_least_as_exact_as_plain_bfloat16(text):
    tokens = jnp.asarray(
        np.random.default_rng(2).standard_normal((4, 1 + GRID[0] * GRID[1], WIDTH)), jnp.bfloat16
    )
    exact = np.asarray(output(typed_scheme(text, np.float64), jnp.float64, tokens))
    position = typed_scheme(text, np.float32)
    result, rough = (
        np.asarray(out, np.float64)
        for out in (output(position, jnp.bfloat16, tokens), plain(position, tokens))
    )
    error = lambda x: np.sqrt(np.mean((x - exact) ** 2))
    assert 0 < error(result) <= error(rough)
    # Four roundings in a row, of half a unit in the last place, 2**-8, each.
    assert error(result) < 2**-6 * exact.std()
