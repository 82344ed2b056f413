"""CeiT (arXiv 2103.11816): convolutions in the stem and in each block, attention of class tokens.

The only family with batch normalisation, see `BatchNorm`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import SelfAttention
from rope_jax.models.backbone import allow_any_mesh
from rope_jax.models.blocks import Block, drop_path
from rope_jax.models.layers import (
    SUM_OF_PRODUCTS,
    BatchNorm,
    PatchProjection,
    conv,
    gelu,
    layer_norm,
    torch_linear,
)
from rope_jax.models.registry import register
from rope_jax.models.vit import PLAIN, SIZES, ViT, ViTOptions
from rope_jax.names.options import Count, Rate
from rope_jax.positions import Terms
from rope_jax.positions.conditional import depthwise
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import conv_init, fan_in_bias_init
from rope_jax_kernels import Global, Pattern

_STEM_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class CeiTOptions(ViTOptions):
    """Options of CeiT.

    Attributes:
        patch_size: side of a token in pixels, patch_size / 4 rows and columns of the stem's map.
        stem_width: channels of the stem's convolution.
    """

    drop_path: Rate = 0.1
    stem_width: Count = 64

    fixed: ClassVar[tuple[str, ...]] = (
        "patch_norm",
        "class_token",
        "distilled",
        "registers",
        "token_std",
        "pooling",
        "pool_norm",
        "layer_scale",
        "k_bias",
        "feed_forward",
        *PLAIN,
        # Both would have to collect class tokens and statistics of all layers.
        "scan_layers",
        "remat",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.patch_size % _STEM_STRIDE:
            raise ValueError(
                f"patch_size={self.patch_size} must be a multiple of {_STEM_STRIDE}, the stride of "
                "the stem"
            )


class ImageToTokens(nnx.Module):
    """Convolution of 7 x 7 and max pooling of 3 x 3, each with stride 2, then projected patches."""

    def __init__(self, options: CeiTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width, side = options.stem_width, options.patch_size // _STEM_STRIDE
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.conv = conv(3, width, 7, stride=2, padding=3, **settings)
        self.bn = BatchNorm(width, dtypes=dtypes)
        self.proj = PatchProjection(side, options.width, inputs=width, **settings)

    def __call__(self, images: Float[Array, "B H W 3"], train: bool) -> Float[Array, "B h w C"]:
        x = self.bn(self.conv(images), train)
        return self.proj(nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))))


class DepthwiseConv(nnx.Module):
    """A 3 x 3 convolution of each channel by itself."""

    def __init__(self, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        dtype, bias_init = dtypes["param_dtype"], fan_in_bias_init(9)
        self.kernel = nnx.Param(conv_init(rngs.params(), (3, 3, 1, features), dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (features,), dtype))

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        with jax.named_scope(SUM_OF_PRODUCTS):
            return depthwise(x, self.kernel[:, :, 0], self.bias[...])


class LocalMlp(nnx.Module):
    """LeFF: an MLP with a depthwise convolution between its layers, and batch norms.

    Prefix tokens pass through unchanged.
    """

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.conv1 = torch_linear(features, hidden, **settings)  # torch's 1 x 1 convolutions
        self.conv3 = torch_linear(hidden, features, **settings)
        self.conv2 = DepthwiseConv(hidden, **settings)
        self.bn1, self.bn2 = BatchNorm(hidden, dtypes=dtypes), BatchNorm(hidden, dtypes=dtypes)
        self.bn3 = BatchNorm(features, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B L C"], grid: Grid, train: bool) -> Float[Array, "B L C"]:
        batch, tokens, _ = x.shape
        area = grid[0] * grid[1]
        prefix, x = jnp.split(x, [tokens - area], axis=1)
        x = gelu(self.bn1(self.conv1(x), train)).reshape(batch, *grid, -1)
        x = gelu(self.bn2(self.conv2(x), train)).reshape(batch, area, -1)
        return jnp.concatenate([prefix, self.bn3(self.conv3(x), train)], axis=1)


class LocalBlock(nnx.Module):
    """x + attention(norm(x)), then x + leff(norm(x)); the class token skips the LeFF itself."""

    def __init__(self, options: CeiTOptions, *, rngs: nnx.Rngs, dtypes: dict):
        width, epsilon, settings = (
            options.width,
            options.norm_epsilon,
            {"rngs": rngs, "dtypes": dtypes},
        )
        self.norm1 = layer_norm(width, epsilon, **settings)
        self.norm2 = layer_norm(width, epsilon, **settings)
        self.attn = SelfAttention(width, options.heads, qkv_bias=options.qkv_bias, **settings)
        self.leff = LocalMlp(width, int(width * options.mlp_ratio), **settings)

    def __call__(
        self,
        x: Float[Array, "B L C"],
        grid: Grid,
        pattern: Pattern,
        terms: Terms,
        drop: float,
        key: Array | None,
        train: bool,
    ) -> Float[Array, "B L C"]:
        """Returns the tokens after this block.

        Args:
            x, grid, pattern, terms, drop, key: as in `Block`.
            train: as in `BatchNorm`.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + drop_path(self.attn(self.norm1(x), grid, pattern, terms), drop, keys[0])
        return x + drop_path(self.leff(self.norm2(x), grid, train), drop, keys[1])


class CeiT(ViT):
    """Convolution-enhanced image transformer.

    The head takes the last class token after attention among the class tokens of all layers. With
    train=True, calls update the running statistics of batch norms in place.
    """

    block = LocalBlock

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        self.lca = Block(self.options, rngs=rngs, dtypes=dtypes)
        shape = (1, self.options.depth, self.options.width)
        self.layer_embedding = nnx.Param(jnp.zeros(shape, dtypes["param_dtype"]))

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        return ImageToTokens(self.options, rngs=rngs, dtypes=dtypes)

    def tokenize(
        self, images: Float[Array, "B h w 3"], train: bool, key: Array | None
    ) -> Float[Array, "B H W C"]:
        return self.patch_embed(images, train)

    def block_arguments(self, patches: Float[Array, "B H W C"], train: bool) -> list[tuple] | None:
        return [(train,)] * self.options.depth

    @property
    def norms_tokens(self) -> bool:
        return False  # the last norm is for the class tokens

    @allow_any_mesh
    def __call__(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Float[Array, "B classes"]:
        outputs = self.run(images, train, key, range(self.options.depth))
        x = jnp.stack([x[:, 0] for x in outputs], axis=1)
        x = x + self.layer_embedding[...].astype(x.dtype)
        x = self.lca(x, (1, x.shape[1]), Global(), Terms(), 0.0, None)
        return self.head(self.norm(x[:, -1]))


for size in ("t", "s", "b"):
    register(
        f"ceit_{size}", CeiT, CeiTOptions(), position="ape", **SIZES["ti" if size == "t" else size]
    )
