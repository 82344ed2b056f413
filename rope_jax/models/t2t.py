"""T2T-ViT (arXiv 2101.11986): tokens from soft splits, overlapping patches of a map that a linear attention has looked over in between."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import orthogonal_init
from rope_jax.models.blocks import Block, run_blocks, training_keys
from rope_jax.models.layers import Mlp, check_images, layer_norm, linear
from rope_jax.models.registry import register
from rope_jax.models.vit import ViT, ViTOptions
from rope_jax.positions.grids import Grid

# (kernel, stride, padding) of the three splits, in pixels and then in tokens: a token for every 16 x 16 pixels.
_SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
_EPSILON = 1e-8  # joins the denominators of the linear attention


@dataclasses.dataclass(frozen=True)
class T2TOptions(ViTOptions):
    """T2T-ViT's options.

    Attributes:
        token_width: channels of the tokens between the splits.
        random_features: of the kernel that stands for the softmax there.
        performer_dropout: probability of dropping a number of what either branch of a performer adds, in training.
        logit_scale: what logits are divided by the square root of: the channels of a "head" or, as in the weights that the authors
            published first (their qk_scale), those of all heads, "width". Weights do not tell; with the wrong one accuracy is lost.
    """

    width: int = 256
    depth: int = 7
    heads: int = 4
    mlp_ratio: float = 2.0
    qkv_bias: bool = False
    norm_epsilon: float = 1e-5
    drop_path: float = 0.1
    token_width: int = 64
    random_features: int = 32
    performer_dropout: float = 0.1
    logit_scale: str = "head"

    fixed: ClassVar[tuple[str, ...]] = ("patch_size", "patch_norm", "attention", "kernel_size")

    def __post_init__(self):
        super().__post_init__()
        for name in ("token_width", "random_features"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.random_features > self.token_width:
            raise ValueError(
                f"random_features={self.random_features} are orthogonal, so there are at most token_width={self.token_width}: change either"
            )
        if not 0.0 <= self.performer_dropout < 1.0:
            raise ValueError(f"performer_dropout={self.performer_dropout} is not allowed; it must be at least 0 and below 1")
        if self.logit_scale not in ("head", "width"):
            raise ValueError(f"logit_scale={self.logit_scale!r} is not allowed; use one of head, width")


class RandomFeatures(nnx.BatchStat):
    """Directions of a random kernel: drawn at the start and never trained, they are stored where running statistics are."""


class Performer(nnx.Module):
    """Linear attention of one head with positive random features (Performer, arXiv 2009.14794), then an MLP as wide as the tokens.

    What attention finds is added to the values, not to the input, which has another width. The projection gives k, q, v in this order.
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
        """Returns tokens of `token_width` channels; key: for dropout, or None (evaluation)."""
        keys = (None, None) if key is None else jax.random.split(key)
        k, q, v = jnp.split(self.kqv(self.norm1(x)), 3, axis=-1)
        x = v + dropout(self.proj(self._attend(q, k, v)), self.dropout, keys[0])
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, keys[1])

    def _attend(self, q: Float[Array, "B L C"], k: Float[Array, "B L C"], v: Float[Array, "B L C"]) -> Float[Array, "B L C"]:
        """Attention with the kernel phi(q) phi(k)', in float32 or wider; the sums over keys are formed once for all queries."""
        q, k = self._features(q), self._features(k)
        values = jnp.einsum("blm,blc->bmc", k, v.astype(k.dtype))
        total = jnp.einsum("blm,bm->bl", q, k.sum(axis=1))
        return (jnp.einsum("blm,bmc->blc", q, values) / (total[..., None] + _EPSILON)).astype(v.dtype)

    def _features(self, x: Float[Array, "B L C"]) -> Float[Array, "B L M"]:
        """phi(x) = exp(w x - |x|^2 / 2) / sqrt(M), whose products are those of exp(q k') on average over w."""
        w = self.w[...]
        x = x.astype(w.dtype)
        return jnp.exp(x @ w.T - (x * x).sum(axis=-1, keepdims=True) / 2) / math.sqrt(len(w))


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Drops single numbers with probability `rate` and scales the others up; no key, no drop."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


