"""Relative position bias: what the offset of a query and a key adds to their scaled logit."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import normal_init
from rope_jax.positions.resample import RESAMPLERS
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, check_finite, check_option, scheme
from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention.reference import window_bias


def side(stage: Stage, grid: Grid) -> Grid:
    """Rows and columns within which one query's keys lie."""
    if isinstance(stage.pattern, Window):
        return stage.pattern.fit(grid).size
    return stage.pattern.size if isinstance(stage.pattern, Neighborhood) else grid


def offset_bias(table: Float[Array, "layers N h w"], stage: Stage) -> Array:
    """A table [depth or 1, N, 2h-1, 2w-1] of query minus key, as `Terms.bias` takes it for the stage's pattern, without its mark."""
    if isinstance(stage.pattern, Neighborhood):
        return jax.lax.rev(table, (2, 3))
    return table.reshape(*table.shape[:2], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddBias:
    """A transform that adds `matrix` [N, L, L] to the logits: a bias that is no table of offsets."""

    matrix: Array | PerLayer

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        return attend(q, k, v, self.matrix)


@scheme("rpb")
class RelativeBias(Position):
    """Relative position bias per head and layer, in the form of the stage's attention.

    Windows: Swin's table (query minus key; arXiv 2103.14030, equation 4). Neighbourhoods: NATTEN's (key minus query, in steps of the
    dilation). Global attention: that of NAT's isotropic ViT (key minus query over the whole map); prefix tokens get no bias.

    Options:
        prefix: True gives prefix tokens a bias, too: per head one for those that ask, one for those that are asked, and one for pairs of
            them (BEiT, arXiv 2106.08254, `gen_relative_position_index`). They are the same ones on every map.
        grow: what happens to the table on a larger map or window: "bicubic", "antialias", "bilinear" (see `ape`) or "pad" (zeros for
            unseen offsets).
        shrink: on a smaller one: "bicubic", "antialias", "bilinear" or "crop" (the central offsets).
        std: of its start, 0.02. The bias that LaPE is compared with (`pe="2D_RPE"` of its code) starts with zeros, and is decayed.
        decay: whether the optimiser decays it, False.
        key_norm: True sends each query's biases through a layer norm over the keys of the map, one per layer (`join_type="LN"` of LaPE's
            code). What comes out is no longer relative, so this is for global attention, without `prefix`. Scale and bias of the norm, one
            of each for a place on the map, go to other maps by the rules of the table.
    A neighbourhood keeps its size on every map, so its table stays.
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
        grow: str = "bicubic",
        shrink: str = "bicubic",
        std: float = 0.02,
        decay: bool = False,
        key_norm: bool = False,
    ):
        super().__init__(stage, rngs=rngs)
        if prefix and not stage.prefix:
            raise ValueError("prefix=True is the bias of class and register tokens, of which this model's attention has none: leave it out")
        check_option("grow", grow, ("bicubic", "antialias", "bilinear", "pad"))
        check_option("shrink", shrink, ("bicubic", "antialias", "bilinear", "crop"))
        self.grow, self.shrink = grow, shrink
        rows, columns = side(stage, stage.grid)
        start = normal_init(check_finite("std", std, zero=True))
        draw = lambda *shape: nnx.Param(start(rngs.params(), (stage.depth, stage.heads, *shape), stage.dtype), decay=decay)
        self.offsets = draw(2 * rows - 1, 2 * columns - 1)
        if prefix:
            self.prefix_offsets = draw(3)
        if key_norm:
            if prefix or not isinstance(stage.pattern, Global):
                raise ValueError(
                    "key_norm=True goes with global attention and without prefix=True: leave one of them out, or use another model"
                )
            self.acts, self.relative = "transform", False
            self.key_scale = nnx.Param(jnp.ones((stage.depth, *stage.grid), stage.dtype), decay=False)
            self.key_bias = nnx.Param(jnp.zeros((stage.depth, *stage.grid), stage.dtype), decay=False)

    def _resampled(self, maps: Float[Array, "... h w"], size: Grid) -> Float[Array, "... h2 w2"]:
        for axis, length in zip((-2, -1), size, strict=True):
            one_axis = [*maps.shape[-2:]]
            larger = length > one_axis[axis]
            one_axis[axis] = length
            maps = RESAMPLERS[self.grow if larger else self.shrink](maps, tuple(one_axis))
        return maps

    def _resized(self, grid: Grid) -> Array:
        rows, columns = side(self.stage, grid)
        return self._resampled(self.offsets[...], (2 * rows - 1, 2 * columns - 1))

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        table = self._resized(grid)
        if not isinstance(self.stage.pattern, Window):
            table = jax.lax.rev(table, (2, 3))  # key minus query to query minus key
        bias = offset_bias(table, self.stage)
        if self.key_scale is not None:
            scale, shift = (self._resampled(x[...], grid).reshape(self.stage.depth, 1, 1, -1) for x in (self.key_scale, self.key_bias))
            matrix = jax.nn.standardize(jax.vmap(window_bias, (0, None))(bias, grid), axis=-1, epsilon=1e-5) * scale + shift
            before = (self.stage.prefix, 0)
            return Terms(transform=AddBias(PerLayer(jnp.pad(matrix, [(0, 0), (0, 0), before, before]))))
        return Terms(bias=PerLayer(bias if self.prefix_offsets is None else jnp.concatenate([bias, self.prefix_offsets[...]], axis=2)))

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        self.offsets.set_value(self._resized(grid))
        for of_map in () if self.key_scale is None else (self.key_scale, self.key_bias):
            of_map.set_value(self._resampled(of_map[...], grid))
        super().resize(grid)


def offsets_of(lengths: Grid) -> np.ndarray:
    """All offsets (y, x), query minus key, of tokens on a map or window: [2h-1, 2w-1, 2]."""
    axes = [np.arange(1 - n, n, dtype=np.float64) for n in lengths]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


@scheme("cpb")
class ContinuousBias(Position):
    """Log-spaced continuous position bias: a small network makes the bias out of the offset (Swin V2, arXiv 2111.09883, equations 3, 4).

    16 sigmoid(W_2 relu(W_1 o + b)) per layer, W_2 giving the heads, of the offsets o = sign(d) log2(1 + 8 |d|) / log2(8), d the offset
    of query minus key, which is 1 at the border of the map or window of creation. Larger ones go beyond 1: nothing is resampled. Pairs
    with a prefix token get 8, what the network gives while it knows nothing. Swin V2's cosine attention is no part of it.

    hidden: width of the network, 512.
    """

    paper = "Liu et al., arXiv 2111.09883, eq. 3, 4"
    equation = "logits + 16 sigmoid(MLP(log-spaced q - k))"
    acts = "logits"
    resolution = "extrapolate"
    per_head = per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, hidden: int = 512):
        super().__init__(stage, rngs=rngs)
        if hidden < 1:
            raise ValueError(f"hidden={hidden} is not allowed; use a width of at least 1")
        self.border = tuple(max(n - 1, 1) for n in side(stage, stage.grid))
        draw = lambda *shape: normal_init(0.02)(rngs.params(), (stage.depth, *shape), stage.dtype)
        self.kernel1 = nnx.Param(draw(2, hidden), decay=False)
        self.bias1 = nnx.Param(jnp.zeros((stage.depth, hidden), stage.dtype), decay=False)
        self.kernel2 = nnx.Param(draw(hidden, stage.heads), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        apart = offsets_of(side(self.stage, grid)) / self.border
        apart = jnp.asarray(np.sign(apart) * np.log2(1 + 8 * np.abs(apart)) / 3, self.stage.dtype)
        hidden = jnp.einsum("hwa,lac->lhwc", apart, self.kernel1[...], precision="highest") + self.bias1[...][:, None, None]
        table = jnp.einsum("lhwc,lcn->lnhw", jax.nn.relu(hidden), self.kernel2[...], precision="highest")
        bias = offset_bias(16 * jax.nn.sigmoid(table), self.stage)
        if self.stage.prefix:
            bias = jnp.pad(bias, [(0, 0), (0, 0), (0, 3)], constant_values=8)
        return Terms(bias=PerLayer(bias))


@scheme("alibi2d")
class Alibi2D(Position):
    """2-D ALiBi: logits fall with the Euclidean distance of query and key, in patches, at another slope in each head.

    Slopes are ALiBi's, 2**(-8 (n + 1) / N) for N a power of two and filled up from the next one otherwise (arXiv 2108.12409, section 3);
    the distance is CROMA's (arXiv 2311.00566; `get_alibi` of its code). Neighbourhoods count in steps of the dilation. Prefix tokens get no
    bias.

    scale: on all slopes, 1.
    """

    paper = "Press et al., arXiv 2108.12409; Fuller et al., arXiv 2311.00566"
    equation = "logits - 2^(-8(n+1)/N) times the distance of q and k"
    acts = "logits"
    resolution = "extrapolate"
    per_head = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, scale: float = 1.0):
        super().__init__(stage, rngs=rngs)
        self.scale = check_finite("scale", scale)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        distance = np.linalg.norm(offsets_of(side(self.stage, grid)), axis=-1)
        table = jnp.asarray(-self.scale * _slopes(self.stage.heads)[:, None, None] * distance, self.stage.dtype)
        return Terms(bias=offset_bias(table[None], self.stage)[0])


def _slopes(heads: int) -> np.ndarray:
    whole = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, whole + 1) / whole)
    return slopes if whole == heads else np.concatenate([slopes, _slopes(2 * whole)[::2][: heads - whole]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextualBias:
    """A transform that adds to the logits the products of the scaled queries with one vector per bucket of offsets.

    Attributes:
        vectors: [D, S * S], and one more for pairs with prefix tokens where there are any.
        rows, columns: [H, H, S] and [W, W, S], 1 where query and key, apart along one axis, are in a bucket, and 0 elsewhere.
    """

    vectors: Array | PerLayer
    rows: Array
    columns: Array

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        batch, tokens, heads, head_dim = q.shape
        (height, _, buckets), width = self.rows.shape, self.columns.shape[0]
        prefix = tokens - height * width
        products = jnp.einsum("blnd,ds->bnls", q.astype(self.vectors.dtype) * head_dim**-0.5, self.vectors, precision="highest")
        on_map = products[:, :, prefix:, : buckets**2].reshape(batch, heads, height, width, buckets, buckets)
        # Products with ones and zeros pick the buckets: the gradient of a gather would be a scatter.
        on_map = jnp.einsum("bnyxrc,yYr,xXc->bnyxYX", on_map, self.rows, self.columns, precision="highest")
        bias = on_map.reshape(batch, heads, height * width, height * width)
        if prefix:
            with_prefix = jnp.broadcast_to(products[..., -1:], (batch, heads, tokens, tokens))
            bias = with_prefix.at[:, :, prefix:, prefix:].set(bias)
        one = lambda q, k, v, bias: attend(q[None], k[None], v[None], bias)[0]
        return jax.vmap(one)(q, k, v, bias)


@scheme("irpe")
class ImageRelative(Position):
    """iRPE, contextual, with the product method, on keys: queries meet a learned vector for the bucket of each offset.

    (Wu et al., arXiv 2107.14222; the buckets are its equation 18.) Along each axis an offset r, query minus key, falls into bucket r where
    |r| <= alpha and else into +-min(beta, round(alpha + (beta - alpha) ln(|r| / alpha) / ln(gamma / alpha))) without its fraction; the
    two axes make (2 floor(beta) + 1)**2 buckets. Pairs with prefix tokens share one more. The vectors are zero at the start, the same for
    all heads, and decayed, as in the authors' DeiT, whose position is `irpe+ape`.

    Options: alpha, beta, gamma: 1.9, 3.8 and 15.2.
    """

    paper = "Wu et al., arXiv 2107.14222"
    equation = "logits + q . r, r learned for each bucket of offsets"
    acts = "transform"
    resolution = "extrapolate"
    per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, alpha: float = 1.9, beta: float = 3.8, gamma: float = 15.2):
        super().__init__(stage, rngs=rngs)
        if not isinstance(stage.pattern, Global):
            raise ValueError(
                "a bias that depends on the query is no table of offsets, which windows and neighbourhoods take: use a model with global "
                "attention, or rpb or cpb"
            )
        self.alpha, self.beta, self.gamma = (check_finite(n, x) for n, x in (("alpha", alpha), ("beta", beta), ("gamma", gamma)))
        if not 1 <= alpha <= beta or not alpha < gamma:
            raise ValueError(f"alpha={alpha}, beta={beta}, gamma={gamma} must satisfy 1 <= alpha <= beta and alpha < gamma")
        shape = (stage.depth, stage.head_dim, (2 * int(beta) + 1) ** 2 + (stage.prefix > 0))
        self.vectors = nnx.Param(jnp.zeros(shape, stage.dtype), decay=True)

    def _buckets(self, length: int) -> Array:
        apart = np.arange(length)[:, None] - np.arange(length)
        far = np.maximum(np.abs(apart), self.alpha)
        steps = np.log(far / self.alpha) / np.log(self.gamma / self.alpha)
        outer = np.minimum(self.beta, np.round(self.alpha + (self.beta - self.alpha) * steps)).astype(int)
        bucket = np.where(np.abs(apart) <= self.alpha, apart, np.sign(apart) * outer) + int(self.beta)
        return jnp.asarray(np.eye(2 * int(self.beta) + 1)[bucket], self.stage.dtype)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        return Terms(transform=ContextualBias(PerLayer(self.vectors[...]), *map(self._buckets, grid)))
