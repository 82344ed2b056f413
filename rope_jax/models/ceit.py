"""CeiT (arXiv 2103.11816): tokens from a convolution, convolutions between the tokens of each block, attention over class tokens.

It is the one family with batch normalisation. Called with train=True, a model normalises by the batch and updates its running statistics
(`nnx.BatchStat`) in place; called without, it uses them and leaves them alone.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import conv_init, fan_in_bias_init
from rope_jax.models.attention import SelfAttention
from rope_jax.models.blocks import Block, drop_path, training_keys
from rope_jax.models.layers import Linear, PatchProjection, check_images, dtypes_of, layer_norm
from rope_jax.models.registry import register
from rope_jax.models.vit import ViT, ViTOptions
from rope_jax.positions import Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Global
from rope_jax_kernels.attention.patterns import Pattern

_STEM_STRIDE = 4
_FIXED = ("patch_norm", "class_token", "registers", "token_std", "pooling", "pool_norm", "layer_scale", "k_bias", "feed_forward")
_FIXED += ("attention", "kernel_size", "scan_layers")  # a scan would have to collect class tokens and statistics of all layers


@dataclasses.dataclass(frozen=True)
class CeiTOptions(ViTOptions):
    """CeiT's options.

    Attributes:
        patch_size: side of a token in pixels; it covers patch_size / 4 rows and columns of the stem's map.
        stem_width: channels of the stem's convolution.
    """

    drop_path: float = 0.1
    stem_width: int = 64

    fixed: ClassVar[tuple[str, ...]] = _FIXED

    def __post_init__(self):
        super().__post_init__()
        if self.stem_width < 1:
            raise ValueError(f"stem_width={self.stem_width} must be at least 1")
        if self.patch_size % _STEM_STRIDE:
            raise ValueError(f"patch_size={self.patch_size} must be a multiple of {_STEM_STRIDE}, the stride of the stem")


class BatchNorm(nnx.Module):
    """Batch normalisation of the last axis, as torch's: epsilon 1e-5, running statistics that take over a tenth of each batch's.

    What is normalised is divided by the square root of the batch's variance; the running variance takes over the unbiased one. Statistics
    are computed in float32 or wider. Those of a batch that is divided over devices are of all of it.
    """

    epsilon: ClassVar[float] = 1e-5
    momentum: ClassVar[float] = 0.1

    def __init__(self, features: int, *, dtypes: dict):
        full = functools.partial(jnp.full, (features,), dtype=dtypes["param_dtype"])
        self.scale, self.bias = nnx.Param(full(1)), nnx.Param(full(0))
        self.mean, self.variance = nnx.BatchStat(full(0)), nnx.BatchStat(full(1))

    def __call__(self, x: Float[Array, "... C"], train: bool) -> Float[Array, "... C"]:
        """Normalises by the batch and updates the running statistics (train), or by those.

        Raises:
            ValueError: there is one value per channel in training, which has no variance.
        """
        precise = x.astype(jnp.promote_types(x.dtype, self.scale.dtype))
        mean, variance = self.mean[...], self.variance[...]
        if train:
            count = math.prod(x.shape[:-1])
            if count < 2:
                raise ValueError(f"batch normalisation of shape {x.shape} has one value per channel: train with more images or larger ones")
            axes = tuple(range(x.ndim - 1))
            mean, variance = precise.mean(axes), precise.var(axes)
            self.mean = self._after(self.mean, mean)
            self.variance = self._after(self.variance, variance * (count / (count - 1)))
        scale = self.scale[...] * jax.lax.rsqrt(variance + self.epsilon)
        return ((precise - mean) * scale + self.bias[...]).astype(x.dtype)

    def _after(self, running: nnx.BatchStat, value: Array) -> nnx.BatchStat:
        """Another variable, not the same one with another value: that may be of a state outside of what jax traces here."""
        return running.replace((1 - self.momentum) * running[...] + self.momentum * value)


class ImageToTokens(nnx.Module):
    """Convolution of 7 x 7 with stride 2, batch norm, the maximum over 3 x 3 with stride 2, then patches of that map, projected."""

    def __init__(self, options: CeiTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.stem_width
        self.conv = nnx.Conv(3, width, (7, 7), strides=2, padding=3, use_bias=False, kernel_init=conv_init, rngs=rngs, **dtypes)
        self.bn = BatchNorm(width, dtypes=dtypes)
        self.proj = PatchProjection(options.patch_size // _STEM_STRIDE, options.width, inputs=width, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "B H W 3"], train: bool) -> Float[Array, "B h w C"]:
        x = self.bn(self.conv(images), train)
        return self.proj(nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))))


class DepthwiseConv(nnx.Module):
    """A 3 x 3 convolution of each channel by itself, as a sum of nine shifted products, which one fused program computes.

    (As a grouped convolution it takes five times as long on a CPU.)
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.kernel = nnx.Param(conv_init(rngs.params(), (3, 3, 1, features), dtypes["param_dtype"]))
        self.bias = nnx.Param(fan_in_bias_init(9)(rngs.params(), (features,), dtypes["param_dtype"]))

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        height, width = x.shape[1:3]
        padded, kernel = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), self.kernel[...]
        products = (padded[:, i : i + height, j : j + width] * kernel[i, j, 0] for i in range(3) for j in range(3))
        return (sum(products) + self.bias[...]).astype(x.dtype)