def split_size(size: Grid, kernel: int, stride: int, padding: int) -> Grid:
    """Rows and columns of the tokens that a soft split makes of a map."""
    return tuple((n + 2 * padding - kernel) // stride + 1 for n in size)


def soft_split(x: Float[Array, "B H W C"], kernel: int, stride: int, padding: int) -> Float[Array, "B h w K"]:
    """Overlapping patches of a map, zeros around it; of a patch's numbers the channel is the first axis, then row and column."""
    grid = split_size(x.shape[1:3], kernel, stride, padding)
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    for axis, count in zip((1, 2), grid, strict=True):
        starts = (jax.lax.slice_in_dim(x, i, i + stride * (count - 1) + 1, stride, axis) for i in range(kernel))
        x = jnp.stack(list(starts), axis=-1)
    return x.reshape(x.shape[0], *grid, -1)


class TokensToToken(nnx.Module):
    """Three soft splits with a performer after the first and the second one, and a projection to the width of the backbone."""

    def __init__(self, options: T2TOptions, *, rngs: nnx.Rngs, dtypes: dict):
        inputs = [channels * split[0] ** 2 for channels, split in zip((3, options.token_width, options.token_width), _SPLITS, strict=True)]
        self.attention1, self.attention2 = (Performer(n, options, rngs=rngs, dtypes=dtypes) for n in inputs[:2])
        self.project = linear(inputs[2], options.width, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "B H W 3"], key: Array | None) -> Float[Array, "B h w C"]:
        keys = (None, None) if key is None else jax.random.split(key)
        x = images.astype(self.project.dtype)
        for performer, split, own in zip((self.attention1, self.attention2), _SPLITS, keys, strict=False):
            x = soft_split(x, *split)
            x = performer(x.reshape(x.shape[0], -1, x.shape[-1]), own).reshape(*x.shape[:3], -1)
        return self.project(soft_split(x, *_SPLITS[2]))


class T2TBlock(Block):
    """A `Block` whose logits are scaled as `T2TOptions.logit_scale` says."""

    def __init__(self, options: T2TOptions, *, rngs: nnx.Rngs, dtypes: dict):
        super().__init__(options, rngs=rngs, dtypes=dtypes)
        self.attn.scale = options.width**-0.5 if options.logit_scale == "width" else None


class T2TViT(ViT):
    """T2T-ViT, for images of any size from 3 x 3 pixels: n pixels become (n + 1) // 4 tokens, then twice half as many, rounded up."""

    block = T2TBlock

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """See `ViT.stem`."""
        return TokensToToken(self.options, rngs=rngs, dtypes=dtypes)

    def grids(self, image_size: Grid) -> list[Grid]:
        """See `ViT.grids`."""
        return self._split_sizes(image_size)[-1:]

    def _split_sizes(self, image_size: Grid) -> list[Grid]:
        """Rows and columns after each split."""
        if min(image_size) < 3:
            raise ValueError(f"image size {image_size[0]}x{image_size[1]} is too small for a split of 7x7 pixels: use at least 3x3")
        sizes = [tuple(image_size)]
        for split in _SPLITS:
            sizes.append(split_size(sizes[-1], *split))
        return sizes[1:]

    def encode(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B L C"]:
        """See `ViT.encode`; the key also drops numbers in the stem."""
        options = self.options
        if train and key is None and options.performer_dropout > 0:
            raise ValueError(
                "train=True needs a key for dropout in the stem: pass key=jax.random.key(...), or create the model with performer_dropout=0"
            )
        position_key, stem_key, key = training_keys(train, key, options.drop_path, 3, augments=self.position.augments)
        check_images(images)
        (grid,) = self.grids(images.shape[1:3])
        x = self.embed(self.patch_embed(images, stem_key), grid, position_key)
        patterns = [self.pattern] * options.depth
        x = run_blocks(self.blocks, x, grid, patterns, self.position, self.rates, position_key=position_key, key=key)
        return x if options.pool_norm else self.norm(x)

    def places(self, image_size: Grid) -> dict[str, int]:
        """At how many places of an image the weights of the stem's performers are applied, by name."""
        first, second, _ = map(math.prod, self._split_sizes(image_size))
        return {"patch_embed.attention1": first, "patch_embed.attention2": second}

    def products(self, image_size: Grid) -> dict[str, int]:
        """Multiply-adds of the performers' attention: features of queries and keys, sums over keys, and their products with queries."""
        width, features = self.options.token_width, self.options.random_features
        return {name: tokens * features * (4 * width + 1) for name, tokens in self.places(image_size).items()}


register("t2t_vit_7", T2TViT, T2TOptions(), position="sincos1d")
