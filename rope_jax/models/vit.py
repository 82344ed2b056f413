"""The isotropic vision transformer: one definition for DeiT, DeiT-III (Heo's ViT), the thesis' ViT, NAT's isotropic ViT and the demo.

They differ in the options of `ViT` and nowhere else; position information comes from the scheme (`rope_jax.positions`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import SelfAttention
from rope_jax.models.layers import (
    LayerScale,
    Mlp,
    PatchEmbed,
    check_images,
    drop_path,
    dtypes_of,
    layer_norm,
    linear,
    linear_init,
    param_dtype,
)
from rope_jax.models.registry import register
from rope_jax.positions import Stage, Terms, create_position
from rope_jax_kernels import Global, Neighborhood
from rope_jax_kernels.attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class ViTOptions:
    """What distinguishes one isotropic ViT from another; each may be overridden by name in `create_model`.

    Attributes:
        patch_size: side of a patch in pixels.
        width, depth, heads, mlp_ratio: of the encoder.
        patch_norm: layer norm after the patch embedding.
        class_token: whether there is one; without it the head reads the mean of the normalised tokens.
        embed_class_token: whether the class token takes part in absolute embeddings (DeiT) or is prepended after them (DeiT-III).
        layer_scale: initial value of the factor on residual branches, or None for no such factor.
        qkv_bias: whether the projection to q, k, v has a bias.
        norm_epsilon: of every layer norm.
        drop_path: probability of dropping a residual branch in training.
        drop_path_schedule: "linear" from 0 in the first block to `drop_path` in the last, or "constant".
        attention: "global", or "neighborhood" of `kernel_size`.
        kernel_size: side of the neighbourhood in patches.
    """

    patch_size: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6
    mlp_ratio: float = 4.0
    patch_norm: bool = False
    class_token: bool = True
    embed_class_token: bool = True
    layer_scale: float | None = None
    qkv_bias: bool = True
    norm_epsilon: float = 1e-6
    drop_path: float = 0.0
    drop_path_schedule: str = "linear"
    attention: str = "global"
    kernel_size: int = 7

    def __post_init__(self):
        for name in ("patch_size", "width", "depth", "heads", "kernel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}: change one of them")
        for name, allowed in (("attention", ("global", "neighborhood")), ("drop_path_schedule", ("linear", "constant"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; use one of {', '.join(allowed)}")
        for name in ("mlp_ratio", "norm_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; it must be above 0")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path={self.drop_path} is not allowed; it must be at least 0 and below 1")
        if self.attention != "global" and self.class_token:
            raise ValueError(f"attention={self.attention!r} has no place for a class token: set class_token=False")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: ViTOptions, drop_path: float, *, rngs: nnx.Rngs, dtypes: dict):
        width = options.width
        norm = functools.partial(layer_norm, width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        scale = lambda: None if options.layer_scale is None else LayerScale(width, options.layer_scale, dtypes["param_dtype"])
        self.norm1, self.norm2 = norm(), norm()
        self.attn = SelfAttention(width, options.heads, qkv_bias=options.qkv_bias, rngs=rngs, dtypes=dtypes)
        self.mlp = Mlp(width, int(width * options.mlp_ratio), rngs=rngs, dtypes=dtypes)
        self.scale1, self.scale2 = scale(), scale()
        self.drop_path = drop_path

    def __call__(
        self, x: Float[Array, "B L C"], grid: tuple[int, int], pattern: Pattern, terms: Terms, key: Array | None
    ) -> Float[Array, "B L C"]:
        keys = (None, None) if key is None else jax.random.split(key)
        branch = self.attn(self.norm1(x), grid, pattern, terms)
        x = x + drop_path(branch if self.scale1 is None else self.scale1(branch), self.drop_path, keys[0])
        branch = self.mlp(self.norm2(x))
        return x + drop_path(branch if self.scale2 is None else self.scale2(branch), self.drop_path, keys[1])


class ViT(nnx.Module):
    """Isotropic vision transformer; see `rope_jax.create_model` for how to make one and what calls accept."""

    def __init__(
        self, options: ViTOptions, *, position: str, num_classes: int, image_size: tuple[int, int], dtype: np.dtype, rngs: nnx.Rngs
    ):
        dtypes = dtypes_of(dtype)
        self.options = options
        self.pattern = Global() if options.attention == "global" else Neighborhood((options.kernel_size,) * 2)
        self.patch_embed = PatchEmbed(
            options.patch_size, options.width, norm_epsilon=options.norm_epsilon if options.patch_norm else None, rngs=rngs, dtypes=dtypes
        )
        prefix = int(options.class_token)
        if options.class_token:
            self.class_token = nnx.Param(linear_init(rngs.params(), (1, 1, options.width), dtypes["param_dtype"]), decay=False)
        stage = Stage(
            depth=options.depth,
            heads=options.heads,
            head_dim=options.width // options.heads,
            channels=options.width,
            grid=self.grids(image_size)[0],
            pattern=self.pattern,
            prefix=prefix,
            embed_prefix=prefix * options.embed_class_token,
            dtype=param_dtype(dtype),
        )
        self.position = create_position(position, stage, rngs=rngs)
        rates = np.linspace(0, options.drop_path, options.depth)
        if options.drop_path_schedule == "constant":
            rates = np.full(options.depth, options.drop_path)
        self.blocks = nnx.List([Block(options, float(rate), rngs=rngs, dtypes=dtypes) for rate in rates])
        self.norm = layer_norm(options.width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.head = linear(options.width, num_classes, rngs=rngs, dtypes=dtypes)

    def grids(self, image_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Rows and columns of the map of each stage (here one) of an image of (height, width) pixels."""
        patch = self.options.patch_size
        if image_size[0] % patch or image_size[1] % patch:
            raise ValueError(f"image size {image_size[0]}x{image_size[1]} is not divisible by the patch size {patch}: change one of them")
        return [(image_size[0] // patch, image_size[1] // patch)]

    def resize(self, image_size: tuple[int, int]) -> None:
        """Makes `image_size` the resolution of creation: position tables are resized by their scheme's rule."""
        self.position.resize(self.grids(image_size)[0])

    def _encode(self, images: Float[Array, "B h w 3"], train: bool, key: Array | None) -> tuple[Array, tuple[int, int]]:
        options = self.options
        if train and key is None and options.drop_path > 0:
            raise ValueError("train=True needs a key for drop path: pass key=jax.random.key(...), or create the model with drop_path=0")
        position_key, *block_keys = jax.random.split(key, 1 + options.depth) if train and key is not None else [None] * (1 + options.depth)
        check_images(images)
        (grid,) = self.grids(images.shape[1:3])
        x = self.patch_embed(images)
        x = x.reshape(x.shape[0], -1, options.width)
        if options.class_token and options.embed_class_token:
            x = self.position.embed(self._with_class_token(x), grid, position_key)
        else:
            x = self.position.embed(x, grid, position_key)
            x = self._with_class_token(x) if options.class_token else x
        terms = self.position.terms(grid, position_key)
        for index, (block, block_key) in enumerate(zip(self.blocks, block_keys, strict=True)):
            x = block(x, grid, self.pattern, terms.layer(index), block_key)
        return self.norm(x), grid

    def _with_class_token(self, x: Float[Array, "B L C"]) -> Float[Array, "B L2 C"]:
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return jnp.concatenate([token, x], axis=1)

    def __call__(self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None) -> Float[Array, "B classes"]:
        """Returns logits [B, num_classes] of normalised images [B, H, W, 3]; any H, W that the patch size divides."""
        x, _ = self._encode(images, train, key)
        return self.head(x[:, 0] if self.options.class_token else x.mean(axis=1))

    def features(self, images: Float[Array, "B h w 3"]) -> list[Float[Array, "B H W C"]]:
        """Returns the normalised tokens of the last block as a list of one map [B, H, W, C], without the class token."""
        x, grid = self._encode(images, train=False, key=None)
        return [x[:, int(self.options.class_token) :].reshape(x.shape[0], *grid, -1)]


_DEIT = ViTOptions(drop_path=0.1)
_DEIT3 = ViTOptions(embed_class_token=False, layer_scale=1e-4, drop_path_schedule="constant")
_THESIS = ViTOptions(heads=12, patch_norm=True, class_token=False, norm_epsilon=1e-5, drop_path=0.1)
_NEIGHBORHOOD = dataclasses.replace(_THESIS, attention="neighborhood")
_SIZES = {
    "ti": {"width": 192, "heads": 3},
    "s": {"width": 384, "heads": 6},
    "b": {"width": 768, "heads": 12},
    "l": {"width": 1024, "depth": 24, "heads": 16},
}
_THESIS_BASE = {"width": 768, "heads": 24, "drop_path": 0.4}
# Of the 400-epoch schedule with which Heo et al. train (naver-ai/rope-vit, deit/README.md).
_DEIT3_DROP = {"ti": 0.0, "s": 0.0, "b": 0.1, "l": 0.4}

for size in ("ti", "s", "b"):
    register(f"deit_{size}16", ViT, dataclasses.replace(_DEIT, **_SIZES[size]), position="ape")
for size in ("ti", "s", "b", "l"):
    register(f"deit3_{size}16", ViT, dataclasses.replace(_DEIT3, **_SIZES[size], drop_path=_DEIT3_DROP[size]), position="ape")
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
