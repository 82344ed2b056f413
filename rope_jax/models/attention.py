"""Multi-head self-attention with position information inside, for every pattern and scheme."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.layers import linear
from rope_jax.positions import Terms
from rope_jax.sharding import over_batch
from rope_jax_kernels import Global, Rotation, attention, attention_qkv, rotate
from rope_jax_kernels.attention.patterns import Pattern
from rope_jax_kernels.attention.reference import window_bias


class SelfAttention(nnx.Module):
    """Projection to q, k, v; attention with a scheme's terms; projection back."""

    scale: float | None = None  # of the logits; None for head_dim**-0.5

    def __init__(self, features: int, heads: int, *, qkv_bias: bool = True, k_bias: bool = True, rngs: nnx.Rngs, dtypes: dict):
        self.heads = heads
        self.qkv = linear(features, 3 * features, use_bias=qkv_bias and k_bias, rngs=rngs, dtypes=dtypes)
        self.qv_bias = nnx.Param(jnp.zeros((2 * features,), dtypes["param_dtype"])) if qkv_bias and not k_bias else None
        self.proj = linear(features, features, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: tuple[int, int],
        pattern: Pattern,
        terms: Terms,
        drop: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "B L C"]:
        """Attends on tokens in reading order, prefix tokens first.

        Args:
            x: [B, P + H*W, C]; windows and neighbourhoods have no prefix tokens (P = 0).
            grid: (H, W).
            pattern: what attends to what.
            terms: of this layer, see `Terms.layer`.
            drop: probability of dropping a weight of global attention, after the softmax.
            key: for that; None (evaluation) drops nothing.
        """
        batch, tokens, features = x.shape
        if terms.add is not None:
            x = x + terms.add.astype(x.dtype)
        bias = terms.bias
        if isinstance(pattern, Global):
            places = (tokens,)
            if bias is not None and bias.ndim == 2:
                bias = _spread(bias, grid, tokens - grid[0] * grid[1])
        else:
            places = grid
        qkv = self.qkv(x)
        if self.qv_bias is not None:
            q_bias, v_bias = jnp.split(self.qv_bias[...].astype(qkv.dtype), 2)
            qkv += jnp.concatenate([q_bias, jnp.zeros_like(q_bias), v_bias])
        qkv = qkv.reshape(batch, *places, 3, self.heads, features // self.heads)
        if key is not None and drop > 0:  # one draw for the whole batch, and no kernel
            settings = {"drop": drop, "key": key, "rotation": terms.rotation, "own": bias, "scale": self.scale}
            out = _transformed(qkv, terms.transform, functools.partial(_attend_dropping, **settings))
        else:
            attend = functools.partial(_attend_packed, pattern=pattern, scale=self.scale)
            out = over_batch(attend, qkv, (terms.rotation, bias, terms.transform))
        # The backward passes of attention and of the projection then keep one array, and not it and a reshaped one.
        return jax.checkpoint(lambda out: self.proj(out.reshape(batch, tokens, features)))(out)


def _spread(table: Float[Array, "N offsets"], grid: tuple[int, int], prefix: int) -> Float[Array, "N L L"]:
    """The bias matrix of a map and its prefix tokens, from a table as `Terms.bias` has it."""
    offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    matrix = jnp.pad(window_bias(table[:, :offsets], grid), [(0, 0), (prefix, 0), (prefix, 0)])
    if table.shape[1] == offsets:
        return matrix
    is_prefix = np.arange(matrix.shape[1]) < prefix
    to_map, from_map, among = (table[:, offsets + i, None, None] for i in range(3))
    from_prefix = jnp.where(is_prefix, among, to_map)
    return jnp.where(is_prefix[:, None], from_prefix, jnp.where(is_prefix, from_map, matrix))


def _attend_packed(qkv: Array, shared: tuple, *, pattern: Pattern, scale: float | None) -> Array:
    """Attention of a packed projection, with what all examples share: (rotation, bias, transform), each or None."""
    rotation, bias, transform = shared
    if transform is None:
        return attention_qkv(qkv, pattern=pattern, rotation=rotation, bias=bias, scale=scale)
    return _transformed(qkv, transform, functools.partial(_attend, pattern=pattern, rotation=rotation, own=bias, scale=scale))


def _transformed(qkv: Array, transform: Callable | None, attend: Callable) -> Array:
    """Attention of q, k and v apart, inside a transform if there is one."""
    q, k, v = jnp.moveaxis(qkv, -3, 0)
    return attend(q, k, v) if transform is None else transform(q, k, v, attend)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    own: Array | None,
    scale: float | None,
) -> Array:
    """Attention with a layer's own bias and one more."""
    return attention(q, k, v, pattern=pattern, rotation=rotation, bias=_sum(own, bias), scale=scale)


def _attend_dropping(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    drop: float,
    key: Array,
    rotation: Rotation | None,
    own: Array | None,
    scale: float | None,
) -> Array:
    """The same for global attention, with weights dropped at random and the others scaled up, as torch's dropout does.

    No kernel holds the weights, so they are written out here, in float32 or wider.
    """
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    precise = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=precise)
    logits *= q.shape[-1] ** -0.5 if scale is None else scale
    bias = _sum(own, bias)
    weights = jax.nn.softmax(logits if bias is None else logits + bias.astype(precise))
    kept = jax.random.bernoulli(key, 1 - drop, weights.shape)
    weights = jnp.where(kept, weights / (1 - drop), 0).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v, preferred_element_type=precise).astype(q.dtype)


def _sum(one: Array | None, other: Array | None) -> Array | None:
    return one if other is None else other if one is None else one + other
