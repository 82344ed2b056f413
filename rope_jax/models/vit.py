"""The isotropic vision transformer: DeiT, DeiT-III, ResFormer, the thesis' ViTs and the demo.

These models differ only in the options of `ViT`; positions come from `rope_jax.positions`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import WINDOW_PADDING, check_windows, make_window
from rope_jax.models.backbone import Backbone, allow_any_mesh, patch_grid
from rope_jax.models.blocks import (
    REMAT,
    Block,
    RunBlocks,
    declare,
    declare_tables,
    drop_path_rates,
    make_blocks,
    prepare_blocks,
    run_blocks,
)
from rope_jax.models.layers import (
    Identity,
    PatchEmbed,
    check_images,
    layer_dtypes,
    layer_norm,
    make_head,
)
from rope_jax.models.registry import Options, check_blocks, check_divisible, register
from rope_jax.names.options import Count, CountOrZero, Positive, Rate
from rope_jax.positions import Stage, create_position
from rope_jax.positions.batch import insert
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import normal_init
from rope_jax_kernels import Global, Neighborhood, Pattern

_READ_WITH = {
    "neighborhood": ("kernel_size", "dilation"),
    "window": ("window_size", "global_blocks", "window_padding", "window_box"),
}
"""Options that are read with one kind of attention alone."""
PLAIN = ("post_norm", "cosine", "attention", *itertools.chain(*_READ_WITH.values()))
"""Options of the plain ViT's blocks and attention, which some families do not have."""


@dataclasses.dataclass(frozen=True)
class BlockOptions(Options):
    """Options of the blocks of isotropic and hierarchical backbones.

    Attributes:
        mlp_ratio: hidden channels of the MLP, relative to `width`.
        layer_scale: initial LayerScale on residual branches, or None for no LayerScale.
        qkv_bias: bias of the projection to q, k, v.
        k_bias: whether that bias includes k.
        post_norm: normalise the output of each residual branch instead of its input, by norms whose
            scale starts at 0 (Swin V2).
        cosine: the logits of attention are cosines of q and k, times a learned scale per head that
            starts at 10 and stays up to 100 (Swin V2), see `CosineAttention`.
        norm_epsilon: of every layer norm.
        last_norm: whether there is a layer norm after the last block; False for backbones of dense
            prediction that have none.
        drop_path: probability of dropping a residual branch in training.
        scan_layers: stack the blocks' parameters and run them in a scan: the same results, with a
            compile time that does not grow with depth.
        remat: what the backward pass recomputes, for less memory. None: norms and activation
            functions; "dots": everything except dense layers, attention included; "blocks": whole
            blocks, of which only the input is kept. Results are equal up to rounding.
    """

    mlp_ratio: Positive = 4.0
    layer_scale: float | None = None
    qkv_bias: bool = True
    k_bias: bool = True
    post_norm: bool = False
    cosine: bool = False
    norm_epsilon: Positive = 1e-6
    last_norm: bool = True
    drop_path: Rate = 0.0
    scan_layers: bool = False
    remat: Literal[*REMAT, None] = None


