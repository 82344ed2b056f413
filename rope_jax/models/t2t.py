"""T2T-ViT (arXiv 2101.11986): tokens from soft splits, overlapping patches of a map.

Between the splits the map passes through linear attention.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import Block
from rope_jax.models.layers import Mlp, dropout, layer_norm, linear, output_size
from rope_jax.models.registry import register
from rope_jax.models.vit import PLAIN, SEVEN_LAYERS, ViT, ViTOptions
from rope_jax.names.options import Count, Rate
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import orthogonal_init

# (kernel, stride, padding) of the three splits, in pixels, then in tokens of the previous map.
_SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
_EPSILON = 1e-8  # added to the denominators of the linear attention


@dataclasses.dataclass(frozen=True)
class T2TOptions(ViTOptions):
    """Options of T2T-ViT.

    Attributes:
        token_width: channels of the tokens between the splits.
        random_features: number of random features that approximate the softmax there.
        performer_dropout: dropout rate of either branch of a performer.
        logit_scale: logits are divided by the square root of the channels of a "head" or of all
            heads, "width". The latter is for the weights that the authors published first (their
            qk_scale); it cannot be inferred from the weights, and the wrong one costs accuracy.
    """

    token_width: Count = 64
    random_features: Count = 32
    performer_dropout: Rate = 0.1
    logit_scale: Literal["head", "width"] = "head"

    draws: ClassVar[tuple[str, ...]] = ("performer_dropout", "drop_path")
    fixed: ClassVar[tuple[str, ...]] = ("patch_size", "patch_norm", *PLAIN)

    def __post_init__(self):
        super().__post_init__()
        if self.random_features > self.token_width:
            raise ValueError(
                f"random_features={self.random_features} are orthogonal, so there are at most "
                f"token_width={self.token_width}: change either"
            )


class RandomFeatures(nnx.BatchStat):
    """Directions of a random kernel: drawn once, not trained, stored like running statistics."""


class Performer(nnx.Module):
    """Linear attention with positive random features (Performer, arXiv 2009.14794), then an MLP.

    One head, whose output is added to the values because the input has another width. The
    projection returns k, q, v in this order.
    """

    def __init__(self, inputs: int, options: T2TOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width, count = options.token_width, options.random_features
        self.dropout = options.performer_dropout
        self.norm1 = layer_norm(inputs, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.kqv = linear(inputs, 3 * width, rngs=rngs, dtypes=dtypes)
        self.proj = linear(width, width, rngs=rngs, dtypes=dtypes)
        self.norm2 = layer_norm(width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.mlp = Mlp(width, width, rngs=rngs, dtypes=dtypes)
        directions = orthogonal_init(rngs.params(), (count, width), dtypes["param_dtype"])
        self.w = RandomFeatures(directions * math.sqrt(count))

    def __call__(self, x: Float[Array, "B L I"], key: Array | None) -> Float[Array, "B L C"]:
        """Tokens of `token_width` channels.

        Args:
            x: tokens of a soft split.
            key: for dropout; None (evaluation) drops nothing.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        k, q, v = jnp.split(self.kqv(self.norm1(x)), 3, axis=-1)
        x = v + dropout(self.proj(self._attend(q, k, v)), self.dropout, keys[0])
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, keys[1])

    def _attend(
        self, q: Float[Array, "B L C"], k: Float[Array, "B L C"], v: Float[Array, "B L C"]
    ) -> Float[Array, "B L C"]:
        """Attention with the kernel phi(q) phi(k)', in float32 or wider, linear in L."""
        q, k = self._features(q), self._features(k)
        values = jnp.einsum("blm,blc->bmc", k, v.astype(k.dtype))
        total = jnp.einsum("blm,bm->bl", q, k.sum(axis=1))
        out = jnp.einsum("blm,bmc->blc", q, values) / (total[..., None] + _EPSILON)
        return out.astype(v.dtype)

    def _features(self, x: Float[Array, "B L C"]) -> Float[Array, "B L M"]:
        """phi(x) = exp(w x - |x|^2 / 2) / sqrt(M); E[phi(q) phi(k)'] = exp(q k')."""
        w = self.w[...]
        x = x.astype(w.dtype)
        return jnp.exp(x @ w.T - (x * x).sum(axis=-1, keepdims=True) / 2) / math.sqrt(len(w))


def soft_split(
    x: Float[Array, "B H W C"], kernel: int, stride: int, padding: int
) -> Float[Array, "B h w K"]:
    """Overlapping patches of a zero-padded map, K = (channel, row, column)."""
    grid = output_size(x.shape[1:3], kernel, stride, padding)
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    for axis, count in zip((1, 2), grid, strict=True):
        span = stride * (count - 1) + 1
        shifted = [jax.lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(kernel)]
        x = jnp.stack(shifted, axis=-1)
    return x.reshape(x.shape[0], *grid, -1)


class TokensToToken(nnx.Module):
    """Three soft splits, the first two followed by performers, then a projection."""

    def __init__(self, options: T2TOptions, *, rngs: nnx.Rngs, dtypes: dict):
        channels = (3, options.token_width, options.token_width)
        inputs = [n * kernel**2 for n, (kernel, _, _) in zip(channels, _SPLITS, strict=True)]
        self.attention1 = Performer(inputs[0], options, rngs=rngs, dtypes=dtypes)
        self.attention2 = Performer(inputs[1], options, rngs=rngs, dtypes=dtypes)
        self.project = linear(inputs[2], options.width, rngs=rngs, dtypes=dtypes)

    def __call__(
        self, images: Float[Array, "B H W 3"], key: Array | None
    ) -> Float[Array, "B h w C"]:
        keys = (None, None) if key is None else jax.random.split(key)
        performers = (self.attention1, self.attention2)
        x = images.astype(self.project.dtype)
        for performer, split, layer_key in zip(performers, _SPLITS[:2], keys, strict=True):
            x = soft_split(x, *split)
            tokens = x.reshape(x.shape[0], -1, x.shape[-1])
            x = performer(tokens, layer_key).reshape(*x.shape[:3], -1)
        return self.project(soft_split(x, *_SPLITS[2]))


class T2TBlock(Block):
    """A `Block` with logits scaled by `T2TOptions.logit_scale`."""

    def __init__(self, options: T2TOptions, *, rngs: nnx.Rngs, dtypes: dict):
        super().__init__(options, rngs=rngs, dtypes=dtypes)
        self.attn.scale = options.width**-0.5 if options.logit_scale == "width" else None


class T2TViT(ViT):
    """T2T-ViT, for images of any size from 3 x 3 pixels.

    n pixels become (n + 1) // 4 tokens, which are halved twice, rounding up.
    """

    block = T2TBlock
    stem_draws = True

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        return TokensToToken(self.options, rngs=rngs, dtypes=dtypes)

    def tokenize(
        self, images: Float[Array, "B h w 3"], train: bool, key: Array | None
    ) -> Float[Array, "B H W C"]:
        return self.patch_embed(images, key)

    def grids(self, image_size: Grid) -> list[Grid]:
        if min(image_size) < 3:
            raise ValueError(
                f"image size {image_size[0]}x{image_size[1]} is too small for a split of 7x7 "
                "pixels: use at least 3x3"
            )
        for split in _SPLITS:
            image_size = output_size(image_size, *split)
        return [image_size]


register("t2t_vit_7", T2TViT, T2TOptions(**SEVEN_LAYERS), position="sincos1d")
