"""Segmenter's mask transformer (Strudel et al., arXiv 2105.05633, section 3.2)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import Block, drop_path, drop_path_rates
from rope_jax.models.heads.head import Maps, PixelLogits, SegmentationHead, register_head
from rope_jax.models.layers import Linear, dropout, layer_norm, linear, unit
from rope_jax.models.registry import Options, check_divisible
from rope_jax.models.vit import ViTOptions
from rope_jax.names.options import Count, Positive, Rate
from rope_jax.positions import Terms
from rope_jax.positions.initializers import normal_init
from rope_jax_kernels import Global


@dataclasses.dataclass(frozen=True)
class SegmenterOptions(Options):
    """Options of the mask transformer.

    Attributes:
        width: channels of the decoder; None for those of the map.
        depth: number of blocks.
        head_dim: channels per head.
        mlp_ratio: hidden channels of the MLP, relative to the width.
        norm_epsilon: of every layer norm.
        dropout: of attention's weights, of its output, and of both layers of the MLP.
        drop_path: probability of dropping a residual branch in the last block, from 0 in the first.
    """

    width: Count | None = None
    depth: Count = 2
    head_dim: Count = 64
    mlp_ratio: Positive = 4.0
    norm_epsilon: Positive = 1e-5
    dropout: Rate = 0.1
    drop_path: Rate = 0.0

    draws: ClassVar[tuple[str, ...]] = ("dropout", "drop_path")


class DecoderBlock(Block):
    """A `Block` without positions, with dropout as in Segmenter's own code."""

    def __call__(
        self,
        x: Float[Array, "B L C"],
        drop: float,
        rate: float,
        key: Array | None,
    ) -> Float[Array, "B L C"]:
        """Returns the tokens after this block.

        Args:
            x: tokens.
            drop: probability of dropping either branch.
            rate: of dropout.
            key: for both; None (evaluation) drops nothing.
        """
        keys = [None] * 6 if key is None else jax.random.split(key, 6)
        grid = (1, x.shape[1])  # not used: the attention is global and has no positions
        branch = self.attn(x, grid, Global(), Terms(), rate, keys[0], norm=self.norm1)
        x = x + drop_path(dropout(branch, rate, keys[1]), drop, keys[2])
        hidden = jax.nn.gelu(self.mlp.fc1(x, self.norm2), approximate=False)
        branch = dropout(self.mlp.fc2(dropout(hidden, rate, keys[3])), rate, keys[4])
        return x + drop_path(branch, drop, keys[5])


class Segmenter(SegmentationHead):
    """Learned class tokens attend to the tokens of the map and are compared with them.

    A pixel's logits are the cosines of its token and the class tokens, normalised over classes.
    """

    def __init__(
        self,
        options: SegmenterOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        inputs, width = channels[0], options.width or channels[0]
        check_divisible("the head 'segmenter'", width, {"head_dim": options.head_dim})
        self.options, self.out_features = options, num_classes
        settings = {"rngs": rngs, "dtypes": dtypes}
        shared = ViTOptions(
            width=width,
            heads=width // options.head_dim,
            mlp_ratio=options.mlp_ratio,
            norm_epsilon=options.norm_epsilon,
        )
        self.proj = linear(inputs, width, **settings)
        tokens = normal_init(0.02)(rngs.params(), (num_classes, width), dtypes["param_dtype"])
        self.class_tokens = nnx.Param(tokens, decay=False)
        self.blocks = nnx.List(DecoderBlock(shared, **settings) for _ in range(options.depth))
        self.norm = layer_norm(width, options.norm_epsilon, **settings)
        init = normal_init(width**-0.5)
        self.proj_patch, self.proj_class = (
            Linear(width, width, use_bias=False, kernel_init=init, rngs=rngs, **dtypes)
            for _ in range(2)
        )
        self.mask_norm = layer_norm(num_classes, options.norm_epsilon, **settings)

    def __call__(self, maps: Maps, *, train: bool = False, key: Array | None = None) -> PixelLogits:
        batch, height, width, _ = maps[-1].shape
        area, options = height * width, self.options
        x = self.proj(maps[-1].reshape(batch, area, -1))
        classes = self.class_tokens[...].astype(x.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(classes, (batch, *classes.shape))], axis=1)
        keys = jax.random.split(key, options.depth) if train and key is not None else None
        rates = drop_path_rates(options.drop_path, options.depth)
        for layer, (block, rate) in enumerate(zip(self.blocks, rates, strict=True)):
            x = block(x, rate, options.dropout, None if keys is None else keys[layer])
        patches, classes = jnp.split(self.norm(x), [area], axis=1)
        patches, classes = unit(self.proj_patch(patches)), unit(self.proj_class(classes))
        precise = jnp.promote_types(x.dtype, jnp.float32)
        masks = jnp.einsum(
            "blc,bkc->blk",
            patches.astype(x.dtype),
            classes.astype(x.dtype),
            preferred_element_type=precise,
        )
        masks = self.mask_norm(masks).reshape(batch, height, width, -1)
        return PixelLogits(masks)


register_head("segmenter", Segmenter, SegmenterOptions())
