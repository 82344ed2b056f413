"""The cross-axis transformer (CAT): queries attend to the keys of their row, without a softmax.

With q, k, v [H, W, D] of one head the scores are s[h, w, w'] = q[h, w] . k[h, w']. There are two
operators, which differ in the values:

    paper     out[h, w] = sum over w' of s[h, w, w'] v[w, w']
              (Algorithm 2: column w of a query is paired with row w of the values)
    released  out[h, w] = sum over w' of s[h, w, w'] (sum over h' of v[h', w'])
              (the authors' code)

The paper's operator is defined on square maps alone. Each head is then normalised over the whole
map. Two consequences are not in the paper:

* The normalisation removes any factor on the scores, up to the norm's epsilon: both a scale and
  gamma, the factor 1 - 2**(-5 - n) on the keys of head n.
* Each of N = H W queries is multiplied with W keys and W values, so attention costs N W, on square
  maps N**1.5: less than the N**2 of softmax attention, and more than the N that the paper claims.

`cat_vit_5` is the paper's "Classic ViT" of the same width and depth.

Source: Erickson, Cross-Axis Transformer, arXiv 2311.07184.
"""

import dataclasses
import functools
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import declare, drop_path
from rope_jax.models.layers import Mlp, make_head, torch_linear
from rope_jax.models.registry import check_blocks, register
from rope_jax.models.vit import PLAIN, ViT, ViTOptions
from rope_jax.names.options import CountOrZero
from rope_jax.positions import Terms, grids
from rope_jax.positions.batch import add
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Pattern, Rotation, rotate

_PLACES = {"first": 0, "last": -1}


@dataclasses.dataclass(frozen=True)
class CATOptions(ViTOptions):
    """Options of CAT; if paper and released code differ, the paper is the default.

    Attributes:
        operator: "paper" (square maps only) or "released", see `rope_jax.models.cat`.
        imprint: how the patch embedding is added again in layer l of L. "none"; "paper": all of it
            to the normalised tokens; "decayed", as released: 1 - tanh(pi l / L) of it to q, k and
            v; or, of it to the normalised tokens, as in the ablations of table 4: "tanh", that
            fraction; "backwards_tanh", tanh(pi l / L); "linear", 1 - l / L, the formula that the
            paper prints for its row "tanh"; and "backwards_linear", l / L.
        imprint_layers: the layers with an imprint, counted from 0; None for all. With the first
            ones alone "the benefit disappears, and in fact inverts" (section 2.3).
        between: "retnet" divides the scores of a query by the size of their sum over its keys, at
            least 1, between the two products, as RetNet does (sections 2.1 and 4); the divisor has
            no gradient.
        imprint_token: the token that the head reads has a learned vector as imprint, instead of
            its patch (section 4).
        focal_mask: keys decay with the distance from a point that each layer predicts for each
            image, the "learned X/Y mask" of table 4. Neither the paper nor the code has a formula.
            Here the point is tanh of a linear layer of the mean token, on a map whose longer side
            is [-1, 1], and keys are multiplied by exp(-distance).
        pool: the normalised token that the head reads: the "last", as released, or the "first", as
            in the authors' training; or the "mean" of all. None for "last" with the released
            operator, and for "mean" with the paper's, or "first" with an imprint_token.
    """

    class_token: bool = False
    qkv_bias: bool = False
    operator: Literal["paper", "released"] = "paper"
    imprint: Literal[
        "none", "paper", "decayed", "tanh", "backwards_tanh", "linear", "backwards_linear"
    ] = "paper"
    imprint_layers: tuple[CountOrZero, ...] | None = None
    between: Literal["retnet", None] = None
    imprint_token: bool = False
    focal_mask: bool = False
    pool: Literal["last", "first", "mean", None] = None

    fixed: ClassVar[tuple[str, ...]] = (
        "patch_norm",
        "class_token",
        "embed_class_token",
        "distilled",
        "registers",
        "pooling",
        "pool_norm",
        "layer_scale",
        "qkv_bias",
        "k_bias",
        "feed_forward",
        *PLAIN,
        "last_norm",
        "scan_layers",
    )

    def __post_init__(self):
        super().__post_init__()
        check_blocks("imprint_layers", self.imprint_layers or (), self.depth)
        named = self.imprint_token or self.imprint_layers is not None
        if named and not any(self.imprint_fractions):
            raise ValueError(
                f"no layer has an imprint with imprint={self.imprint!r} and "
                f"imprint_layers={self.imprint_layers}: change either, without imprint_token=True"
            )
        if self.imprint_token and self.pool == "mean":
            raise ValueError(
                "imprint_token=True is for the token that the head reads, but pool='mean' reads "
                "all: use 'first' or 'last'"
            )

    @property
    def reads(self) -> str:
        """`pool`, or its default."""
        default = "first" if self.imprint_token else "mean"
        return self.pool or ("last" if self.operator == "released" else default)

    @property
    def imprint_fractions(self) -> list[float]:
        """The fraction of the imprint in each layer."""
        fraction = {
            "none": lambda at: 0.0,
            "paper": lambda at: 1.0,
            "linear": lambda at: 1 - at,
            "backwards_linear": lambda at: at,
            "backwards_tanh": lambda at: math.tanh(math.pi * at),
        }.get(self.imprint, lambda at: 1 - math.tanh(math.pi * at))
        layers = range(self.depth) if self.imprint_layers is None else self.imprint_layers
        return [fraction(n / self.depth) if n in layers else 0.0 for n in range(self.depth)]


