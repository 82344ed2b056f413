"""Multi-head self-attention with position information inside, for every pattern and scheme."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.layers import linear
from rope_jax.positions import Terms
from rope_jax_kernels import Global, attention_qkv
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.attention.reference import window_bias


class SelfAttention(nnx.Module):
    """Projection to q, k, v; attention with a scheme's terms; projection back."""

    def __init__(self, features: int, heads: int, *, qkv_bias: bool = True, rngs: nnx.Rngs, dtypes: dict):
        self.heads = heads
        self.qkv = linear(features, 3 * features, use_bias=qkv_bias, rngs=rngs, dtypes=dtypes)
        self.proj = linear(features, features, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B L C"], grid: tuple[int, int], pattern: Pattern, terms: Terms) -> Float[Array, "B L C"]:
        """Attends on tokens in reading order, prefix tokens first.

        Args:
            x: [B, P + H*W, C]; windows and neighbourhoods have no prefix tokens (P = 0).
            grid: (H, W).
            pattern: what attends to what.
            terms: of this layer, see `Terms.layer`.
        """
        batch, tokens, features = x.shape
        if terms.add is not None:
            x = x + terms.add.astype(x.dtype)
        bias = terms.bias
        if isinstance(pattern, Global):
            places = (tokens,)
            if bias is not None and bias.ndim == 2:
                prefix = tokens - grid[0] * grid[1]
                bias = jnp.pad(window_bias(bias, grid), [(0, 0), (prefix, 0), (prefix, 0)])
        else:
            places = grid
        qkv = self.qkv(x).reshape(batch, *places, 3, self.heads, features // self.heads)
        out = attention_qkv(qkv, pattern=pattern, rotation=terms.rotation, bias=bias)
        return self.proj(out.reshape(batch, tokens, features))
