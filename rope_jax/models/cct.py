"""Compact transformers (arXiv 2104.05704): ViT-Lite, CVT and CCT.

CVT pools the sequence instead of using a class token; CCT's tokens also come from convolutions.
"""

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import Block, drop_path
from rope_jax.models.layers import PatchEmbed, conv, linear, output_size
from rope_jax.models.registry import register
from rope_jax.models.vit import PLAIN, SEVEN_LAYERS, ViT, ViTOptions
from rope_jax.names.options import Count, CountOrZero, Rate
from rope_jax.positions import Terms
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import he_init
from rope_jax_kernels import Pattern

_POOL = (3, 2, 1)  # kernel, stride and padding of the pooling


@dataclasses.dataclass(frozen=True)
class CCTOptions(ViTOptions):
    """Options of ViT-Lite (with a class token), CVT and CCT (without one).

    Attributes:
        patch_size: distance of tokens in pixels; for CCT, the product of its strides.
        attention_dropout: dropout rate of the weights of attention in training.
        conv_layers: layers of convolution, ReLU and pooling by 2 that produce the tokens; 0 for
            patches.
        conv_kernel, conv_stride: of each convolution.
        conv_width: channels between convolutions.
    """

    attention_dropout: Rate = 0.1
    conv_layers: CountOrZero = 0
    conv_kernel: Count = 3
    conv_stride: Count = 1
    conv_width: Count = 64

    draws: ClassVar[tuple[str, ...]] = ("attention_dropout", "drop_path")
    fixed: ClassVar[tuple[str, ...]] = (
        "patch_norm",
        "distilled",
        "registers",
        "token_std",
        "pooling",
        "pool_norm",
        "layer_scale",
        "k_bias",
        "feed_forward",
        *PLAIN,
    )

    def __post_init__(self):
        super().__post_init__()
        stride = (self.conv_stride * _POOL[1]) ** self.conv_layers
        if self.conv_layers and self.patch_size != stride:
            raise ValueError(
                f"patch_size={self.patch_size} does not match {self.conv_layers} conv_layers of "
                f"conv_stride={self.conv_stride}, which make one token per {stride} pixels: use "
                f"patch_size={stride}, or other layers"
            )

    @property
    def conv_padding(self) -> int:
        """Padding of each convolution."""
        return max(1, self.conv_kernel // 2)


class ConvTokens(nnx.Module):
    """Layers of convolution without bias, ReLU, and max pooling of 3 x 3 with stride 2."""

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        channels = [3, *[options.conv_width] * (options.conv_layers - 1), options.width]
        settings = {"stride": options.conv_stride, "padding": options.conv_padding}
        settings |= {"kernel_init": he_init, "rngs": rngs, "dtypes": dtypes}
        pairs = itertools.pairwise(channels)
        self.convs = nnx.List(conv(a, b, options.conv_kernel, **settings) for a, b in pairs)

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        x, (kernel, stride, padding) = images, _POOL
        for layer in self.convs:
            x = jax.nn.relu(layer(x))
            x = nnx.max_pool(x, (kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2)
        return x


class CompactBlock(Block):
    """x = norm2(x + attention(norm1(x))), then x + mlp(x).

    The second norm is applied to the residual stream itself, unlike in other transformers, as in
    the official code and its weights.
    """

    def __init__(self, options: CCTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        super().__init__(options, rngs=rngs, dtypes=dtypes)
        self.attention_dropout = options.attention_dropout

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: Grid,
        pattern: Pattern,
        terms: Terms,
        drop: float | Array,
        key: Array | None,
    ) -> Float[Array, "B L C"]:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        branch = self.attn(self.norm1(x), grid, pattern, terms, self.attention_dropout, keys[2])
        x = self.norm2(x + drop_path(branch, drop, keys[0]))
        return x + drop_path(self.mlp(x), drop, keys[1])


class CCT(ViT):
    """ViT-Lite, CVT or CCT, by its options. CCT takes images of any size, the others whole patches.

    Without a class token, the head reads a mean of the tokens weighted by a learned softmax.
    Positions and class token are exempt from weight decay, as in all models here, unless
    `optim.exempt` is "vectors", as in the official recipe and configs/cct.py.
    """

    block = CompactBlock

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        if self.options.class_token:
            self.class_token.set_value(jnp.zeros_like(self.class_token[...]))
        else:
            self.attention_pool = linear(self.options.width, 1, rngs=rngs, dtypes=dtypes)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        options, settings = self.options, {"rngs": rngs, "dtypes": dtypes}
        if options.conv_layers:
            return ConvTokens(options, **settings)
        # Initialised for a ReLU as in the official code, though there is none.
        settings |= {"norm_epsilon": None, "kernel_init": he_init}
        return PatchEmbed(options.patch_size, options.width, **settings)

    def grids(self, image_size: Grid) -> list[Grid]:
        options = self.options
        if not options.conv_layers:
            return super().grids(image_size)
        for _ in range(options.conv_layers):
            image_size = output_size(
                image_size, options.conv_kernel, options.conv_stride, options.conv_padding
            )
            image_size = output_size(image_size, *_POOL)
        return [image_size]

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C"]:
        if self.options.class_token:
            return super().pool(x)
        logits = self.attention_pool(x).astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.einsum("blo,blc->bc", jax.nn.softmax(logits, axis=1).astype(x.dtype), x)


# Learned positions with ten times the spread of DeiT's and another rule of resizing.
_POSITION = "ape(std=0.2,resize=bilinear)"
_CIFAR = {"position": _POSITION, "num_classes": 10, "image_size": 32}
_VIT_LITE = CCTOptions(patch_size=4, **SEVEN_LAYERS)
_CVT = dataclasses.replace(_VIT_LITE, class_token=False)
_CCT_2 = {"width": 128, "depth": 2, "heads": 2, "mlp_ratio": 1.0, "conv_layers": 2, "patch_size": 4}
_CCT_14 = {"width": 384, "depth": 14, "heads": 6, "mlp_ratio": 3.0, "conv_layers": 2}
_CCT_14 |= {"conv_kernel": 7, "conv_stride": 2, "patch_size": 16}

register("vit_lite_6_4", CCT, _VIT_LITE, depth=6, **_CIFAR)
register("vit_lite_7_4", CCT, _VIT_LITE, **_CIFAR)
register("cvt_7_4", CCT, _CVT, **_CIFAR)
register("cct_2_3x2", CCT, _CVT, **_CIFAR, **_CCT_2)
register("cct_7_3x1", CCT, _CVT, **_CIFAR, conv_layers=1, patch_size=2)
register("cct_14_7x2", CCT, _CVT, position=_POSITION, **_CCT_14)
