"""The cross-axis transformer (CAT): attention without a softmax, in which queries meet the keys of their row only.

With q, k, v [H, W, D] of one head the scores are s[h, w, w'] = q[h, w] . k[h, w'], and the two operators differ in the values:

    paper     out[h, w] = sum over w' of s[h, w, w'] v[w, w']               Algorithm 2: column w of a query meets row w of the values
    released  out[h, w] = sum over w' of s[h, w, w'] (sum over h' of v[h', w'])               the authors' code

Each head is then normalised over the whole map. Two things follow that the paper does not say:

* The scores are not divided by anything, and need not be: a factor on them is a factor on the head's output, which the normalisation takes
  away. So it does with gamma, the factor 1 - 2**(-5 - n) on the keys of head n: it has no effect but for the norm's epsilon.
* Each of N = H W queries meets W keys, and W values after that: the cost of attention grows as N W, for square maps as N**1.5. That is less
  than the N**2 of softmax attention, and more than the N that the paper claims.

`cat_vit_5` is the paper's "Classic ViT" of the same width and depth; how large it is stands at the end of this file.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import conv_init, fan_in_bias_init
from rope_jax.models.blocks import drop_path, training_keys
from rope_jax.models.layers import Linear, check_images, dtypes_of
from rope_jax.models.registry import register
from rope_jax.models.vit import ViT, ViTOptions
from rope_jax.positions import Terms, grids
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Rotation, rotate

_OPERATORS = ("paper", "released")
_POOLS = ("last", "first", "mean", None)
_PLACES = {"first": 0, "last": -1}
# The share of the patch embedding that layer l of L gets (`imprint`); "decayed" joins q, k and v, the others the tokens before the
# projection to them.
_IMPRINTS = {
    "none": None,
    "paper": lambda depth: 1.0,
    "decayed": lambda depth: 1 - math.tanh(math.pi * depth),
    "tanh": lambda depth: 1 - math.tanh(math.pi * depth),
    "backwards_tanh": lambda depth: math.tanh(math.pi * depth),
}


@dataclasses.dataclass(frozen=True)
class CATOptions(ViTOptions):
    """CAT's options; where paper and released code differ, the paper is the default.

    Attributes:
        operator: "paper" (square maps only) or "released", see `rope_jax.models.cat`.
        imprint: how the patch embedding is added again in layer l of L: "none"; "paper", all of it to the normalised tokens; "decayed",
            as released, 1 - tanh(pi l / L) of it to q, k and v; or as in the ablations of table 4: "tanh", so much to the normalised
            tokens, and "backwards_tanh", tanh(pi l / L).
        imprint_token: whether the token that the head reads gets a learned vector for its imprint, in place of its patch (section 4).
        focal_mask: whether keys fade with their distance from a point that each layer picks in each image: the "learned X/Y mask" of
            table 4. The paper derives no formula and the code has none. Here the point is tanh of a dense layer of the mean token, on a
            map whose longer side is [-1, 1], and keys are multiplied by exp(-distance).
        pool: what the head reads of the normalised tokens: the "last" one, as released, the "first" one, as the authors' training does, or
            the "mean". None for "last" with the released operator, and for "mean" with the paper's, or "first" with an imprint_token.
    """

    patch_size: int = 8
    width: int = 1024
    depth: int = 5
    heads: int = 8
    mlp_ratio: float = 1.0
    class_token: bool = False
    qkv_bias: bool = False
    norm_epsilon: float = 1e-5
    operator: str = "paper"
    imprint: str = "paper"
    imprint_token: bool = False
    focal_mask: bool = False
    pool: str | None = None

    fixed: ClassVar[tuple[str, ...]] = (
        *("patch_norm", "class_token", "embed_class_token", "registers", "pooling", "pool_norm", "layer_scale", "qkv_bias", "k_bias"),
        *("feed_forward", "attention", "kernel_size", "scan_layers"),
    )

    def __post_init__(self):
        super().__post_init__()
        for name, allowed in (("operator", _OPERATORS), ("imprint", _IMPRINTS), ("pool", _POOLS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; use one of {', '.join(map(str, allowed))}")
        if self.imprint_token and self.imprint == "none":
            raise ValueError("imprint_token=True with imprint='none': there is no imprint that it could be in; change either")
        if self.imprint_token and self.pool == "mean":
            raise ValueError("imprint_token=True is for the token that the head reads, but pool='mean' reads all: use 'first' or 'last'")

    @property
    def reads(self) -> str:
        """What the head reads: `pool`, or what None stands for."""
        return self.pool or ("last" if self.operator == "released" else "first" if self.imprint_token else "mean")

    @property
    def imprint_shares(self) -> tuple[float, ...]:
        """The share of the imprint in each layer."""
        share = _IMPRINTS[self.imprint]
        return () if share is None else tuple(share(layer / self.depth) for layer in range(self.depth))


class HeadNorm(nnx.Module):
    """Normalises each head over all tokens and channels of an image (a group norm), then one factor and one summand per head."""

    def __init__(self, heads: int, epsilon: float, *, dtypes: dict):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((heads,), dtypes["param_dtype"]))
        self.bias = nnx.Param(jnp.zeros((heads,), dtypes["param_dtype"]))

    def __call__(self, x: Float[Array, "B L N D"]) -> Float[Array, "B L N D"]:
        x = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        mean, variance = (statistic(x, axis=(1, 3), keepdims=True) for statistic in (jnp.mean, jnp.var))
        return (x - mean) * jax.lax.rsqrt(variance + self.epsilon) * self.scale[..., None] + self.bias[..., None]


def cross_axis(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    bias: Array | None = None,
    *,
    grid: Grid,
    operator: str,
    rotation: Rotation | None = None,
) -> Float[Array, "B L N D"]:
    """The operators of this module, on tokens of a map of `grid` in reading order; sums are float32 or wider, and so is what comes out.

    Raises:
        ValueError: there is a bias, which has nothing to join.
    """
    if bias is not None:
        raise ValueError(_NO_BIAS)
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    precise = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    q, k, v = (x.reshape(x.shape[0], *grid, *x.shape[2:]) for x in (q, k, v))
    scores = precise("bhwnd,bhxnd->bhnwx", q, k).astype(v.dtype)
    out = precise("bhnwx,bwxnd->bhwnd", scores, v) if operator == "paper" else precise("bhnwx,bxnd->bhwnd", scores, v.sum(axis=1))
    return out.reshape(out.shape[0], -1, *out.shape[3:])


_NO_BIAS = (
    "this position adds a bias to the logits of a softmax, and the cross-axis transformer has none: use a position that rotates, embeds or "
    "transforms, or a ViT"
)


class CrossAxisAttention(nnx.Module):
    """Projection to q, k, v; the cross-axis operator with a scheme's terms; norm of each head; projection back. Nothing has a bias."""

    def __init__(self, options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.width
        self.operator, self.heads, self.late = options.operator, options.heads, options.imprint == "decayed"
        self.qkv = _linear(width, 3 * width, rngs=rngs, dtypes=dtypes)
        self.norm = HeadNorm(options.heads, options.norm_epsilon, dtypes=dtypes)
        self.proj = _linear(width, width, rngs=rngs, dtypes=dtypes)
        if options.focal_mask:
            self.focus = _linear(width, 2, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B L C"], grid: Grid, terms: Terms, imprint: Array | None) -> Float[Array, "B L C"]:
        """Attends on the tokens of a map, in reading order.

        Args:
            x: [B, H*W, C], normalised.
            grid: (H, W).
            terms: of this layer, see `Terms.layer`; without a bias.
            imprint: this layer's share of the patch embedding [B, H*W, C], or None.
        """
        if terms.bias is not None:
            raise ValueError(_NO_BIAS)
        if terms.add is not None:
            x = x + terms.add.astype(x.dtype)
        if imprint is not None and not self.late:
            x = x + imprint
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        if imprint is not None and self.late:
            q, k, v = q + imprint, k + imprint, v + imprint
        q, k, v = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q, k, v))
        k = k * self._factor(x, grid).astype(k.dtype)
        attend = functools.partial(cross_axis, grid=grid, operator=self.operator, rotation=terms.rotation)
        out = attend(q, k, v) if terms.transform is None else terms.transform(q, k, v, attend)
        return self.proj(self.norm(out).astype(x.dtype).reshape(x.shape))

    def _factor(self, x: Float[Array, "B L C"], grid: Grid) -> Float[Array, "... N 1"]:
        """What keys are multiplied with: gamma, which the norm takes away, and the focal mask."""
        gamma = jnp.asarray(1 - 2.0 ** (-5 - np.arange(self.heads)), jnp.promote_types(x.dtype, jnp.float32))[:, None]
        if not hasattr(self, "focus"):
            return gamma
        point = jnp.tanh(self.focus(x.mean(axis=1))).astype(gamma.dtype)
        apart = jnp.asarray(grids.centres(grid).reshape(-1, 2), gamma.dtype) - point[:, None]
        # The root of 0 has no gradient: a patch exactly at the point counts as a tiny bit off it.
        distance = jnp.sqrt(jnp.maximum((apart**2).sum(axis=-1), jnp.finfo(gamma.dtype).tiny))
        return gamma * jnp.exp(-distance)[..., None, None]


