"""Hierarchical backbones, and Swin: from stage to stage maps halve and channels double.

`Hierarchy` is the base of Swin, NAT and DiNAT; each stage has its own positional scheme.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.attention import WINDOW_PADDING, check_windows, make_window
from rope_jax.models.backbone import Backbone, allow_any_mesh, patch_grid
from rope_jax.models.blocks import (
    Block,
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
    linear,
    make_head,
)
from rope_jax.models.registry import check_divisible, register
from rope_jax.models.vit import BlockOptions, ViTOptions
from rope_jax.names.options import Count, Positive, Rate
from rope_jax.names.text import image_pair
from rope_jax.positions import Position, create_position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import Combined
from rope_jax_kernels import Neighborhood, Pattern, Window

PATCH = 4  # pixels; the side of a token of the first stage of all hierarchical backbones


@dataclasses.dataclass(frozen=True)
class HierarchyOptions(BlockOptions):
    """Options of all hierarchical backbones; each can be overridden by name in `create_model`.

    Attributes:
        width: channels of the first stage, doubled in each later one.
        depths, heads: of each stage.
        post_norm: see `BlockOptions`; patch merging then has its norm after the projection.
        drop_path: linear from 0 in the first block to this in the last.
    """

    width: Count = 96
    depths: tuple[Count, ...] = (2, 2, 6, 2)
    heads: tuple[Count, ...] = (3, 6, 12, 24)
    norm_epsilon: Positive = 1e-5
    drop_path: Rate = 0.2

    def __post_init__(self):
        super().__post_init__()
        self.check_per_stage("depths", exact=True)
        self.check_per_stage("heads", exact=True)
        for stage, heads in enumerate(self.heads):
            check_divisible(f"stage {stage + 1}", self.width << stage, {"heads": heads})

    def check_per_stage(self, name: str, *, exact: bool) -> None:
        """Raises ValueError unless a tuple has one number (or more) per stage."""
        value, stages = getattr(self, name), len(self.depths)
        fits = len(value) == stages if exact else len(value) >= stages
        if not (value and fits):
            raise ValueError(
                f"{name}={value} must be one number for each of the {stages or 4} stages"
            )

    def stage_options(self, stage: int) -> ViTOptions:
        """Options of a stage's blocks."""
        return ViTOptions(
            width=self.width << stage,
            depth=self.depths[stage],
            heads=self.heads[stage],
            mlp_ratio=self.mlp_ratio,
            class_token=False,
            layer_scale=self.layer_scale,
            qkv_bias=self.qkv_bias,
            k_bias=self.k_bias,
            post_norm=self.post_norm,
            cosine=self.cosine,
            norm_epsilon=self.norm_epsilon,
        )


class PatchMerging(nnx.Module):
    """Concatenates 2 x 2 tokens, normalises them and projects them to twice the channels.

    With `post_norm`, they are projected and then normalised. Odd maps are padded with a row or
    column of zeros.
    """

    def __init__(
        self,
        features: int,
        norm_epsilon: float,
        *,
        post_norm: bool,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        wide, self.post_norm = 4 * features, post_norm
        normed = 2 * features if post_norm else wide
        self.norm = layer_norm(normed, norm_epsilon, rngs=rngs, dtypes=dtypes)
        self.reduction = linear(wide, 2 * features, use_bias=False, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C2"]:
        x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)))
        batch, height, width, features = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, features)
        # Rows before columns: (even row, even column), (odd, even), (even, odd), (odd, odd).
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, 4 * features)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(x, self.norm)


class HierarchyStage(nnx.Module):
    """Blocks on one map, their positional scheme, and the downsampling after them."""

    def __init__(
        self,
        position: Position,
        rates: tuple[float, ...],
        blocks: nnx.List | nnx.Module,
        downsample: nnx.Module | None,
        remat: str | None,
    ):
        self.position, self.rates, self.remat = position, rates, remat
        self.blocks, self.downsample = blocks, downsample

    def __call__(
        self,
        x: Float[Array, "B H W C"],
        patterns: list[Pattern],
        numbers: Sequence[int],
        position_key: Array | None,
        key: Array | None,
    ) -> Iterator[Float[Array, "B H W C"]]:
        """Yields the maps after the blocks of these numbers, before downsampling."""
        grid = x.shape[1:3]
        tokens = x.reshape(x.shape[0], -1, x.shape[3])
        tokens = self.position.embed(tokens, grid, position_key)
        run = prepare_blocks(self, grid, patterns, position_key=position_key, key=key)
        for outputs in run_blocks(run, tokens, numbers):
            yield outputs.reshape(x.shape)


