"""Multi-head self-attention for every attention pattern and positional scheme."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.layers import LayerNorm, LayerScale, linear, unit
from rope_jax.positions import Position, Terms
from rope_jax.positions.batch import add
from rope_jax.system.sharding import over_batch
from rope_jax_kernels import (
    Global,
    Neighborhood,
    Pattern,
    Rotation,
    Window,
    attention,
    attention_qkv,
    rotate,
    window_bias,
)

WINDOW_PADDING = ("mask", "tokens", "qkv")
"""Rules for windows that extend beyond a map: see `make_window`."""
ATTENTION_PRODUCT = "multiply_adds_"
"""Scope of attention, followed by the multiply-adds of each of its two products (`models.cost`)."""


@dataclasses.dataclass(frozen=True)
class PaddedWindow(Window):
    """Windows that keep their size on every map and attend to the padding, as in official code.

    The map is padded to whole windows at the bottom and right before it is shifted.

    Attributes:
        padding: "tokens" or "qkv", see `make_window`.
    """

    padding: str = "tokens"

    def fit(self, grid: tuple[int, int]) -> "PaddedWindow":
        return self

    def padded_size(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """Rows and columns of a map of `grid` with its padding."""
        return tuple(n + -n % size for n, size in zip(grid, self.size, strict=True))


@dataclasses.dataclass(frozen=True)
class PaddedNeighborhood(Neighborhood):
    """Neighbourhoods on maps with padding, which no neighbourhood is larger than (NATTEN 0.14).

    The map is padded at the bottom and right, and tokens attend to the padding.
    """

    padding: ClassVar[str] = "tokens"

    def padded_size(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """Rows and columns of a map of `grid` with its padding."""
        spans = (size * step for size, step in zip(self.size, self.dilation, strict=True))
        return tuple(map(max, grid, spans))


def make_window(size: tuple[int, int], padding: str, plain: type[Window] = Window) -> Window:
    """Creates windows.

    Args:
        size: (rows, columns) of a window, in tokens.
        padding: of maps that the windows do not divide. "mask": no token attends to padding, and
            windows are no larger than the map. "tokens": zeros are appended to the normalised
            tokens, so that keys and values are the biases of their projection (ViTDet, and Swin in
            detection). "qkv": zeros are appended to queries, keys and values (ViT-Adapter).
        plain: class of the windows of maps whose padding is masked.
    """
    return plain(size) if padding == "mask" else PaddedWindow(size, padding=padding)


def check_windows(position: Position) -> None:
    """Raises ValueError for a scheme that needs the whole map, with windows that do not show it."""
    stage = position.stage
    padded = isinstance(stage.pattern, PaddedWindow)
    own_box = isinstance(stage.pattern, Window) and stage.window_box == "own"
    for scheme in position.schemes():
        if not scheme.wraps_attention or scheme.within_windows:
            continue
        if padded:
            raise ValueError(
                f"window_padding={stage.pattern.padding!r} reproduces codes in which padding takes "
                "part in attention, but padding has no place on the map that this position could "
                "use: leave window_padding out, or choose another position"
            )
        if own_box and scheme.resolution == "interpolate":
            raise ValueError(
                "window_box='own' needs a position that windows see by themselves, but this one "
                "acts on the whole map: leave window_box out, or choose another position"
            )


class SelfAttention(nnx.Module):
    """Projection to q, k, v; attention with a scheme's terms; output projection.

    Attributes:
        scale: factor on the logits; None for head_dim**-0.5.
    """

    scale: float | None = None

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        k_bias: bool = True,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.heads = heads
        biased = qkv_bias and k_bias
        self.qkv = linear(features, 3 * features, use_bias=biased, rngs=rngs, dtypes=dtypes)
        zeros = jnp.zeros((2 * features,), dtypes["param_dtype"])
        self.qv_bias = nnx.Param(zeros) if qkv_bias and not k_bias else None
        self.proj = linear(features, features, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: tuple[int, int],
        pattern: Pattern,
        terms: Terms,
        drop: float = 0.0,
        key: Array | None = None,
        norm: LayerNorm | None = None,
        layer_scale: LayerScale | None = None,
    ) -> Float[Array, "B L C"]:
        """Returns the output tokens.

        Args:
            x: tokens in reading order, prefix tokens first, L = P + H*W; windows and
                neighbourhoods have no prefix tokens (P = 0).
            grid: (H, W).
            pattern: attention pattern.
            terms: position terms of this layer, see `Terms.layer`.
            drop: dropout rate of the weights of global attention, after the softmax.
            key: for dropout; None (evaluation) drops nothing.
            norm: layer norm of the tokens before attention, or None.
            layer_scale: LayerScale of the output, or None.
        """
        batch, tokens, features = x.shape
        if terms.add is not None:  # to what is normalised
            x = add(x if norm is None else norm(x), terms.add)
            norm = None
        bias = terms.bias
        if isinstance(pattern, Global):
            places = (tokens,)
            if bias is not None and bias.ndim == 2:
                bias = _spread(bias, grid, tokens - grid[0] * grid[1])
        else:
            places = grid
        qkv = self.qkv(x, norm, bias=self._bias() if self.qv_bias is not None else None)
        qkv = qkv.reshape(batch, *places, 3 * features)
        if isinstance(pattern, PaddedWindow | PaddedNeighborhood):
            filling = self._bias() if pattern.padding == "tokens" else None
            qkv = _pad_map(qkv, pattern.padded_size(grid), filling)
        qkv = self.prepare(qkv.reshape(*qkv.shape[:-1], 3, self.heads, features // self.heads))
        scale = self.scale
        if terms.logit_scale != 1:  # a number, as kernels take it
            base_scale = qkv.shape[-1] ** -0.5 if scale is None else scale
            scale = base_scale * terms.logit_scale
        if key is not None and drop > 0:  # one mask for the whole batch; no kernel supports it
            attend = functools.partial(_dropping_attention, drop=drop, key=key)
            shared = (terms.rotation, bias, terms.transform)
            out = _attend(qkv, shared, attend=attend, scale=scale)
        else:
            attend = functools.partial(_attend_packed, pattern=pattern, scale=scale)
            pairs = attended_pairs(pattern, grid, tokens - grid[0] * grid[1])
            stated = f"{ATTENTION_PRODUCT}{pairs * features}"
            with jax.named_scope("attention"), jax.named_scope(stated):
                out = over_batch(attend, qkv, (terms.rotation, bias, terms.transform))

        if isinstance(pattern, PaddedWindow | PaddedNeighborhood):
            out = out[:, : grid[0], : grid[1]]

        # Attention's output would otherwise be saved twice, for its own backward pass and, in the
        # shape of tokens, for that of the projection, also in a scan.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def project(out: Array) -> Array:
            return self.proj(out.reshape(batch, tokens, features), layer_scale=layer_scale)

        return project(out)

    def prepare(
        self, qkv: Float[Array, "B *places three N D"]
    ) -> Float[Array, "B *places three N D"]:
        """Changes q, k and v before the positional scheme and the logits."""
        return qkv

    def _bias(self) -> Float[Array, " C3"] | None:
        """The bias of q, k and v, with zeros for k if that has none; None without any."""
        if self.qv_bias is None:
            return None if self.qkv.bias is None else self.qkv.bias[...]
        q_bias, v_bias = jnp.split(self.qv_bias[...], 2)
        return jnp.concatenate([q_bias, jnp.zeros_like(q_bias), v_bias])


class CosineAttention(SelfAttention):
    """Attention by cosines of q and k (Swin V2, arXiv 2111.09883, eq. 2).

    The logits are exp(min(s, ln 100)) cos(q, k) plus the bias, with a learned s per head that
    starts at ln 10. q and k are divided by their lengths before a scheme acts on them.
    """

    scale = 1.0

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        k_bias: bool = True,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        biases = {"qkv_bias": qkv_bias, "k_bias": k_bias}
        super().__init__(features, heads, **biases, rngs=rngs, dtypes=dtypes)
        logit_scale = jnp.full((heads,), math.log(10), dtypes["param_dtype"])
        self.logit_scale = nnx.Param(logit_scale, decay=False)

    def prepare(
        self, qkv: Float[Array, "B *places three N D"]
    ) -> Float[Array, "B *places three N D"]:
        scale = jnp.exp(jnp.minimum(self.logit_scale[...], math.log(100)))
        return _make_units(qkv, scale)


@jax.checkpoint
def _make_units(
    qkv: Float[Array, "B *places three N D"], scale: Float[Array, " N"]
) -> Float[Array, "B *places three N D"]:
    """Divides q and k by their lengths and multiplies q by a factor per head; rounded once.

    So the logits' own factor is 1, and every kernel serves. It is recomputed in the backward pass.
    """
    q, k, v = jnp.moveaxis(qkv, -3, 0)
    q, k = unit(q) * scale[:, None], unit(k)
    return jnp.stack([q.astype(v.dtype), k.astype(v.dtype), v], axis=-3)


def attended_pairs(pattern: Pattern, grid: tuple[int, int], prefix: int = 0) -> int:
    """Pairs of query and key in one attention layer on a map, with the padding of patterns.

    Args:
        pattern: attention pattern.
        grid: (H, W).
        prefix: number of class and register tokens.
    """
    if isinstance(pattern, Global):
        return (prefix + grid[0] * grid[1]) ** 2
    pairs = 1
    if isinstance(pattern, Neighborhood):
        grid = pattern.padded_size(grid) if isinstance(pattern, PaddedNeighborhood) else grid
        for n, kernel, step in zip(grid, pattern.size, pattern.dilation, strict=True):
            pairs *= sum(min(kernel, -(-(n - i % step) // step)) for i in range(n))
    else:
        for n, size in zip(grid, pattern.fit(grid).size, strict=True):
            pairs *= -(-n // size) * size * size
    return pairs


def _pad_map(
    qkv: Float[Array, "B H W C3"], size: tuple[int, ...], filling: Float[Array, " C3"] | None
) -> Float[Array, "B H2 W2 C3"]:
    """Pads a map to `size` at the bottom and right, with a vector or with zeros."""
    height, width = qkv.shape[1:3]
    padded = jnp.pad(qkv, ((0, 0), (0, size[0] - height), (0, size[1] - width), (0, 0)))
    if filling is None or padded.shape == qkv.shape:
        return padded
    rows, columns = (np.arange(n) for n in padded.shape[1:3])
    inside = (rows[:, None, None] < height) & (columns[:, None] < width)
    return jnp.where(inside, padded, filling.astype(qkv.dtype))


def _spread(
    table: Float[Array, "N offsets"], grid: tuple[int, int], prefix: int
) -> Float[Array, "N L L"]:
    """The bias matrix of a map and its prefix tokens, from a table as in `Terms.bias`."""
    offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    matrix = jnp.pad(window_bias(table[:, :offsets], grid), [(0, 0), (prefix, 0), (prefix, 0)])
    if table.shape[1] == offsets:
        return matrix
    is_prefix = np.arange(matrix.shape[1]) < prefix
    to_map, from_map, among = (table[:, offsets + i, None, None] for i in range(3))
    from_prefix = jnp.where(is_prefix, among, to_map)
    return jnp.where(is_prefix[:, None], from_prefix, jnp.where(is_prefix, from_map, matrix))


def _attend_packed(qkv: Array, shared: tuple, *, pattern: Pattern, scale: float | None) -> Array:
    """Attention of packed q, k, v; `shared` is rotation, bias and transform, each or None."""
    rotation, bias, transform = shared
    if transform is None:
        return attention_qkv(qkv, pattern=pattern, rotation=rotation, bias=bias, scale=scale)
    attend = functools.partial(_attend_examples, pattern=pattern)
    return _attend(qkv, shared, attend=attend, scale=scale)


def _attend(qkv: Array, shared: tuple, *, attend: Callable, scale: float | None) -> Array:
    """Attention of unpacked q, k, v by `attend`, inside the transform if there is one."""
    rotation, layer_bias, transform = shared
    head_dim = qkv.shape[-1]

    def attend_with_bias(q: Array, k: Array, v: Array, bias: Array | None = None) -> Array:
        biases = [x for x in (layer_bias, bias) if x is not None]
        total = sum(biases[1:], biases[0]) if biases else None
        # Channels that a transform appends do not change the scale.
        own_scale = head_dim**-0.5 if scale is None and q.shape[-1] != head_dim else scale
        return attend(q, k, v, rotation=rotation, bias=total, scale=own_scale)

    q, k, v = jnp.moveaxis(qkv, -3, 0)
    return attend_with_bias(q, k, v) if transform is None else transform(q, k, v, attend_with_bias)


def _attend_examples(
    q: Array, k: Array, v: Array, *, bias: Array | None, **options: Any
) -> Float[Array, "B *places N D"]:
    """`attention`, also with a bias [B, N, L, L], of each example."""
    if bias is None or bias.ndim < 4:
        return attention(q, k, v, bias=bias, **options)

    def attend(q: Array, k: Array, v: Array, bias: Array) -> Array:
        return attention(q[None], k[None], v[None], bias=bias, **options)[0]

    return jax.vmap(attend)(q, k, v, bias)


def _dropping_attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    *,
    rotation: Rotation | None,
    bias: Array | None,
    scale: float | None,
    drop: float,
    key: Array,
) -> Float[Array, "B L N D"]:
    """Global attention with dropout of its weights, as in torch.

    No kernel returns the weights, so they are computed here, in float32 or wider.
    """
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    precise = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=precise)
    logits *= q.shape[-1] ** -0.5 if scale is None else scale
    weights = jax.nn.softmax(logits if bias is None else logits + bias.astype(precise))
    kept = jax.random.bernoulli(key, 1 - drop, weights.shape)
    weights = jnp.where(kept, weights / (1 - drop), 0).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v, preferred_element_type=precise).astype(q.dtype)