class HeadNorm(nnx.Module):
    """Group norm with a head per group, over all tokens; one scale and one bias per head."""

    def __init__(self, heads: int, epsilon: float, *, dtypes: dict):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((heads,), dtypes["param_dtype"]))
        self.bias = nnx.Param(jnp.zeros((heads,), dtypes["param_dtype"]))

    def __call__(self, x: Float[Array, "B L N D"]) -> Float[Array, "B L N D"]:
        x = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        mean = jnp.mean(x, axis=(1, 3), keepdims=True)
        variance = jnp.var(x, axis=(1, 3), keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return x * self.scale[..., None] + self.bias[..., None]


def cross_axis(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    bias: Array | None = None,
    *,
    grid: Grid,
    operator: str,
    rotation: Rotation | None = None,
    between: str | None = None,
) -> Float[Array, "B L N D"]:
    """The cross-axis operators on tokens in reading order; sums are float32 or wider.

    Args:
        q, k, v: tokens of a map of `grid`, L = H*W.
        bias: must be None.
        grid: (H, W).
        operator: "paper" or "released".
        rotation: of q and k, or None.
        between: "retnet" or None, see `CATOptions`.

    Raises:
        ValueError: there is a bias.
    """
    if bias is not None:
        raise ValueError(_NO_BIAS)
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    q, k, v = (x.reshape(x.shape[0], *grid, *x.shape[2:]) for x in (q, k, v))
    scores = product("bhwnd,bhxnd->bhnwx", q, k)
    if between == "retnet":
        size = jnp.abs(scores.sum(axis=-1, keepdims=True))
        scores = scores / jax.lax.stop_gradient(jnp.maximum(size, 1))
    scores = scores.astype(v.dtype)
    if operator == "paper":
        out = product("bhnwx,bwxnd->bhwnd", scores, v)
    else:
        out = product("bhnwx,bxnd->bhwnd", scores, v.sum(axis=1))
    return out.reshape(out.shape[0], -1, *out.shape[3:])


_NO_BIAS = (
    "this position adds a bias to the logits of a softmax, and the cross-axis transformer has "
    "none: use a position that rotates, embeds or transforms, or a ViT"
)
_NO_TEMPERATURE = (
    "yarn and log_scale change the temperature of a softmax, and the cross-axis transformer has "
    "none: use extend=ntk or extend=interpolate, without log_scale"
)


class CrossAxisAttention(nnx.Module):
    """Projection to q, k, v; the cross-axis operator; norm of each head; output projection.

    No projection has a bias.
    """

    def __init__(self, options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.width
        self.operator, self.heads = options.operator, options.heads
        self.between = options.between
        self.late = options.imprint == "decayed"
        settings = {"use_bias": False, "rngs": rngs, "dtypes": dtypes}
        self.qkv = torch_linear(width, 3 * width, **settings)
        self.norm = HeadNorm(options.heads, options.norm_epsilon, dtypes=dtypes)
        self.proj = torch_linear(width, width, **settings)
        if options.focal_mask:
            self.focus = torch_linear(width, 2, **settings)

    def __call__(
        self, x: Float[Array, "B L C"], grid: Grid, terms: Terms, imprint: Array | None
    ) -> Float[Array, "B L C"]:
        """Returns the output tokens.

        Args:
            x: normalised tokens of a map in reading order, L = H*W.
            grid: (H, W).
            terms: position terms of this layer, see `Terms.layer`; without a bias.
            imprint: this layer's fraction of the patch embedding [B, L, C], or None.
        """
        if terms.bias is not None:
            raise ValueError(_NO_BIAS)
        if terms.logit_scale != 1:
            raise ValueError(_NO_TEMPERATURE)
        if terms.add is not None:
            x = add(x, terms.add)
        if imprint is not None and not self.late:
            x = x + imprint
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        if imprint is not None and self.late:
            q, k, v = q + imprint, k + imprint, v + imprint
        q, k, v = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q, k, v))
        k = k * self._key_factor(x, grid).astype(k.dtype)
        settings = {"operator": self.operator, "between": self.between}
        attend = functools.partial(cross_axis, grid=grid, rotation=terms.rotation, **settings)
        out = attend(q, k, v) if terms.transform is None else terms.transform(q, k, v, attend)
        return self.proj(self.norm(out).astype(x.dtype).reshape(x.shape))

    def _key_factor(self, x: Float[Array, "B L C"], grid: Grid) -> Float[Array, "... N 1"]:
        """Factor on keys: gamma, which the norm removes, and the focal mask."""
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        gamma = jnp.asarray(1 - 2.0 ** (-5 - np.arange(self.heads)), dtype)[:, None]
        if not hasattr(self, "focus"):
            return gamma
        point = jnp.tanh(self.focus(x.mean(axis=1))).astype(dtype)
        offsets = jnp.asarray(grids.centres(grid).reshape(-1, 2), dtype) - point[:, None]
        # The root has no gradient at 0: keep the distance above the smallest normal number.
        distance = jnp.sqrt(jnp.maximum((offsets**2).sum(axis=-1), jnp.finfo(dtype).tiny))
        return gamma * jnp.exp(-distance)[..., None, None]


class CrossAxisBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (Algorithm 1)."""

    def __init__(self, options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width, hidden = options.width, int(options.width * options.mlp_ratio)
        self.norm1 = _norm(options, rngs=rngs, dtypes=dtypes)
        self.norm2 = _norm(options, rngs=rngs, dtypes=dtypes)
        self.attn = CrossAxisAttention(options, rngs=rngs, dtypes=dtypes)
        make = functools.partial(torch_linear, use_bias=False)
        self.mlp = Mlp(width, hidden, activation=jax.nn.silu, make=make, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: Grid,
        pattern: Pattern,
        terms: Terms,
        drop: float,
        key: Array | None,
        imprint: Array | None,
    ) -> Float[Array, "B L C"]:
        """Returns the tokens after this block.

        Args:
            x, grid, terms, drop, key: as in `Block`.
            pattern: not used.
            imprint: as in `CrossAxisAttention`.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + drop_path(self.attn(self.norm1(x), grid, terms, imprint), drop, keys[0])
        return x + drop_path(self.mlp(self.norm2(x)), drop, keys[1])


def _norm(options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.LayerNorm:
    settings = {"use_bias": False, "use_fast_variance": False, "rngs": rngs} | dtypes
    return nnx.LayerNorm(options.width, epsilon=options.norm_epsilon, **settings)


class CAT(ViT):
    """Cross-axis transformer. The head reads one token or the mean; there is no class token."""

    block = CrossAxisBlock
    softmax = False

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        options = self.options
        self.norm = declare(
            _norm(options, rngs=rngs, dtypes=dtypes), depth=options.depth, last_norm=True
        )
        self.head = make_head(
            options.width, self.num_classes, rngs=rngs, dtypes=dtypes, make=torch_linear
        )
        if options.imprint_token:
            self.imprint_token = self.learned_tokens(1, rngs=rngs, dtypes=dtypes)
            self.imprint_token.set_metadata(depth=None)  # it acts in every layer
        # Rejects a scheme with a bias now rather than at the first call.
        height, width = (n * options.patch_size for n in self.position.stage.grid)
        images = jax.ShapeDtypeStruct((1, height, width, 3), dtypes["dtype"])
        jax.eval_shape(self.__call__, images)

    def grids(self, image_size: Grid) -> list[Grid]:
        ((height, width),) = super().grids(image_size)
        if self.options.operator == "paper" and height != width:
            raise ValueError(
                "operator='paper' pairs the column of a query with a row of values, so maps must "
                f"be square, but an image of {image_size[0]}x{image_size[1]} pixels makes one of "
                f"{height}x{width}: use square images, or operator='released'"
            )
        return [(height, width)]

    def block_arguments(self, patches: Float[Array, "B H W C"], train: bool) -> list[tuple] | None:
        options = self.options
        patches = patches.reshape(patches.shape[0], -1, options.width)
        if options.imprint_token:
            token = self.imprint_token[0, 0].astype(patches.dtype)
            patches = patches.at[:, _PLACES[options.reads]].set(token)
        return [(patches * part if part else None,) for part in options.imprint_fractions]

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C"]:
        reads = self.options.reads
        return x.mean(axis=1) if reads == "mean" else x[:, _PLACES[reads]]


# For its "Classic ViT" the paper states width 1024, 5 layers, 8 heads, patches of 8, 37.23e9
# multiply-adds, and 784.94 of them per parameter (table 1). By the same counter's results for CAT,
# these are the multiply-adds of dense layers and the convolution, and 4 for each element that a
# layer norm normalises. This leaves 9 * 1024**2 weights per layer, hence an MLP of 2.5 times the
# width; the 47.43e6 parameters exclude the head and the biases of q, k and v. The position is the
# sinusoidal one that the paper attributes to classic ViTs.
_CLASSIC = ViTOptions(mlp_ratio=2.5, qkv_bias=False)
_CAT = CATOptions(mlp_ratio=1.0, norm_epsilon=1e-5)
_SIZE = {"patch_size": 8, "width": 1024, "depth": 5, "heads": 8}

register("cat_5", CAT, _CAT, position="cat_rope", **_SIZE)
register("cat_vit_5", ViT, _CLASSIC, position="sincos1d", **_SIZE)
