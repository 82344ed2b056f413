"""Relative position bias: a term of the logits that depends on the offset of query and key."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.names.options import Count
from rope_jax.positions.initializers import normal_init
from rope_jax.positions.resample import resample
from rope_jax.positions.scheme import (
    Grid,
    PerLayer,
    Position,
    Scale,
    Spread,
    Stage,
    Terms,
    scheme,
)
from rope_jax_kernels import Global, Neighborhood, Window, window_bias


def offset_bias(table: Float[Array, "layers N h w"], stage: Stage) -> Array:
    """Arranges a table of query minus key as `Terms.bias` expects it for the stage's pattern.

    Args:
        table: [depth or 1, N, 2h-1, 2w-1].
        stage: the layers that use the table.

    Returns:
        The table, with its axis of layers, unmarked.
    """
    if isinstance(stage.pattern, Neighborhood):
        return jax.lax.rev(table, (2, 3))
    return table.reshape(*table.shape[:2], -1)


def all_offsets(lengths: Grid) -> Float[np.ndarray, "rows columns 2"]:
    """All offsets (y, x), query minus key, on a map or window of (h, w): [2h-1, 2w-1, 2]."""
    axes = [np.arange(1 - n, n, dtype=np.float64) for n in lengths]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddBias:
    """A `Terms.transform` that adds `matrix` [N, L, L] to the logits."""

    matrix: Array | PerLayer

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        return attend(q, k, v, self.matrix)


@scheme("rpb")
class RelativeBias(Position):
    """A learned bias for each offset, per head and layer, in the form of the stage's attention.

    Windows: Swin's table (query minus key; arXiv 2103.14030, equation 4). Neighbourhoods: NATTEN's
    (key minus query, in steps of the dilation); they keep their size on every map, and so does the
    table. Global attention: that of NAT's isotropic ViT (key minus query over the whole map);
    prefix tokens get no bias. A ViT with windows has tables of the window's size in all layers, in
    this order; layers with global attention resample theirs to the map at each call.

    Options:
        prefix: True adds biases for prefix tokens: per head one for prefix queries, one for prefix
            keys, and one for pairs of prefix tokens (BEiT, arXiv 2106.08254,
            `gen_relative_position_index`). They are the same on every map.
        grow: resampling to a larger map or window: "bicubic", "antialias", "bilinear" (see `ape`),
            "geometric" (BEiT's: a cubic spline through the table, whose offsets a geometric
            progression moves apart, the more the larger they are) or "pad" (zeros for unseen
            offsets).
        shrink: to a smaller one: "bicubic", "antialias", "bilinear", "geometric" or "crop" (central
            offsets).
        std: standard deviation of the initial table, 0.02. The baseline of LaPE (`pe="2D_RPE"` of
            its code) starts with zeros and is decayed.
        decay: whether the optimiser decays the table, False.
        key_norm: True applies a layer norm over the keys of the map to each query's biases, one per
            layer (`join_type="LN"` of LaPE's code). The result is no longer relative, so this is
            for global attention without `prefix`. Scale and bias of the norm, one of each per token
            of the map, are resampled like the table.
    """

    paper = "Liu et al., arXiv 2103.14030, eq. 4"
    equation = "logits + B[q - k]"
    acts = "logits"
    resolution = "resample"
    per_head = per_layer = learnable = True
    prefix_offsets: nnx.Param | None = None  # [depth, N, 3]
    key_scale: nnx.Param | None = None  # [depth, H, W]

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        prefix: bool = False,
        grow: Literal["bicubic", "antialias", "bilinear", "geometric", "pad"] = "bicubic",
        shrink: Literal["bicubic", "antialias", "bilinear", "geometric", "crop"] = "bicubic",
        std: Spread = 0.02,
        decay: bool = False,
        key_norm: bool = False,
    ):
        super().__init__(stage, rngs=rngs)
        if prefix and not stage.prefix:
            raise ValueError(
                "prefix=True is the bias of class and register tokens, of which this model's "
                "attention has none: leave it out"
            )
        # Kept by `with_pattern`, like the table itself.
        self.query_first = isinstance(stage.pattern, Window) and stage.global_layers is None
        self.grow = grow
        self.shrink = shrink
        init = normal_init(std)

        def draw(*shape: int) -> nnx.Param:
            shape = (stage.depth, stage.heads, *shape)
            return nnx.Param(init(rngs.params(), shape, stage.dtype), decay=decay)

        rows, columns = stage.region(stage.grid)
        self.offsets = draw(2 * rows - 1, 2 * columns - 1)
        if prefix:
            self.prefix_offsets = draw(3)
        if key_norm:
            if prefix or not isinstance(stage.pattern, Global):
                raise ValueError(
                    "key_norm=True needs global attention and cannot be combined with "
                    "prefix=True: leave one of them out, or use another model"
                )
            if "geometric" in (grow, shrink):
                raise ValueError(
                    "grow and shrink are geometric for tables of offsets alone, and key_norm=True "
                    "also has a map: leave it out, or choose another rule"
                )
            self.acts, self.relative = "transform", False
            ones = jnp.ones((stage.depth, *stage.grid), stage.dtype)
            self.key_scale = nnx.Param(ones, decay=False)
            self.key_bias = nnx.Param(jnp.zeros_like(ones), decay=False)

    def _resample(self, maps: Float[Array, "... h w"], size: Grid) -> Float[Array, "... h2 w2"]:
        for axis, length in enumerate(size):
            shape = [*maps.shape[-2:]]
            rule = self.grow if length > shape[axis] else self.shrink
            shape[axis] = length
            maps = resample(maps, tuple(shape), rule)
        return maps

    def _table(self, grid: Grid) -> Float[Array, "layers N h w"]:
        rows, columns = self.stage.region(grid)
        return self._resample(self.offsets[...], (2 * rows - 1, 2 * columns - 1))

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        table = self._table(grid)
        if not self.query_first:
            table = jax.lax.rev(table, (2, 3))  # from key minus query to query minus key
        bias = offset_bias(table, self.stage)
        if self.key_scale is not None:
            return Terms(transform=AddBias(PerLayer(self._normalize_keys(bias, grid))))
        if self.prefix_offsets is not None:
            bias = jnp.concatenate([bias, self.prefix_offsets[...]], axis=2)
        return Terms(bias=PerLayer(bias))

    def _normalize_keys(self, bias: Array, grid: Grid) -> Float[Array, "layers N L L"]:
        shape = (self.stage.depth, 1, 1, -1)
        scale = self._resample(self.key_scale[...], grid).reshape(shape)
        shift = self._resample(self.key_bias[...], grid).reshape(shape)
        matrix = jax.vmap(window_bias, (0, None))(bias, grid)
        matrix = jax.nn.standardize(matrix, axis=-1, epsilon=1e-5) * scale + shift
        before = (self.stage.prefix, 0)
        return jnp.pad(matrix, [(0, 0), (0, 0), before, before])

    def resize(self, grid: Grid) -> None:
        self.offsets.set_value(self._table(grid))
        for parameter in () if self.key_scale is None else (self.key_scale, self.key_bias):
            parameter.set_value(self._resample(parameter[...], grid))
        super().resize(grid)


@scheme("cpb")
class ContinuousBias(Position):
    """Log-spaced continuous position bias: a small network of the offset (Swin V2, eq. 3, 4).

    16 sigmoid(W_2 relu(W_1 o + b)) per layer, with one output of W_2 per head, of the offset
    o = sign(d) log2(1 + 8 |d|) / log2(8); d is query minus key and 1 at the border of a map or
    window. Nothing is resampled. Pairs with a prefix token get 8, the output of an untrained
    network. Swin V2's cosine attention is an option of models, `cosine` (arXiv 2111.09883).

    Options:
        hidden: width of the network, 512.
        normalise: the map or window at whose border d is 1: that of "creation", so that larger ones
            go beyond 1 (official weights for other windows than those of their pretraining), or the
            "current" one (the official code without `pretrained_window_sizes`). For the global
            blocks of a ViT with windows, "creation" is that of the windows, too.
    """

    paper = "Liu et al., arXiv 2111.09883, eq. 3, 4"
    equation = "logits + 16 sigmoid(MLP(log-spaced q - k))"
    acts = "logits"
    resolution = "extrapolate"
    per_head = per_layer = learnable = True
    of_training = ("border",)

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        hidden: Count = 512,
        normalise: Literal["creation", "current"] = "creation",
    ):
        super().__init__(stage, rngs=rngs)
        self.border = _border(stage.region(stage.grid)) if normalise == "creation" else None
        if normalise == "current":
            self.resolution = "interpolate"
        init, depth, dtype = normal_init(0.02), stage.depth, stage.dtype
        kernel1 = init(rngs.params(), (depth, 2, hidden), dtype)
        kernel2 = init(rngs.params(), (depth, hidden, stage.heads), dtype)
        self.kernel1 = nnx.Param(kernel1, decay=False)
        self.bias1 = nnx.Param(jnp.zeros((depth, hidden), dtype), decay=False)
        self.kernel2 = nnx.Param(kernel2, decay=False)

    def coords(self, region: Grid) -> Float[np.ndarray, "rows columns 2"]:
        """Returns o of all offsets on a map or window of (h, w): [2h-1, 2w-1, (y, x)]."""
        apart = all_offsets(region) / (self.border or _border(region))
        return np.sign(apart) * np.log2(1 + 8 * np.abs(apart)) / 3

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        apart = jnp.asarray(self.coords(self.stage.region(grid)), self.stage.dtype)
        hidden = jnp.einsum("hwa,lac->lhwc", apart, self.kernel1[...], precision="highest")
        hidden = jax.nn.relu(hidden + self.bias1[...][:, None, None])
        table = jnp.einsum("lhwc,lcn->lnhw", hidden, self.kernel2[...], precision="highest")
        bias = offset_bias(16 * jax.nn.sigmoid(table), self.stage)
        if self.stage.prefix:
            bias = jnp.pad(bias, [(0, 0), (0, 0), (0, 3)], constant_values=8)
        return Terms(bias=PerLayer(bias))


def _border(region: Grid) -> Grid:
    """The largest offsets in a region, at least 1."""
    return tuple(max(n - 1, 1) for n in region)


@scheme("alibi2d")
class Alibi2D(Position):
    """2-D ALiBi: logits fall with the Euclidean distance of query and key, in patches.

    The slopes of the heads are ALiBi's, 2**(-8 (n + 1) / N) for N a power of two, otherwise filled
    up from the next one (arXiv 2108.12409, section 3); the distance is CROMA's (arXiv 2311.00566;
    `get_alibi` of its code). Neighbourhoods count in steps of the dilation. Prefix tokens get no
    bias.

    Options:
        scale: factor on all slopes, 1.
    """

    paper = "Press et al., arXiv 2108.12409; Fuller et al., arXiv 2311.00566"
    equation = "logits - 2^(-8(n+1)/N) times the distance of q and k"
    acts = "logits"
    resolution = "extrapolate"
    per_head = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, scale: Scale = 1.0):
        super().__init__(stage, rngs=rngs)
        self.scale = scale

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        distance = np.linalg.norm(all_offsets(self.stage.region(grid)), axis=-1)
        table = -self.scale * _slopes(self.stage.heads)[:, None, None] * distance
        return Terms(bias=offset_bias(jnp.asarray(table[None], self.stage.dtype), self.stage)[0])


def _slopes(heads: int) -> Float[np.ndarray, " N"]:
    power = 1 << (heads.bit_length() - 1)  # the largest power of two up to `heads`
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    if power == heads:
        return slopes
    return np.concatenate([slopes, _slopes(2 * power)[::2][: heads - power]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextualBias:
    """A `Terms.transform` whose biases are products of the scaled queries with learned vectors.

    Attributes:
        vectors: one per bucket of offsets, [D, S * S], followed by one for pairs with prefix tokens
            if there are any.
        rows: [H, H, S], one-hot bucket of each query row and key row.
        columns: [W, W, S], the same for columns.
    """

    vectors: Array | PerLayer
    rows: Array
    columns: Array

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        batch, tokens, heads, head_dim = q.shape
        (height, _, buckets), width = self.rows.shape, self.columns.shape[0]
        area = height * width
        prefix = tokens - area
        scaled = q.astype(self.vectors.dtype) * head_dim**-0.5
        products = jnp.einsum("blnd,ds->bnls", scaled, self.vectors, precision="highest")
        bias = products[:, :, prefix:, : buckets**2]
        bias = bias.reshape(batch, heads, height, width, buckets, buckets)
        # One-hot products select the buckets, because the gradient of a gather is a scatter.
        bias = jnp.einsum(
            "bnyxrc,yYr,xXc->bnyxYX", bias, self.rows, self.columns, precision="highest"
        ).reshape(batch, heads, area, area)
        if prefix:
            with_prefix = jnp.broadcast_to(products[..., -1:], (batch, heads, tokens, tokens))
            bias = with_prefix.at[:, :, prefix:, prefix:].set(bias)
        return attend(q, k, v, bias)


@scheme("irpe")
class ImageRelative(Position):
    """iRPE, contextual, product method, on keys: q times a learned vector per bucket of offsets.

    (Wu et al., arXiv 2107.14222; the buckets are equation 18.) Along each axis an offset r, query
    minus key, is in bucket r if |r| <= alpha, otherwise in the integer part of
    +-min(beta, round(alpha + (beta - alpha) ln(|r| / alpha) / ln(gamma / alpha))); two axes make
    (2 floor(beta) + 1)**2 buckets. Pairs with prefix tokens share one more. The vectors are
    initially zero, the same for all heads, and decayed, as in the authors' DeiT, whose position is
    `irpe+ape`.

    Options:
        alpha: largest offset with a bucket of its own, in patches, 1.9.
        beta: largest bucket, 3.8.
        gamma: offset at which buckets stop growing, in patches, 15.2.
    """

    paper = "Wu et al., arXiv 2107.14222"
    equation = "logits + q . r, r learned for each bucket of offsets"
    acts = "transform"
    resolution = "extrapolate"
    per_layer = learnable = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        alpha: Scale = 1.9,
        beta: Scale = 3.8,
        gamma: Scale = 15.2,
    ):
        super().__init__(stage, rngs=rngs)
        if not isinstance(stage.pattern, Global):
            raise ValueError(
                "a bias that depends on the query is no table of offsets, which windows and "
                "neighbourhoods take: use a model with global attention, or rpb or cpb"
            )
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        if not 1 <= alpha <= beta or not alpha < gamma:
            raise ValueError(
                f"alpha={alpha}, beta={beta}, gamma={gamma} must satisfy 1 <= alpha <= beta and "
                "alpha < gamma"
            )
        shape = (stage.depth, stage.head_dim, (2 * int(beta) + 1) ** 2 + (stage.prefix > 0))
        self.vectors = nnx.Param(jnp.zeros(shape, stage.dtype), decay=True)

    def _buckets(self, length: int) -> Float[Array, "length length S"]:
        alpha, beta, largest = self.alpha, self.beta, int(self.beta)
        apart = np.arange(length)[:, None] - np.arange(length)
        far = np.maximum(np.abs(apart), alpha)
        steps = np.log(far / alpha) / np.log(self.gamma / alpha)
        outer = np.minimum(beta, np.round(alpha + (beta - alpha) * steps)).astype(int)
        bucket = np.where(np.abs(apart) <= alpha, apart, np.sign(apart) * outer) + largest
        return jnp.asarray(np.eye(2 * largest + 1)[bucket], self.stage.dtype)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        rows, columns = (self._buckets(length) for length in grid)
        return Terms(transform=ContextualBias(PerLayer(self.vectors[...]), rows, columns))