@dataclasses.dataclass(frozen=True)
class ViTOptions(BlockOptions):
    """Options of an isotropic ViT; each can be overridden by name in `create_model`.

    Attributes:
        patch_size: side of a patch in pixels.
        width, depth, heads: of the encoder.
        patch_norm: layer norm after the patch embedding.
        class_token: prepend a class token.
        embed_class_token: the class token takes part in absolute embeddings (DeiT), or is prepended
            after them (DeiT-III).
        distilled: a distillation token after the class token, treated like it, and a head for each
            of the two; logits are the mean of theirs, in training, too (arXiv 2012.12877).
        registers: number of register tokens before the patches, which take no part in embeddings
            (arXiv 2309.16588).
        token_std: initial standard deviation of class, distillation and register tokens.
        pooling: input of the head: "class" token, "mean" of the patches, "class_mean" for both
            concatenated, or None for the class token if there is one and the mean otherwise.
        pool_norm: apply the last layer norm after pooling (BEiT), not to the tokens.
        feed_forward: "mlp", or "swiglu" with two thirds of the hidden channels.
        drop_path_schedule: "linear" from 0 in the first block to `drop_path` in the last, or
            "constant".
        attention: "global", "neighborhood" of `kernel_size`, or "window" of `window_size`.
        kernel_size: side of the neighbourhood in patches.
        dilation: of the neighbourhood in every second block; the first one has none.
        window_size: side of the windows in patches, which are not shifted (ViTDet).
        global_blocks: with windows, the blocks that attend to the whole map, from 0.
        window_padding: of maps that the windows do not divide: "mask" (padding takes no part), or
            as in official codes "tokens" (ViTDet) or "qkv" (ViT-Adapter), see
            `attention.make_window`.
        window_box: what schemes with coordinates on a box fill with it in windows: the "map", whose
            spacing the tokens of a window keep, or their "own" window, whose angles are those of a
            map of that size. Rows and columns in patches are the same either way.
    """

    patch_size: Count = 16
    width: Count = 384
    depth: Count = 12
    heads: Count = 6
    patch_norm: bool = False
    class_token: bool = True
    embed_class_token: bool = True
    distilled: bool = False
    registers: CountOrZero = 0
    token_std: Positive = 0.02
    pooling: Literal["class", "mean", "class_mean", None] = None
    pool_norm: bool = False
    feed_forward: Literal["mlp", "swiglu"] = "mlp"
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    attention: Literal["global", "neighborhood", "window"] = "global"
    kernel_size: Count = 7
    dilation: Count = 1
    window_size: Count = 14
    global_blocks: tuple[CountOrZero, ...] = ()
    window_padding: Literal[*WINDOW_PADDING] = "mask"
    window_box: Literal["map", "own"] = "map"

    def __post_init__(self):
        super().__post_init__()
        check_divisible("the model", self.width, {"heads": self.heads})
        if self.attention != "global" and (self.class_token or self.registers):
            raise ValueError(
                f"attention={self.attention!r} does not support a class token and registers: set "
                "class_token=False and registers=0"
            )
        if self.pooling in ("class", "class_mean") and not self.class_token:
            raise ValueError(
                f"pooling={self.pooling!r} reads a class token, and there is none: "
                "set class_token=True or pooling='mean'"
            )
        own_token = self.class_token and self.pooling in (None, "class") and not self.pool_norm
        if self.distilled and not own_token:
            raise ValueError(
                "distilled=True has a head of the class token and one of the distillation token: "
                "leave class_token, pooling and pool_norm at their defaults"
            )
        check_blocks("global_blocks", self.global_blocks, self.depth)

    def check_read(self, model: str, overrides: Iterable[str]) -> None:
        for attention, names in _READ_WITH.items():
            unread = sorted({*names}.intersection(overrides))
            if unread and attention != self.attention:
                raise ValueError(
                    f"{model}: {unread[0]} is read with attention={attention!r}, and the model has "
                    f"attention={self.attention!r}: set attention, too, or leave it out"
                )

    @property
    def class_tokens(self) -> int:
        """Number of tokens that a head reads by themselves: class and distillation token."""
        return self.class_token + self.distilled

    def stage(self, grid: Grid, pattern: Pattern, dtype: np.dtype) -> Stage:
        """The stage described by these options, for its positional scheme."""
        return Stage(
            depth=self.depth,
            heads=self.heads,
            head_dim=self.width // self.heads,
            channels=self.width,
            grid=grid,
            pattern=pattern,
            global_layers=self.global_blocks if self.attention == "window" else None,
            window_box=self.window_box,
            prefix=self.class_tokens + self.registers,
            embed_prefix=self.class_tokens if self.embed_class_token else 0,
            dtype=dtype,
        )