class Hierarchy(Backbone):
    """Base of hierarchical backbones: stem, stages, norm, and a head on the mean token.

    Absolute embeddings are added once, to the tokens of the first stage. Rotations, biases and
    per-layer additions act in each stage, on its map. A family defines stem, downsampling and
    attention patterns.
    """

    hierarchical = True

    def __init__(
        self,
        options: HierarchyOptions,
        *,
        position: str,
        num_classes: int,
        image_size: Grid,
        dtype: np.dtype,
        rngs: nnx.Rngs,
    ):
        dtypes = layer_dtypes(dtype)
        self.options = options
        self.prepare(image_size)
        self.patch_embed = declare(self.stem(rngs=rngs, dtypes=dtypes), depth=0)
        rates = iter(drop_path_rates(options.drop_path, sum(options.depths)))
        stages, final, last = [], len(options.depths) - 1, 0
        for index, grid in enumerate(self.grids(image_size)):
            block = options.stage_options(index)
            first, last = last + 1, last + block.depth
            stage = block.stage(grid, self.pattern(), dtypes["param_dtype"])
            scheme = create_position(position, stage, rngs=rngs)
            check_windows(scheme)
            if index > 0:
                scheme = _without_embedding(scheme, rngs)
            declare_tables(scheme, first, shared=first)
            downsample = None
            if index < final:
                downsample = self.downsample(block.width, rngs=rngs, dtypes=dtypes)
                declare(downsample, depth=last)
            make_block = functools.partial(Block, block, rngs=rngs, dtypes=dtypes)
            blocks = make_blocks(make_block, block.depth, scan=options.scan_layers, first=first)
            stage_rates = tuple(itertools.islice(rates, block.depth))
            stages.append(HierarchyStage(scheme, stage_rates, blocks, downsample, options.remat))
        self.stages = nnx.List(stages)
        norm = functools.partial(
            layer_norm, block.width, options.norm_epsilon, rngs=rngs, dtypes=dtypes
        )
        self.norm = declare(norm(), depth=last, last_norm=True) if options.last_norm else Identity()
        self.head = make_head(block.width, num_classes, rngs=rngs, dtypes=dtypes)
        self.add_modules(rngs=rngs, dtypes=dtypes)

    def stem(self, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Creates the patch embedding: images [B, H, W, 3] to tokens of the first stage."""
        width, epsilon = self.options.width, self.options.norm_epsilon
        return PatchEmbed(PATCH, width, norm_epsilon=epsilon, rngs=rngs, dtypes=dtypes)

    def downsample(self, features: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.Module:
        """Creates the downsampling after a stage of `features` channels."""
        options = self.options
        epsilon, post_norm = options.norm_epsilon, options.post_norm
        return PatchMerging(features, epsilon, post_norm=post_norm, rngs=rngs, dtypes=dtypes)

    @abc.abstractmethod
    def pattern(self) -> Window | Neighborhood:
        """The attention pattern of all blocks, without shifts and dilations."""

    def parts(self) -> dict[str, nnx.Module]:
        return {f"stages.{index}.": stage for index, stage in enumerate(self.stages)}

    def grids(self, image_size: Grid) -> list[Grid]:
        height, width = patch_grid(image_size, PATCH)
        stages = range(len(self.options.depths))
        return [(-(-height >> stage), -(-width >> stage)) for stage in stages]

    def resize(self, image_size: int | Grid) -> None:
        schemes = self.positions(image_size)  # refuses a wrong size before anything is changed
        self.prepare(image_pair(image_size))
        for position, _ in schemes:
            for _, module in nnx.iter_modules(position):
                if isinstance(module, Position):
                    module.stage = dataclasses.replace(module.stage, pattern=self.pattern())
        super().resize(image_size)

    def maps(
        self, images: Float[Array, "B h w 3"], blocks: Sequence[int], train: bool, key: Array | None
    ) -> Iterator[Float[Array, "B H W C"]]:
        grids = self.grids(check_images(images))
        keys = self.training_keys(train, key, 2 * len(grids))
        x, first = self.patch_embed(images), 0
        for index, (stage, grid) in enumerate(zip(self.stages, grids, strict=True)):
            end = first + self.options.depths[index]
            run = range(first, min(end, blocks[-1] + 1))
            # The map of the last one may be the input of the next stage.
            numbers = [block for block in run if block in blocks or block == run[-1]]
            stage_keys = keys[2 * index : 2 * index + 2]
            outputs = stage(
                x, self.patterns(index, grid), [n - first for n in numbers], *stage_keys
            )
            for block, x in zip(numbers, outputs, strict=True):
                if block in blocks:
                    yield x
            if blocks[-1] < end:
                return
            x, first = stage.downsample(x), end

    @allow_any_mesh
    def __call__(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Float[Array, "B classes"]:
        (x,) = self.maps(images, [sum(self.options.depths) - 1], train, key)
        return self.head(self.norm(x).mean(axis=(1, 2)))


def _without_embedding(position: Position, rngs: nnx.Rngs) -> Position:
    """A scheme without the parts that embed tokens, whose parameters would be unused."""
    parts = position.schemes()
    kept = [part for part in parts if part.acts != "tokens"]
    if len(kept) == len(parts):
        return position
    if not kept:
        return Position(position.stage, rngs=rngs)
    return kept[0] if len(kept) == 1 else Combined(position.stage, kept)


@dataclasses.dataclass(frozen=True)
class SwinOptions(HierarchyOptions):
    """Options of Swin.

    Attributes:
        window_size: side of a window in tokens; None for a thirty-second of the image's height and
            width, at creation and in `resize`, so that every stage has whole windows (Heo et al.,
            section 3.3).
        window_padding: of maps that the windows do not divide: "mask" (padding takes no part), or
            "tokens" or "qkv" as in official codes, see `attention.make_window`. Windows then keep
            their size and shift on every map, as in Swin's code of detection and segmentation
            ("tokens").
    """

    window_size: Count | None = 7
    window_padding: Literal[*WINDOW_PADDING] = "mask"


@dataclasses.dataclass(frozen=True)
class SwinWindow(Window):
    """Swin's windows, fitted to a map as described in `Swin`."""

    def fit(self, grid: Grid) -> Window:
        """The window on a map of `grid` tokens."""
        short, long = sorted(grid)
        if self.size[0] == self.size[1] >= short and long % short == 0:
            return Window((short, short))
        return super().fit(grid)


class Swin(Hierarchy):
    """Swin transformer: windows, shifted by half their size in every second block.

    Sources: arXiv 2103.14030 and, with `post_norm`, `cosine` and the scheme `cpb`, Swin V2,
    arXiv 2111.09883. On a map with a side no longer than the windows:

    - If squares of its short side tile the map, they are its windows, without shifts
      (microsoft/Swin-Transformer). A square map is one window; the 7 x 14 tokens of the last stage
      of a 224 x 448 image are two, for window_size 7 and 14.
    - Otherwise, which the official code does not support, and for windows that are not square:
      along an axis on which the map is no longer than the window, the window spans the map and is
      not shifted (`rope_jax_kernels.Window.fit`).

    Maps that the windows do not divide are padded, and padding is masked. Bias tables have the size
    of the resulting windows; official tables, which are square, are resized to it.
    """

    def prepare(self, image_size: Grid) -> None:
        height, width = image_size
        side = self.options.window_size
        if side is None and (height % 32 or width % 32):
            raise ValueError(
                "window_size=None stands for a thirty-second of the image, which its size "
                f"{height}x{width} does not allow: use an image size divisible by 32, or a "
                "window_size"
            )
        self.window = (height // 32, width // 32) if side is None else (side, side)

    def scale_windows(self) -> None:
        self.options = dataclasses.replace(self.options, window_size=None)

    def window_rule(self, *, scaled: bool = False) -> str:
        side = self.options.window_size
        if scaled or side is None:
            return "windows of 1/32 of the image"
        return f"windows of {side} x {side} tokens, maps padded to whole windows"

    def pattern(self) -> Window:
        return make_window(self.window, self.options.window_padding, SwinWindow)

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        plain = self.pattern().fit(grid)
        half = (self.window[0] // 2, self.window[1] // 2)
        shifted = dataclasses.replace(self.pattern(), shift=half).fit(grid)
        return [shifted if block % 2 else plain for block in range(self.options.depths[part])]


_SMALL = {"depths": (2, 2, 18, 2), "drop_path": 0.3}
_BASE = {"width": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32), "drop_path": 0.5}
SIZES = {"t": {}, "s": _SMALL, "b": _BASE}

_V2 = SwinOptions(window_size=8, k_bias=False, post_norm=True, cosine=True)

for size, changes in SIZES.items():
    register(f"swin_{size}", Swin, SwinOptions(), position="rpb", **changes)
    register(f"swinv2_{size}", Swin, _V2, position="cpb", image_size=256, **changes)
