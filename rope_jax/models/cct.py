"""Compact transformers (arXiv 2104.05704): ViT-Lite, CVT, which pools the sequence, and CCT, whose tokens come from convolutions."""

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import he_init
from rope_jax.models.blocks import Block, drop_path
from rope_jax.models.layers import PatchProjection, check_images, linear
from rope_jax.models.registry import register
from rope_jax.models.vit import ViT, ViTOptions
from rope_jax.positions import Terms
from rope_jax.positions.grids import Grid
from rope_jax_kernels.attention.patterns import Pattern

_POOL, _POOL_STRIDE, _POOL_PADDING = 3, 2, 1
_FIXED = ("patch_norm", "registers", "token_std", "pooling", "pool_norm", "layer_scale", "k_bias", "feed_forward")
_FIXED += ("attention", "kernel_size")


@dataclasses.dataclass(frozen=True)
class CCTOptions(ViTOptions):
    """Options of the family; with a class token it is ViT-Lite, without one CVT or CCT, whose head reads a weighted mean of the tokens.

    Attributes:
        patch_size: pixels from one token to the next along each axis; of CCT, what the strides of its layers make.
        attention_dropout: probability of dropping a weight of attention in training.
        conv_layers: how many layers of convolution, rectifier and pooling by 2 make the tokens; 0 for patches.
        conv_kernel, conv_stride: of each convolution.
        conv_width: channels between convolutions.
    """

    patch_size: int = 4
    width: int = 256
    depth: int = 7
    heads: int = 4
    mlp_ratio: float = 2.0
    qkv_bias: bool = False
    norm_epsilon: float = 1e-5
    drop_path: float = 0.1
    attention_dropout: float = 0.1
    conv_layers: int = 0
    conv_kernel: int = 3
    conv_stride: int = 1
    conv_width: int = 64

    fixed: ClassVar[tuple[str, ...]] = _FIXED

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ValueError(f"attention_dropout={self.attention_dropout} is not allowed; it must be at least 0 and below 1")
        if self.conv_layers < 0:
            raise ValueError(f"conv_layers={self.conv_layers} is not allowed; use 0 for patches, or a number of layers")
        for name in ("conv_kernel", "conv_stride", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        steps = (self.conv_stride * _POOL_STRIDE) ** self.conv_layers
        if self.conv_layers and self.patch_size != steps:
            raise ValueError(
                f"patch_size={self.patch_size} does not go with conv_layers={self.conv_layers} of conv_stride={self.conv_stride}, which "
                f"make a token of every {steps} pixels: use patch_size={steps}, or other layers"
            )


class ConvTokens(nnx.Module):
    """Convolution without bias, rectifier, and the maximum over 3 x 3 in steps of 2, as often as the options say."""

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        channels = [3, *[options.conv_width] * (options.conv_layers - 1), options.width]
        self.convs = nnx.List(
            nnx.Conv(
                inputs,
                outputs,
                (options.conv_kernel,) * 2,
                strides=options.conv_stride,
                padding=_padding(options.conv_kernel),
                use_bias=False,
                kernel_init=he_init,
                rngs=rngs,
                **dtypes,
            )
            for inputs, outputs in itertools.pairwise(channels)
        )

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        x = images
        for conv in self.convs:
            x = nnx.max_pool(jax.nn.relu(conv(x)), (_POOL,) * 2, (_POOL_STRIDE,) * 2, ((_POOL_PADDING,) * 2,) * 2)
        return x


class Patches(nnx.Module):
    """Patches of pixels, projected; the weights start with the variance of a rectifier's layer, though there is none (as there)."""

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        self.proj = PatchProjection(options.patch_size, options.width, kernel_init=he_init, rngs=rngs, dtypes=dtypes)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        return self.proj(images)


class CompactBlock(Block):
    """x + attention(norm1(x)); what goes on is norm2 of that; then x + mlp(x).

    The second norm replaces the residual stream itself, unlike in other transformers: so do the official code and its weights.
    """

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        super().__init__(options, rngs=rngs, dtypes=dtypes)
        self.attention_dropout = options.attention_dropout

    def __call__(
        self, x: Float[Array, "B L C"], grid: Grid, pattern: Pattern, terms: Terms, drop: float | Array, key: Array | None
    ) -> Float[Array, "B L C"]:
        """See `Block`; the key also drops weights of attention."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        branch = self.attn(self.norm1(x), grid, pattern, terms, self.attention_dropout, keys[2])
        x = self.norm2(x + drop_path(branch, drop, keys[0]))
        return x + drop_path(self.mlp(x), drop, keys[1])


class CCT(ViT):
    """ViT-Lite, CVT or CCT, as the options say; images of any size for CCT, and of whole patches for the others.

    Positions and class token are exempt from weight decay, as everywhere here; the official recipe decays them.
    """

    block = CompactBlock

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtype: Any, **settings: Any):
        super().__init__(options, rngs=rngs, dtype=dtype, **settings)
        if options.class_token:
            self.class_token.set_value(jnp.zeros_like(self.class_token[...]))
        else:
            dtypes = {"dtype": self.head.dtype, "param_dtype": self.head.param_dtype}
            self.attention_pool = linear(options.width, 1, rngs=rngs, dtypes=dtypes)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """See `ViT.stem`."""
        return (ConvTokens if self.options.conv_layers else Patches)(self.options, rngs=rngs, dtypes=dtypes)

    def grids(self, image_size: Grid) -> list[Grid]:
        """See `ViT.grids`."""
        return self.convolved(image_size)[-1:] if self.options.conv_layers else super().grids(image_size)

    def convolved(self, image_size: Grid) -> list[Grid]:
        """Rows and columns after each convolution, and after the last pooling."""
        options = self.options
        sizes = []
        for _ in range(options.conv_layers):
            sizes.append(_steps(image_size, options.conv_kernel, options.conv_stride, _padding(options.conv_kernel)))
            image_size = _steps(sizes[-1], _POOL, _POOL_STRIDE, _POOL_PADDING)
        return [*sizes, image_size]

    def places(self, image_size: Grid) -> dict[str, int]:
        """At how many places of an image the weights of a module are applied, where that is not once per token; see `models.cost`."""
        convs = {f"patch_embed.convs.{i}": math.prod(size) for i, size in enumerate(self.convolved(image_size)[:-1])}
        return convs | {"attention_pool": math.prod(self.grids(image_size)[0])}

    def encode(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B L C"]:
        """See `ViT.encode`."""
        check_images(images)
        if train and key is None and self.options.attention_dropout > 0:
            raise ValueError(
                "train=True needs a key for attention dropout: pass key=jax.random.key(...), or create the model with attention_dropout=0"
            )
        return super().encode(images, train=train, key=key)

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C"]:
        """The class token, or the mean of the tokens weighted by a learned softmax over the sequence."""
        if self.options.class_token:
            return super().pool(x)
        weights = jax.nn.softmax(self.attention_pool(x).astype(jnp.promote_types(x.dtype, jnp.float32)), axis=1)
        return jnp.einsum("blo,blc->bc", weights.astype(x.dtype), x)


def _padding(kernel: int) -> int:
    return max(1, kernel // 2)


def _steps(size: Grid, kernel: int, stride: int, padding: int) -> Grid:
    """How often a kernel fits into each padded axis."""
    return tuple((n + 2 * padding - kernel) // stride + 1 for n in size)


_POSITION = "ape(std=0.2,resize=bilinear)"  # ten times the spread of DeiT's, and another rule for other sizes
_CIFAR = {"position": _POSITION, "num_classes": 10, "image_size": 32}
_CVT = CCTOptions(class_token=False)

register("vit_lite_6_4", CCT, CCTOptions(depth=6), **_CIFAR)
register("vit_lite_7_4", CCT, CCTOptions(), **_CIFAR)
register("cvt_7_4", CCT, _CVT, **_CIFAR)
register("cct_2_3x2", CCT, dataclasses.replace(_CVT, width=128, depth=2, heads=2, mlp_ratio=1.0, conv_layers=2, patch_size=4), **_CIFAR)
register("cct_7_3x1", CCT, dataclasses.replace(_CVT, conv_layers=1, patch_size=2), **_CIFAR)
register(
    "cct_14_7x2",
    CCT,
    dataclasses.replace(_CVT, width=384, depth=14, heads=6, mlp_ratio=3.0, conv_layers=2, conv_kernel=7, conv_stride=2, patch_size=16),
    position=_POSITION,
)
