"""The code around cuDNN's call: rotation, padding and bias, with XLA in cuDNN's place."""

import jax
import jax.numpy as jnp
import pytest

from rope_jax_kernels import Global
from rope_jax_kernels.attention import cudnn
from tests.kernels.test_attention_triton import check

N = 2  # heads


@pytest.fixture
def calls(monkeypatch):
    """Lists lengths of calls, and puts XLA in cuDNN's place, with NaN in undefined values.

    These are the output of padding queries, and the gradient of all padding.
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
        assert query_seq_lengths is key_value_seq_lengths
        calls.append((q.shape[1], query_seq_lengths))
        lengths = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), query_seq_lengths)
        # XLA's products in float16 exist on GPUs alone.
        dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
        wide = [spoil_gradient(query_seq_lengths, x).astype(dtype) for x in (q, k, v)]
        out = original(*wide, bias, scale=scale, **lengths).astype(q.dtype)
        if query_seq_lengths is None:
            return out
        inside = jnp.arange(q.shape[1])[:, None] < query_seq_lengths[:, None, None]
        return jnp.where(inside[..., None], out, jnp.nan)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(cudnn, "refusal", lambda *_, **__: None)
    return calls


def spoil_gradient(lengths, x):
    """Returns x, with a gradient that is NaN from `lengths` on."""
    if lengths is None:
        return x

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, g):
        inside = jnp.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None]
        return (jnp.where(inside, g, jnp.nan),)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(x)


@pytest.mark.parametrize("tokens", [6, 7])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_cudnn_matches_the_definition_for_any_number_of_tokens(packed, biased, tokens, calls):
    """Values and gradients of data, frequencies and bias."""
    check_cudnn(tokens, packed=packed, bias=biased, scale=0.3)
    ((length, lengths),) = calls
    assert length == tokens + tokens % 2
    assert (lengths is not None) == (tokens % 2 == 1 and not biased)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_bias_excludes_the_padding_in_16_bits(dtype, calls):
    check_cudnn(5, dtype=dtype)


def check_cudnn(tokens, **options):
    sizes = {"heads": N, "head_dim": 16, "pairs": 4}
    check(Global(), (tokens,), implementation="cudnn", **sizes, **options)