class LocalMlp(nnx.Module):
    """LeFF: the MLP of a block with a depthwise convolution in its middle and batch norms; prefix tokens pass through unchanged."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        # torch's 1 x 1 convolutions, with their initialisation
        dense = lambda inputs, outputs: Linear(
            inputs, outputs, kernel_init=conv_init, bias_init=fan_in_bias_init(inputs), rngs=rngs, **dtypes
        )
        self.conv1, self.conv3 = dense(features, hidden), dense(hidden, features)
        self.conv2 = DepthwiseConv(hidden, rngs=rngs, dtypes=dtypes)
        self.bn1, self.bn2, self.bn3 = (BatchNorm(n, dtypes=dtypes) for n in (hidden, hidden, features))

    def __call__(self, x: Float[Array, "B L C"], grid: Grid, train: bool) -> Float[Array, "B L C"]:
        prefix, x = jnp.split(x, [x.shape[1] - grid[0] * grid[1]], axis=1)
        gelu = functools.partial(jax.nn.gelu, approximate=False)
        x = gelu(self.bn1(self.conv1(x), train)).reshape(x.shape[0], *grid, -1)
        x = gelu(self.bn2(self.conv2(x), train)).reshape(x.shape[0], grid[0] * grid[1], -1)
        return jnp.concatenate([prefix, self.bn3(self.conv3(x), train)], axis=1)


class LocalBlock(nnx.Module):
    """x + attention(norm(x)), then x + leff(norm(x)): the class token gets its own norm added in the second step."""

    def __init__(self, options: CeiTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.width
        self.norm1, self.norm2 = (layer_norm(width, options.norm_epsilon, rngs=rngs, dtypes=dtypes) for _ in range(2))
        self.attn = SelfAttention(width, options.heads, qkv_bias=options.qkv_bias, rngs=rngs, dtypes=dtypes)
        self.leff = LocalMlp(width, int(width * options.mlp_ratio), rngs=rngs, dtypes=dtypes)

    def __call__(
        self, x: Float[Array, "B L C"], grid: Grid, pattern: Pattern, terms: Terms, drop: float, key: Array | None, train: bool
    ) -> Float[Array, "B L C"]:
        """See `Block`; train: whether batch norms use the batch's statistics, and remember them."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + drop_path(self.attn(self.norm1(x), grid, pattern, terms), drop, keys[0])
        return x + drop_path(self.leff(self.norm2(x), grid, train), drop, keys[1])


class CeiT(ViT):
    """Convolution-enhanced image transformer. The head reads what the class tokens of all layers come to, by attention among them.

    As class tokens pass through LeFF, that of the last block reaches the maps of `features`, and no logits.
    """

    block = LocalBlock

    def __init__(self, options: CeiTOptions, *, rngs: nnx.Rngs, dtype: Any, **settings: Any):
        super().__init__(options, rngs=rngs, dtype=dtype, **settings)
        dtypes = dtypes_of(dtype)
        self.lca = Block(options, rngs=rngs, dtypes=dtypes)
        self.layer_embedding = nnx.Param(jnp.zeros((1, options.depth, options.width), dtypes["param_dtype"]))

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """See `ViT.stem`."""
        return ImageToTokens(self.options, rngs=rngs, dtypes=dtypes)

    def places(self, image_size: Grid) -> dict[str, int]:
        """At how many places of an image the weights of a module are applied, where that is not once per token; see `models.cost`."""
        area = math.prod(self.grids(image_size)[0])
        stem = {"patch_embed.conv": math.prod(-(-n // 2) for n in image_size)}
        return stem | {f"blocks.{i}.leff": area for i in range(self.options.depth)} | {"lca": self.options.depth}

    def products(self, image_size: Grid) -> dict[str, int]:
        """Multiply-adds of the attention among class tokens, which no block holds; see `models.cost`."""
        return {"lca.attn": 2 * self.options.depth**2 * self.options.width}

    def encode(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B L C"]:
        """Returns the tokens of the last block, [B, 1 + H*W, C], not normalised: the last norm belongs to the class tokens' summary."""
        return self._run(images, train, key)[0]

    def __call__(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B classes"]:
        """See `ViT.__call__`. With train=True the running statistics of batch norms are updated in place."""
        _, x = self._run(images, train, key)
        x = x + self.layer_embedding[...].astype(x.dtype)
        x = self.lca(x, (1, x.shape[1]), Global(), Terms(), 0.0, None)
        return self.head(self.norm(x[:, -1]))

    def _run(self, images: Array, train: bool, key: Array | None) -> tuple[Float[Array, "B L C"], Float[Array, "B depth C"]]:
        """The tokens of the last block, and the class tokens of all."""
        check_images(images)
        position_key, key = training_keys(train, key, self.options.drop_path, 2, augments=self.position.augments)
        keys = [None] * self.options.depth if key is None else jax.random.split(key, self.options.depth)
        (grid,) = self.grids(images.shape[1:3])
        x = self.embed(self.patch_embed(images, train), grid, position_key)
        terms, class_tokens = self.position.terms(grid, position_key), []
        for layer, (block, rate) in enumerate(zip(self.blocks, self.rates, strict=True)):
            x = block(x, grid, self.pattern, terms.layer(layer), rate, keys[layer], train)
            x = self.position.mix(x, grid, layer)
            class_tokens.append(x[:, 0])
        return x, jnp.stack(class_tokens, axis=1)


for size, options in {
    "t": {"width": 192, "heads": 3},
    "s": {"width": 384, "heads": 6},
    "b": {"width": 768, "heads": 12},
}.items():
    register(f"ceit_{size}", CeiT, CeiTOptions(**options), position="ape")
