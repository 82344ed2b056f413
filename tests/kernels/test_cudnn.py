"""What stands around cuDNN's call: rotation, padding and bias, with XLA in cuDNN's place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Global, Rotation
from rope_jax_kernels.attention import cudnn, reference

B, N, D, R = 2, 2, 16, 4
NAMES = ("qkv", "freqs", "bias")


@pytest.fixture
def calls(monkeypatch):
    """XLA in cuDNN's place, with NaN wherever cuDNN may leave anything; lists the calls' arguments.

    This is the output of padding queries, and the gradient of all padding.
    """
    calls = []

    def attend(q, k, v, bias, *, query_seq_lengths, key_value_seq_lengths, implementation, scale):
        assert implementation == "cudnn"
        assert q.shape == k.shape == v.shape
        # The checks of jax 0.11.2, for training.
        assert q.shape[1] % 2 == 0
        assert bias is None or bias.shape == (1, N, q.shape[1], q.shape[1])
        # cuDNN has no gradient of a bias together with lengths.
        assert bias is None or query_seq_lengths is None
        calls.append((q, k, v, bias, query_seq_lengths, key_value_seq_lengths))
        lengths = {
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
        }
        # XLA's products in float16 exist on GPUs alone.
        dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
        wide = [spoiled(query_seq_lengths, x).astype(dtype) for x in (q, k, v)]
        out = original(*wide, bias, scale=scale, **lengths).astype(q.dtype)
        if query_seq_lengths is None:
            return out
        inside = jnp.arange(q.shape[1])[:, None] < query_seq_lengths[:, None, None]
        return jnp.where(inside[..., None], out, jnp.nan)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return calls


def spoiled(lengths, x):
    """x, whose gradient is NaN from `lengths` on."""
    if lengths is None:
        return x

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, g):
        inside = jnp.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None]
        return (jnp.where(inside, g, jnp.nan),)

    same.defvjp(lambda x: (x, None), backward)
    return same(x)


def draw(tokens, dtype="float32"):
    rng = np.random.default_rng(tokens)
    return {
        "qkv": jnp.asarray(rng.standard_normal((B, tokens, 3, N, D)), dtype),
        "freqs": jnp.asarray(rng.standard_normal((N, 2, R)), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal((N, tokens, tokens)), jnp.float32),
    }


def run(module, operands, packed, biased):
    """The output and the gradients of all operands by the module's functions."""
    tokens = operands["qkv"].shape[1]
    coords = np.arange(2.0 * tokens, dtype=np.float32).reshape(tokens, 2) / tokens
    cotangent = np.random.default_rng(9).standard_normal((B, tokens, N, D))

    def attend(operands):
        qkv, bias = operands["qkv"], operands["bias"] if biased else None
        rotation = Rotation(jnp.asarray(coords, operands["freqs"].dtype), operands["freqs"])
        terms = {"pattern": Global(), "rotation": rotation, "bias": bias, "scale": 0.3}
        if packed:
            return module.attention_qkv(qkv, **terms)
        return module.attention(*(qkv[:, :, i] for i in range(3)), **terms)

    def both(operands):
        out, pull_back = jax.vjp(attend, operands)
        return out, pull_back(jnp.asarray(cotangent, out.dtype))[0]

    return jax.jit(both)(operands)


@pytest.mark.parametrize("tokens", [6, 7])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_it_is_the_definition_at_every_number_of_tokens(packed, biased, tokens, calls):
    """Values and gradients of data, frequencies and bias, against float64."""
    operands = draw(tokens)
    out, gradients = run(cudnn, operands, packed, biased)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.float64(x)) for name, x in operands.items()}
        expected, expected_gradients = jax.tree.map(
            np.asarray, run(reference, exact, packed, biased)
        )
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for name in NAMES:
        assert gradients[name].shape == operands[name].shape
        largest = np.abs(expected_gradients[name]).max()
        assert largest > 0 or (name == "bias" and not biased)
        np.testing.assert_allclose(
            gradients[name], expected_gradients[name], rtol=1e-4, atol=1e-5 * max(largest, 1)
        )
    ((q, *_, lengths, _),) = calls
    assert q.shape[1] == tokens + tokens % 2
    assert (lengths is not None) == (tokens % 2 == 1 and not biased)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_excludes_the_padding_in_16_bits(dtype, calls):
    operands = draw(5, dtype)
    out, gradients = run(cudnn, operands, packed=True, biased=True)
    expected, expected_gradients = run(reference, operands, packed=True, biased=True)
    ulp = float(jnp.finfo(dtype).eps)
    # Both round to 16 bits: rotated heads, bias, weights and results, in different orders.
    np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=8 * ulp, atol=8 * ulp)
    for name in NAMES:
        a, b = (np.float32(x[name]) for x in (gradients, expected_gradients))
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=8 * ulp, atol=8 * ulp * np.abs(b).max())
