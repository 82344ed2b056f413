"""The isotropic vision transformer: one definition for DeiT, DeiT-III (Heo's ViT), the thesis' ViT, NAT's isotropic ViT and the demo.

They differ in the options of `ViT` and nowhere else; position information comes from the scheme (`rope_jax.positions`).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import normal_init
from rope_jax.models.blocks import Block, check_drop_path, drop_path_rates, make_blocks, run_blocks, training_keys
from rope_jax.models.layers import PatchEmbed, check_images, dtypes_of, layer_norm, linear, param_dtype
from rope_jax.models.registry import image_pair, register
from rope_jax.positions import Stage, create_position
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Global, Neighborhood

_WORDS = {
    "attention": ("global", "neighborhood"),
    "drop_path_schedule": ("linear", "constant"),
    "feed_forward": ("mlp", "swiglu"),
    "pooling": ("class", "mean", "class_mean", None),
}


@dataclasses.dataclass(frozen=True)
class ViTOptions:
    """What distinguishes one isotropic ViT from another; each may be overridden by name in `create_model`.

    Attributes:
        patch_size: side of a patch in pixels.
        width, depth, heads, mlp_ratio: of the encoder.
        patch_norm: layer norm after the patch embedding.
        class_token: whether there is one; without it the head reads the mean of the normalised tokens.
        embed_class_token: whether the class token takes part in absolute embeddings (DeiT) or is prepended after them (DeiT-III).
        registers: number of register tokens between class token and patches; they never take part in embeddings (arXiv 2309.16588).
        token_std: standard deviation of the class and register tokens at the start.
        pooling: what the head reads: the "class" token, the "mean" of the patches, "class_mean" for one after the other, or None for
            the class token where there is one and the mean elsewhere.
        pool_norm: whether the last layer norm is applied to what is pooled (BEiT) and not to the tokens.
        layer_scale: initial value of the factor on residual branches, or None for no such factor.
        qkv_bias: whether the projection to q, k, v has a bias.
        k_bias: whether that of k has one, too.
        feed_forward: "mlp", or "swiglu" with two thirds of the hidden channels, rounded up to a multiple of 8.
        norm_epsilon: of every layer norm.
        drop_path: probability of dropping a residual branch in training.
        drop_path_schedule: "linear" from 0 in the first block to `drop_path` in the last, or "constant".
        attention: "global", or "neighborhood" of `kernel_size`.
        kernel_size: side of the neighbourhood in patches.
        scan_layers: whether the blocks are kept as one, with stacked parameters, and run in a scan: the same numbers, and a compile time
            that does not grow with depth.
    """

    patch_size: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6
    mlp_ratio: float = 4.0
    patch_norm: bool = False
    class_token: bool = True
    embed_class_token: bool = True
    registers: int = 0
    token_std: float = 0.02
    pooling: str | None = None
    pool_norm: bool = False
    layer_scale: float | None = None
    qkv_bias: bool = True
    k_bias: bool = True
    feed_forward: str = "mlp"
    norm_epsilon: float = 1e-6
    drop_path: float = 0.0
    drop_path_schedule: str = "linear"
    attention: str = "global"
    kernel_size: int = 7
    scan_layers: bool = False

    fixed: ClassVar[tuple[str, ...]] = ()  # what a family that derives from this one cannot change

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name in self.fixed and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r} is not an option of this family: leave it at {field.default!r}"
                )
        for name in ("patch_size", "width", "depth", "heads", "kernel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}: change one of them")
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; use one of {', '.join(map(str, allowed))}")
        for name in ("mlp_ratio", "norm_epsilon", "token_std"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; it must be above 0")
        check_drop_path(self.drop_path)
        if self.registers < 0:
            raise ValueError(f"registers={self.registers} must be at least 0")
        if self.attention != "global" and self.class_token:
            raise ValueError(f"attention={self.attention!r} has no place for a class token: set class_token=False")
        if self.attention != "global" and self.registers:
            raise ValueError(f"attention={self.attention!r} has no place for registers: set registers=0")
        if self.pooling in ("class", "class_mean") and not self.class_token:
            raise ValueError(f"pooling={self.pooling!r} reads a class token, and there is none: set class_token=True or pooling='mean'")


class ViT(nnx.Module):
    """Isotropic vision transformer; see `rope_jax.create_model` for how to make one and what calls accept.

    Families with another stem, block or pooling derive from it and override `stem`, `block`, `grids` or `pool`.
    """

    block: ClassVar[type[nnx.Module]] = Block

    def __init__(self, options: ViTOptions, *, position: str, num_classes: int, image_size: Grid, dtype: np.dtype, rngs: nnx.Rngs):
        dtypes = dtypes_of(dtype)
        self.options = options
        self.pattern = Global() if options.attention == "global" else Neighborhood((options.kernel_size,) * 2)
        self.patch_embed = self.stem(rngs=rngs, dtypes=dtypes)
        if options.class_token:
            self.class_token = self._tokens(1, rngs=rngs, dtypes=dtypes)
        if options.registers:
            self.registers = self._tokens(options.registers, rngs=rngs, dtypes=dtypes)
        stage = Stage(
            depth=options.depth,
            heads=options.heads,
            head_dim=options.width // options.heads,
            channels=options.width,
            grid=self.grids(image_size)[0],
            pattern=self.pattern,
            prefix=options.class_token + options.registers,
            embed_prefix=int(options.class_token and options.embed_class_token),
            dtype=param_dtype(dtype),
        )
        self.position = create_position(position, stage, rngs=rngs)
        self.rates = drop_path_rates(options.drop_path, options.depth, options.drop_path_schedule)
        self.blocks = make_blocks(lambda: self.block(options, rngs=rngs, dtypes=dtypes), options.depth, scan=options.scan_layers)
        self.norm = layer_norm(options.width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        read = options.width * (2 if options.pooling == "class_mean" else 1)
        self.head = linear(read, num_classes, rngs=rngs, dtypes=dtypes)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Makes what turns images [B, H, W, 3] into a map of tokens [B, h, w, width]."""
        options = self.options
        epsilon = options.norm_epsilon if options.patch_norm else None
        return PatchEmbed(options.patch_size, options.width, norm_epsilon=epsilon, rngs=rngs, dtypes=dtypes)

    def _tokens(self, count: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Param:
        start = normal_init(self.options.token_std)
        return nnx.Param(start(rngs.params(), (1, count, self.options.width), dtypes["param_dtype"]), decay=False)

    def grids(self, image_size: Grid) -> list[Grid]:
        """Rows and columns of the map of each stage (here one) of an image of (height, width) pixels."""
        patch = self.options.patch_size
        if image_size[0] % patch or image_size[1] % patch:
            raise ValueError(f"image size {image_size[0]}x{image_size[1]} is not divisible by the patch size {patch}: change one of them")
        return [(image_size[0] // patch, image_size[1] // patch)]

    def resize(self, image_size: int | Grid) -> None:
        """Makes `image_size` (pixels, int or (height, width)) that of creation: position tables are resized by their scheme's rule."""
        self.position.resize(self.grids(image_pair(image_size))[0])

    def encode(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B L C"]:
        """Returns the tokens of the last block, [B, P + H*W, C], normalised unless that comes after pooling; arguments as in calls."""
        options = self.options
        position_key, key = training_keys(train, key, options.drop_path, 2, augments=self.position.augments)
        check_images(images)
        (grid,) = self.grids(images.shape[1:3])
        x = self.embed(self.patch_embed(images), grid, position_key)
        patterns = [self.pattern] * options.depth
        x = run_blocks(self.blocks, x, grid, patterns, self.position, self.rates, position_key=position_key, key=key)
        return x if options.pool_norm else self.norm(x)

    def embed(self, x: Float[Array, "B h w C"], grid: Grid, key: Array | None) -> Float[Array, "B L C"]:
        """The tokens that enter the first block, from what the stem makes of images: with class token, registers, and positions."""
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        prefix, embedded = self._prefix(x), self.position.stage.embed_prefix
        x = self.position.embed(jnp.concatenate([prefix[:, :embedded], x], axis=1), grid, key)
        return jnp.concatenate([x[:, :embedded], prefix[:, embedded:], x[:, embedded:]], axis=1)

    def _prefix(self, x: Float[Array, "B L C"]) -> Float[Array, "B P C"]:
        """Class and register tokens, in this order, for patches x."""
        tokens = [getattr(self, name)[...] for name in ("class_token", "registers") if hasattr(self, name)]
        tokens = [jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], *token.shape[1:])) for token in tokens]
        return jnp.concatenate([*tokens, x[:, :0]], axis=1)

    def pool(self, x: Float[Array, "B L C"]) -> Float[Array, "B C2"]:
        """What the head reads of the tokens that `encode` returns, see `ViTOptions.pooling`."""
        options, prefix = self.options, self.position.stage.prefix
        pooling = options.pooling or ("class" if options.class_token else "mean")
        read = [x[:, 0]] if pooling != "mean" else []
        read += [x[:, prefix:].mean(axis=1)] if pooling != "class" else []
        return jnp.concatenate([self.norm(x) for x in read] if options.pool_norm else read, axis=-1)

    def __call__(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B classes"]:
        """Returns logits [B, num_classes] of normalised images [B, H, W, 3]; any H, W that `grids` accepts."""
        return self.head(self.pool(self.encode(images, train=train, key=key)))

    def features(self, images: Float[Array, "B h w 3"]) -> list[Float[Array, "B H W C"]]:
        """Returns the tokens of `encode` as a list of one map [B, H, W, C], without class and register tokens."""
        x = self.encode(images)
        (grid,) = self.grids(images.shape[1:3])
        return [x[:, x.shape[1] - grid[0] * grid[1] :].reshape(x.shape[0], *grid, -1)]


_DEIT = ViTOptions(drop_path=0.1)
_DEIT3 = ViTOptions(embed_class_token=False, layer_scale=1e-4, drop_path_schedule="constant")
_THESIS = ViTOptions(heads=12, patch_norm=True, class_token=False, norm_epsilon=1e-5, drop_path=0.1)
_NEIGHBORHOOD = dataclasses.replace(_THESIS, attention="neighborhood")
SIZES = {
    "ti": {"width": 192, "heads": 3},
    "s": {"width": 384, "heads": 6},
    "b": {"width": 768, "heads": 12},
    "l": {"width": 1024, "depth": 24, "heads": 16},
}
_THESIS_BASE = {"width": 768, "heads": 24, "drop_path": 0.4}
# Of the 400-epoch schedule with which Heo et al. train (naver-ai/rope-vit, deit/README.md).
_DEIT3_DROP = {"ti": 0.0, "s": 0.0, "b": 0.1, "l": 0.4}

for size in ("ti", "s", "b"):
    register(f"deit_{size}16", ViT, dataclasses.replace(_DEIT, **SIZES[size]), position="ape")
for size in ("ti", "s", "b", "l"):
    register(f"deit3_{size}16", ViT, dataclasses.replace(_DEIT3, **SIZES[size], drop_path=_DEIT3_DROP[size]), position="ape")
register("vit_s16", ViT, _THESIS, position="axial_rope")
register("vit_b16", ViT, dataclasses.replace(_THESIS, **_THESIS_BASE), position="axial_rope")
register("vit_s16_h6", ViT, dataclasses.replace(_THESIS, heads=6), position="axial_rope")
register("nat_isotropic_s16", ViT, _NEIGHBORHOOD, position="none")
register("nat_isotropic_b16", ViT, dataclasses.replace(_NEIGHBORHOOD, **_THESIS_BASE), position="none")
register(
    "vit_digits",
    ViT,
    dataclasses.replace(_THESIS, patch_size=2, width=96, depth=4, heads=6, mlp_ratio=2.0, drop_path=0.0),
    position="axial_rope",
    num_classes=10,
    image_size=8,
)