class SiluMlp(nnx.Module):
    """Linear, SiLU, linear, without biases."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.fc1 = _linear(features, hidden, rngs=rngs, dtypes=dtypes)
        self.fc2 = _linear(hidden, features, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        return self.fc2(jax.nn.silu(self.fc1(x)))


class CrossAxisBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (Algorithm 1)."""

    def __init__(self, options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict):
        self.norm1, self.norm2 = (_norm(options, rngs=rngs, dtypes=dtypes) for _ in range(2))
        self.attn = CrossAxisAttention(options, rngs=rngs, dtypes=dtypes)
        self.mlp = SiluMlp(options.width, int(options.width * options.mlp_ratio), rngs=rngs, dtypes=dtypes)

    def __call__(
        self, x: Float[Array, "B L C"], grid: Grid, terms: Terms, imprint: Array | None, drop: float, key: Array | None
    ) -> Float[Array, "B L C"]:
        """See `Block`; imprint: see `CrossAxisAttention`."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + drop_path(self.attn(self.norm1(x), grid, terms, imprint), drop, keys[0])
        return x + drop_path(self.mlp(self.norm2(x)), drop, keys[1])


def _linear(inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict) -> Linear:
    """Without bias and with torch's own initialisation, which the released code leaves as it is."""
    return Linear(inputs, outputs, use_bias=False, kernel_init=conv_init, rngs=rngs, **dtypes)


