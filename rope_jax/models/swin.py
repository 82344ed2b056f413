"""Backbones of stages, and Swin: maps of tokens that are halved from stage to stage, while their channels double.

`Hierarchy` is all that Swin, NAT and DiNAT share, positions included: one scheme for each stage (`rope_jax.positions`).
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.blocks import Block, check_drop_path, drop_path_rates, make_blocks, run_blocks, training_keys
from rope_jax.models.layers import PatchEmbed, check_images, dtypes_of, layer_norm, linear, param_dtype
from rope_jax.models.registry import image_pair, register
from rope_jax.models.vit import ViTOptions
from rope_jax.positions import Position, Stage, create_position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import Sum
from rope_jax_kernels import Neighborhood, Window
from rope_jax_kernels.attention.patterns import Pattern

PATCH = 4  # pixels; the side of a token of the first stage in all of these backbones


@dataclasses.dataclass(frozen=True)
class HierarchyOptions:
    """What backbones of stages have in common; each may be overridden by name in `create_model`.

    Attributes:
        width: channels of the first stage; each stage has twice as many as the one before.
        depths, heads: of each stage.
        mlp_ratio: hidden channels of the MLP, relative to the stage's.
        layer_scale: initial value of the factor on residual branches, or None for no such factor.
        qkv_bias: whether the projection to q, k, v has a bias.
        norm_epsilon: of every layer norm.
        drop_path: probability of dropping a residual branch in training, linear from 0 in the first block to this in the last.
        scan_layers: whether a stage's blocks are kept as one, with stacked parameters, and run in a scan; see `vit.ViTOptions`.
    """

    width: int = 96
    depths: tuple = (2, 2, 6, 2)
    heads: tuple = (3, 6, 12, 24)
    mlp_ratio: float = 4.0
    layer_scale: float | None = None
    qkv_bias: bool = True
    norm_epsilon: float = 1e-5
    drop_path: float = 0.2
    scan_layers: bool = False

    def __post_init__(self):
        for name in ("depths", "heads"):
            value = getattr(self, name)
            if not value or len(value) != len(self.depths) or not all(isinstance(n, int) and n >= 1 for n in value):
                raise ValueError(f"{name}={value} must be one whole number of at least 1 for each of the {len(self.depths) or 4} stages")
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")
        for stage, heads in enumerate(self.heads):
            if (self.width << stage) % heads:
                wide = self.width << stage
                raise ValueError(f"stage {stage + 1} is {wide} wide, which is not divisible by its heads={heads}: change one of them")
        check_drop_path(self.drop_path)

    def of_stage(self, stage: int) -> ViTOptions:
        """The options of a stage's blocks."""
        return ViTOptions(
            width=self.width << stage,
            depth=self.depths[stage],
            heads=self.heads[stage],
            mlp_ratio=self.mlp_ratio,
            class_token=False,
            layer_scale=self.layer_scale,
            qkv_bias=self.qkv_bias,
            norm_epsilon=self.norm_epsilon,
        )


class PatchMerging(nnx.Module):
    """2 x 2 tokens become one: normalised side by side, then projected to twice the channels. Odd maps get a row or column of zeros."""

    def __init__(self, features: int, norm_epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        self.norm = layer_norm(4 * features, norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.reduction = linear(4 * features, 2 * features, use_bias=False, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C2"]:
        x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)))
        batch, height, width, features = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, features)
        # Down before across: (even row, even column), (odd, even), (even, odd), (odd, odd).
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, 4 * features)
        return self.reduction(self.norm(x))