class ViT(Backbone):
    """Isotropic vision transformer; see `rope_jax.create_model`.

    Families with a different stem, block or head derive from it.

    Attributes:
        block: class of the blocks.
        stem_draws: whether the stem needs a key in training.
    """

    block: ClassVar[type[nnx.Module]] = Block
    stem_draws: ClassVar[bool] = False

    def __init__(
        self,
        options: ViTOptions,
        *,
        position: str,
        num_classes: int,
        image_size: Grid,
        dtype: np.dtype,
        rngs: nnx.Rngs,
    ):
        dtypes, width = layer_dtypes(dtype), options.width
        self.options = options
        self.pattern = {
            "global": Global(),
            "neighborhood": Neighborhood((options.kernel_size,) * 2),
            "window": make_window((options.window_size,) * 2, options.window_padding),
        }[options.attention]
        self.patch_embed = declare(self.stem(rngs=rngs, dtypes=dtypes), depth=0)
        self.class_token = self.learned_tokens(int(options.class_token), rngs=rngs, dtypes=dtypes)
        self.distillation_token = self.learned_tokens(
            int(options.distilled), rngs=rngs, dtypes=dtypes
        )
        self.registers = self.learned_tokens(options.registers, rngs=rngs, dtypes=dtypes)
        stage = options.stage(self.grids(image_size)[0], self.pattern, dtypes["param_dtype"])
        self.position = declare_tables(create_position(position, stage, rngs=rngs), 1, shared=0)
        check_windows(self.position)
        self.remat = options.remat
        self.rates = drop_path_rates(options.drop_path, options.depth, options.drop_path_schedule)
        make_block = functools.partial(self.block, options, rngs=rngs, dtypes=dtypes)
        self.blocks = make_blocks(make_block, options.depth, scan=options.scan_layers)
        norm = functools.partial(layer_norm, width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.norm = (
            declare(norm(), depth=options.depth, last_norm=True)
            if options.last_norm
            else Identity()
        )
        pooled = width * (2 if options.pooling == "class_mean" else 1)
        self.head = make_head(pooled, num_classes, rngs=rngs, dtypes=dtypes)
        if options.distilled:
            self.distillation_head = make_head(width, num_classes, rngs=rngs, dtypes=dtypes)
        self.add_modules(rngs=rngs, dtypes=dtypes)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Creates the patch embedding: images [B, H, W, 3] to tokens [B, h, w, width]."""
        options = self.options
        epsilon = options.norm_epsilon if options.patch_norm else None
        return PatchEmbed(
            options.patch_size, options.width, norm_epsilon=epsilon, rngs=rngs, dtypes=dtypes
        )

    def learned_tokens(self, count: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Param | None:
        """Creates learned tokens [1, count, width], without weight decay; None for no tokens."""
        if not count:
            return None
        shape, init = (1, count, self.options.width), normal_init(self.options.token_std)
        return nnx.Param(init(rngs.params(), shape, dtypes["param_dtype"]), decay=False, depth=0)

    def parts(self) -> dict[str, nnx.Module]:
        return {"": self}

    def grids(self, image_size: Grid) -> list[Grid]:
        return [patch_grid(image_size, self.options.patch_size)]

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        options, dilated = self.options, self.pattern
        if options.attention == "neighborhood":
            dilated = dataclasses.replace(self.pattern, dilation=(options.dilation,) * 2)
        return [
            Global() if block in options.global_blocks else dilated if block % 2 else self.pattern
            for block in range(options.depth)
        ]

    @allow_any_mesh
    def encode(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Float[Array, "B L C"]:
        """Tokens of the last block, L = P + H*W, normalised unless that comes after pooling.

        Arguments as in `__call__`.
        """
        (x,) = self.run(images, train, key, [self.options.depth - 1])
        return self.norm(x) if self.norms_tokens else x

    def run(
        self,
        images: Float[Array, "B h w 3"],
        train: bool,
        key: Array | None,
        blocks: Sequence[int],
    ) -> Iterator[Array]:
        """Yields the tokens [B, L, C] after the blocks of these numbers, which ascend."""
        x, run = self.start(images, train, key)
        return run_blocks(run, x, blocks)

    def start(
        self, images: Float[Array, "B h w 3"], train: bool, key: Array | None
    ) -> tuple[Float[Array, "B L C"], RunBlocks]:
        """The tokens [B, L, C] before the first block, and a function that runs blocks."""
        (grid,) = self.grids(check_images(images))
        # Keys for the position, for a stem with randomness, and for the blocks.
        keys = self.training_keys(train, key, 2 + self.stem_draws)
        patches = self.tokenize(images, train, keys[1])
        x = self.embed(patches, grid, keys[0])
        run = prepare_blocks(
            self,
            grid,
            self.patterns(0, grid),
            position_key=keys[0],
            key=keys[-1],
            extras=self.block_arguments(patches, train),
        )
        return x, run

    def tokenize(
        self, images: Float[Array, "B h w 3"], train: bool, key: Array | None
    ) -> Float[Array, "B H W C"]:
        """The map of patch tokens; `key` is for stems with randomness in training."""
        return self.patch_embed(images)

    def block_arguments(self, patches: Float[Array, "B H W C"], train: bool) -> list[tuple] | None:
        """Arguments of each block beyond those of `Block`."""
        return None

    def embed(
        self, x: Float[Array, "B H W C"], grid: Grid, key: Array | None
    ) -> Float[Array, "B L C"]:
        """Input of the first block: prefix tokens, then patches, with absolute positions."""
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        learned = (self.class_token, self.distillation_token, self.registers)
        prefix = [token[0] for token in learned if token is not None]
        if not prefix:
            return self.position.embed(x, grid, key)
        prefix, embedded = jnp.concatenate(prefix), self.position.stage.embed_prefix
        x = self.position.embed(insert(prefix[:embedded], x, 0), grid, key)
        return insert(prefix[embedded:], x, embedded)

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C2"]:
        """Input of the head, from the tokens of `encode`; see `ViTOptions.pooling`."""
        options, prefix = self.options, self.position.stage.prefix
        pooling = options.pooling or ("class" if options.class_token else "mean")
        pooled = [x[:, 0]] if pooling != "mean" else []
        pooled += [x[:, prefix:].mean(axis=1)] if pooling != "class" else []
        if options.pool_norm:
            pooled = [self.norm(x) for x in pooled]
        return jnp.concatenate(pooled, axis=-1)

    def classify(self, x: Float[Array, "B L C"]) -> Float[Array, "B classes"]:
        """Logits, from the tokens of `encode`."""
        logits = self.head(self.pool(x))
        return (logits + self.distillation_head(x[:, 1])) / 2 if self.options.distilled else logits

    @allow_any_mesh
    def __call__(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Float[Array, "B classes"]:
        return self.classify(self.encode(images, train=train, key=key))

    @property
    def norms_tokens(self) -> bool:
        return not self.options.pool_norm

    def maps(
        self, images: Float[Array, "B h w 3"], blocks: Sequence[int], train: bool, key: Array | None
    ) -> Iterator[Float[Array, "B H W C"]]:
        ((height, width),) = self.grids(check_images(images))
        for x in self.run(images, train, key, blocks):
            yield x[:, x.shape[1] - height * width :].reshape(x.shape[0], height, width, -1)


SIZES = {
    "ti": {"width": 192, "heads": 3},
    "s": {"width": 384, "heads": 6},
    "b": {"width": 768, "heads": 12},
    "l": {"width": 1024, "depth": 24, "heads": 16},
}
# The models of seven layers of Compact Transformers and T2T-ViT.
SEVEN_LAYERS = {"width": 256, "depth": 7, "heads": 4, "mlp_ratio": 2.0, "qkv_bias": False}
SEVEN_LAYERS |= {"norm_epsilon": 1e-5, "drop_path": 0.1}
_DEIT = ViTOptions(drop_path=0.1)
_DEIT3 = ViTOptions(embed_class_token=False, layer_scale=1e-4, drop_path_schedule="constant")
# From the 400-epoch schedule of Heo et al. (naver-ai/rope-vit, deit/README.md).
_DEIT3_DROP = {"ti": 0.0, "s": 0.0, "b": 0.1, "l": 0.4}
_THESIS = ViTOptions(heads=12, patch_norm=True, class_token=False, norm_epsilon=1e-5, drop_path=0.1)
_THESIS_BASE = {"width": 768, "heads": 24, "drop_path": 0.4}
_NEIGHBORHOOD = dataclasses.replace(_THESIS, attention="neighborhood")
_DIGITS = {"patch_size": 2, "width": 96, "depth": 4, "heads": 6, "mlp_ratio": 2.0, "drop_path": 0.0}

for size in ("ti", "s", "b"):
    register(f"deit_{size}16", ViT, _DEIT, position="ape", **SIZES[size])
    register(f"deit_{size}16_distilled", ViT, _DEIT, position="ape", distilled=True, **SIZES[size])
    # ResFormer (arXiv 2212.00776): DeiT with positions from convolutions, for images of many sizes.
    register(f"resformer_{size}16", ViT, _DEIT, position="gpe+lpe", **SIZES[size])
for size, drop_path in _DEIT3_DROP.items():
    register(f"deit3_{size}16", ViT, _DEIT3, position="ape", drop_path=drop_path, **SIZES[size])
register("vit_s16", ViT, _THESIS, position="axial_rope")
register("vit_b16", ViT, _THESIS, position="axial_rope", **_THESIS_BASE)
register("vit_s16_h6", ViT, _THESIS, position="axial_rope", heads=6)
# The thesis trains NAT's isotropic ViT with other schemes; DiNAT's (arXiv 2209.15001) has a bias.
for name, position, dilation in (("nat", "none", 1), ("dinat", "rpb", 2)):
    options = dataclasses.replace(_NEIGHBORHOOD, dilation=dilation)
    register(f"{name}_isotropic_s16", ViT, options, position=position)
    register(f"{name}_isotropic_b16", ViT, options, position=position, **_THESIS_BASE)
register("vit_digits", ViT, _THESIS, position="axial_rope", num_classes=10, image_size=8, **_DIGITS)