def _norm(options: CATOptions, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.LayerNorm:
    return nnx.LayerNorm(options.width, epsilon=options.norm_epsilon, use_bias=False, use_fast_variance=False, rngs=rngs, **dtypes)


class CAT(ViT):
    """Cross-axis transformer. The head reads one token or the mean of all; there is no class token."""

    block = CrossAxisBlock

    def __init__(self, options: CATOptions, *, image_size: Grid, num_classes: int, dtype: Any, rngs: nnx.Rngs, **settings: Any):
        super().__init__(options, image_size=image_size, num_classes=num_classes, dtype=dtype, rngs=rngs, **settings)
        dtypes, width = dtypes_of(dtype), options.width
        self.norm = _norm(options, rngs=rngs, dtypes=dtypes)
        self.head = Linear(width, num_classes, kernel_init=conv_init, bias_init=fan_in_bias_init(width), rngs=rngs, **dtypes)
        if options.imprint_token:
            self.imprint_token = self._tokens(1, rngs=rngs, dtypes=dtypes)
        # A scheme with a bias is refused now, not at the first call.
        jax.eval_shape(self.__call__, jax.ShapeDtypeStruct((1, *image_size, 3), dtype))

    def grids(self, image_size: Grid) -> list[Grid]:
        """See `ViT.grids`."""
        ((height, width),) = super().grids(image_size)
        if self.options.operator == "paper" and height != width:
            raise ValueError(
                f"operator='paper' pairs the column of a query with a row of values, so maps must be square, but an image of "
                f"{image_size[0]}x{image_size[1]} pixels makes one of {height}x{width}: use square images, or operator='released'"
            )
        return [(height, width)]

    def encode(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B L C"]:
        """Returns the normalised tokens of the last block, [B, H*W, C]; arguments as in calls."""
        options = self.options
        position_key, key = training_keys(train, key, options.drop_path, 2, augments=self.position.augments)
        keys = [None] * options.depth if key is None else jax.random.split(key, options.depth)
        check_images(images)
        (grid,) = self.grids(images.shape[1:3])
        patches = self.patch_embed(images)
        x, imprints = self.embed(patches, grid, position_key), self._imprints(patches.reshape(len(patches), -1, options.width))
        terms = self.position.terms(grid, position_key)
        for layer, (block, imprint, rate) in enumerate(zip(self.blocks, imprints, self.rates, strict=True)):
            x = block(x, grid, terms.layer(layer), imprint, rate, keys[layer])
            x = self.position.mix(x, grid, layer)
        return self.norm(x)

    def _imprints(self, patches: Float[Array, "B L C"]) -> list[Array | None]:
        """What each layer adds of the patch embedding."""
        options = self.options
        if options.imprint_token:
            patches = patches.at[:, _PLACES[options.reads]].set(self.imprint_token[0, 0].astype(patches.dtype))
        return [patches * share for share in options.imprint_shares] or [None] * options.depth

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C"]:
        """What the head reads of the tokens that `encode` returns, see `CATOptions.pool`."""
        reads = self.options.reads
        return x.mean(axis=1) if reads == "mean" else x[:, _PLACES[reads]]

    def products(self, image_size: Grid) -> dict[str, int]:
        """Multiply-adds of queries with keys and of scores with values: each query meets as many of both as a row has."""
        ((height, width),) = self.grids(image_size)
        return {f"blocks.{layer}.attn": 2 * height * width**2 * self.options.width for layer in range(self.options.depth)}


# Of its "Classic ViT" the paper gives the width 1024, 5 layers, 8 heads, patches of 8, 37.23e9 multiply-adds, and 784.94 of them per
# parameter (table 1). By what the same counter says of CAT, these are the multiply-adds of dense layers and the convolution, and 4 for each
# number that a layer norm normalises. They leave 9 * 1024**2 weights in a layer, which is an MLP of 2.5 times the width, and the 47.43e6
# parameters leave out the head, and biases of q, k and v. The position is the sinusoidal one that the paper says classic ViTs have.
_CLASSIC = ViTOptions(patch_size=8, width=1024, depth=5, heads=8, mlp_ratio=2.5, qkv_bias=False)

register("cat_5", CAT, CATOptions(), position="cat_rope")
register("cat_vit_5", ViT, _CLASSIC, position="sincos1d")