class HierarchyStage(nnx.Module):
    """Blocks on maps of one size, and the scheme that gives them position."""

    def __init__(
        self,
        options: ViTOptions,
        position: Position,
        rates: tuple[float, ...],
        downsample: nnx.Module | None,
        *,
        scan: bool,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.position = position
        self.rates = rates
        self.blocks = make_blocks(lambda: Block(options, rngs=rngs, dtypes=dtypes), options.depth, scan=scan)
        self.downsample = downsample

    def __call__(
        self, x: Float[Array, "B H W C"], patterns: list[Pattern], position_key: Array | None, key: Array | None
    ) -> Float[Array, "B H W C"]:
        tokens = self.position.embed(x.reshape(x.shape[0], -1, x.shape[3]), x.shape[1:3], position_key)
        keys = {"position_key": position_key, "key": key}
        return run_blocks(self.blocks, tokens, x.shape[1:3], patterns, self.position, self.rates, **keys).reshape(x.shape)


class Hierarchy(nnx.Module):
    """Base of the backbones of stages: a stem, stages with downsampling between them, a norm, and a head that reads the mean token.

    Absolute embeddings act once, on the first stage's tokens; rotations, biases and what joins every layer act in each stage, made for
    its map. A family says what its stem, its downsampling and its attention are.
    """

    def __init__(self, options: HierarchyOptions, *, position: str, num_classes: int, image_size: Grid, dtype: np.dtype, rngs: nnx.Rngs):
        dtypes = dtypes_of(dtype)
        self.options = options
        self.prepare(image_size)
        self.patch_embed = self.stem(rngs=rngs, dtypes=dtypes)
        rates = iter(drop_path_rates(options.drop_path, sum(options.depths)))
        stages = []
        for index, grid in enumerate(self.grids(image_size)):
            block = options.of_stage(index)
            stage = Stage(
                depth=block.depth,
                heads=block.heads,
                head_dim=block.width // block.heads,
                channels=block.width,
                grid=grid,
                pattern=self.pattern(),
                dtype=param_dtype(dtype),
            )
            scheme = create_position(position, stage, rngs=rngs)
            scheme = scheme if index == 0 else _without_embedding(scheme, rngs)
            last = index + 1 == len(options.depths)
            downsample = None if last else self.downsample(block.width, rngs=rngs, dtypes=dtypes)
            own = tuple(itertools.islice(rates, block.depth))
            stages.append(HierarchyStage(block, scheme, own, downsample, scan=options.scan_layers, rngs=rngs, dtypes=dtypes))
        self.stages = nnx.List(stages)
        self.norm = layer_norm(block.width, options.norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.head = linear(block.width, num_classes, rngs=rngs, dtypes=dtypes)

    def prepare(self, image_size: Grid) -> None:
        """Settles what depends on the size of images and holds no parameters."""

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Makes what turns images into the first stage's tokens."""
        return PatchEmbed(PATCH, self.options.width, norm_epsilon=self.options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def downsample(self, features: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Makes what stands between two stages, the first of which has `features` channels."""
        return PatchMerging(features, self.options.norm_epsilon, rngs=rngs, dtypes=dtypes)

    def pattern(self) -> Window | Neighborhood:
        """What attends to what, but for shifts and dilations."""
        raise NotImplementedError

    def patterns(self, stage: int, grid: Grid) -> list[Pattern]:
        """What attends to what in each block of a stage on a map of `grid`."""
        raise NotImplementedError

    def grids(self, image_size: Grid) -> list[Grid]:
        """Rows and columns of each stage's map of an image of (height, width) pixels; an odd number is halved upwards."""
        if image_size[0] % PATCH or image_size[1] % PATCH:
            raise ValueError(
                f"image size {image_size[0]}x{image_size[1]} is not divisible by the patch size {PATCH}: crop or resize the images"
            )
        return [(-(-image_size[0] // (PATCH << stage)), -(-image_size[1] // (PATCH << stage))) for stage in range(len(self.options.depths))]

    def resize(self, image_size: int | Grid) -> None:
        """Makes `image_size` (pixels, int or (height, width)) that of creation: position tables are resized by their scheme's rule."""
        image_size = image_pair(image_size)
        grids = self.grids(image_size)
        self.prepare(image_size)
        for stage, grid in zip(self.stages, grids, strict=True):
            for _, module in nnx.iter_modules(stage.position):
                if isinstance(module, Position):
                    module.stage = dataclasses.replace(module.stage, pattern=self.pattern())
            stage.position.resize(grid)

    def _encode(self, images: Array, train: bool, key: Array | None) -> list[Array]:
        check_images(images)
        grids = self.grids(images.shape[1:3])
        augments = any(stage.position.augments for stage in self.stages)
        keys = training_keys(train, key, self.options.drop_path, 2 * len(grids), augments=augments)
        x, maps = self.patch_embed(images), []
        for index, (stage, grid) in enumerate(zip(self.stages, grids, strict=True)):
            x = stage(x, self.patterns(index, grid), *keys[2 * index : 2 * index + 2])
            maps.append(x)
            x = x if stage.downsample is None else stage.downsample(x)
        return [*maps[:-1], self.norm(x)]

    def __call__(self, images: Float[Array, "..."], *, train: bool = False, key: Array | None = None) -> Float[Array, "B classes"]:
        """Returns logits [B, num_classes] of normalised images [B, H, W, 3]; any H, W that 4 divides."""
        return self.head(self._encode(images, train, key)[-1].mean(axis=(1, 2)))

    def features(self, images: Float[Array, "..."]) -> list[Float[Array, "B H W C"]]:
        """Returns the maps [B, H, W, C] of all stages before downsampling, strides 4, 8, 16, 32; the last one is normalised."""
        return self._encode(images, train=False, key=None)


def _without_embedding(position: Position, rngs: nnx.Rngs) -> Position:
    """A scheme for stages after the first, where nothing is added to the tokens: tables for that would be dead parameters."""
    parts = list(position.parts) if isinstance(position, Sum) else [position]
    kept = [part for part in parts if part.acts != "tokens"]
    if len(kept) == len(parts):
        return position
    return Position(position.stage, rngs=rngs) if not kept else kept[0] if len(kept) == 1 else Sum(position.stage, kept)


@dataclasses.dataclass(frozen=True)
class SwinOptions(HierarchyOptions):
    """Swin's options.

    Attributes:
        window_size: side of a window in tokens; None for a thirty-second of the image's height and width at creation, and again when
            `resize` is called, which gives every stage whole windows (Heo et al., section 3.3).
    """

    window_size: int | None = 7

    def __post_init__(self):
        super().__post_init__()
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size={self.window_size} must be at least 1, or None for a thirty-second of the image")


@dataclasses.dataclass(frozen=True)
class SwinWindow(Window):
    """Swin's windows: what `fit` gives is what every part of the model uses, see `Swin`."""

    def fit(self, grid: Grid) -> Window:
        """The window on a map of `grid` tokens."""
        short, long = sorted(grid)
        if self.size[0] == self.size[1] >= short and long % short == 0:
            return Window((short, short))
        return super().fit(grid)


class Swin(Hierarchy):
    """Swin transformer: windows, shifted by half their size in every second block (arXiv 2103.14030).

    On a map with a side no longer than the windows, for official numbers wherever the official code gives any:

    - A map that squares of its short side fill is cut into those, and none is shifted (microsoft/Swin-Transformer). A square map is one
      window; the 7 x 14 tokens of the last stage of a 224 x 448 image are two, be window_size 7 or 14.
    - Any other map, which that code refuses, and windows that are not square: along an axis where the map is no longer than the window,
      the window is the map and not shifted, and the other axis is as ever (`rope_jax_kernels.Window.fit`).

    Elsewhere windows that do not divide the map are padded, and padding is masked. Bias tables have the size of the windows that result;
    official ones, which are square, are resized to it.
    """

    def prepare(self, image_size: Grid) -> None:
        """See `Hierarchy.prepare`."""
        side = self.options.window_size
        if side is None and (image_size[0] % 32 or image_size[1] % 32):
            raise ValueError(
                f"window_size=None stands for a thirty-second of the image, which its size {image_size[0]}x{image_size[1]} does not allow: "
                "use an image size divisible by 32, or a window_size"
            )
        self.window = (image_size[0] // 32, image_size[1] // 32) if side is None else (side, side)

    def pattern(self) -> SwinWindow:
        """See `Hierarchy.pattern`."""
        return SwinWindow(self.window)

    def patterns(self, stage: int, grid: Grid) -> list[Pattern]:
        """See `Hierarchy.patterns`."""
        plain, shifted = self.pattern(), SwinWindow(self.window, (self.window[0] // 2, self.window[1] // 2))
        return [(shifted if block % 2 else plain).fit(grid) for block in range(self.options.depths[stage])]


_SMALL = {"depths": (2, 2, 18, 2), "drop_path": 0.3}
_BASE = {"width": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32), "drop_path": 0.5}
SIZES = {"t": {}, "s": _SMALL, "b": _BASE}

for name, sizes in SIZES.items():
    register(f"swin_{name}", Swin, SwinOptions(**sizes), position="rpb")
