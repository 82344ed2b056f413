"""ViT-Adapter (arXiv 2205.08534): maps of four strides from a plain ViT and a convolutional branch.

The branch makes tokens of strides 8, 16 and 32. Before each group of the ViT's blocks they are
injected into the ViT's tokens, and after it the ViT's tokens into them, by deformable attention.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.backbone import allow_any_mesh
from rope_jax.models.blocks import drop_path
from rope_jax.models.ceit import DepthwiseConv
from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.heads.maps import ConvNorm, centres, flatten, resize_maps, unflatten
from rope_jax.models.layers import (
    BatchNorm,
    Deconv,
    LayerScale,
    Linear,
    check_images,
    draw_he,
    layer_norm,
    linear,
)
from rope_jax.models.registry import check_blocks, register
from rope_jax.models.vit import SIZES, ViT, ViTOptions
from rope_jax.names.options import Count, CountOrZero, Positive
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import normal_init

_LEVELS = 3  # strides 8, 16, 32


@dataclasses.dataclass(frozen=True)
class ViTAdapterOptions(ViTOptions):
    """Options of ViT-Adapter.

    Attributes:
        groups: the last block of each group of blocks; the last group ends with the last block.
        prior_width: channels of the first convolutions of the branch.
        deform_heads, deform_points: heads of the deformable attention, and points for each of them
            in each map.
        deform_ratio: channels of its values, relative to `width`.
        adapter_ratio: hidden channels of the branch's MLPs, relative to `width`.
        added: the ViT's map that is added to each of the four: the "last" one (the code of
            detection), or that of each of four "groups" (the code of segmentation).
    """

    groups: tuple[CountOrZero, ...] = (2, 5, 8, 11)
    prior_width: Count = 64
    deform_heads: Count = 6
    deform_points: Count = 4
    deform_ratio: Positive = 1.0
    adapter_ratio: Positive = 0.25
    added: Literal["last", "groups"] = "groups"

    fixed: ClassVar[tuple[str, ...]] = ("patch_size",)  # of which 16 make maps of strides 4 to 32

    def __post_init__(self):
        super().__post_init__()
        check_blocks("groups", self.groups, self.depth)
        if self.groups[-1:] != (self.depth - 1,):
            raise ValueError(
                f"groups={self.groups} must be numbers of blocks, of which the last is "
                f"{self.depth - 1}"
            )
        if self.added == "groups" and len(self.groups) != 4:
            raise ValueError(
                f"added='groups' takes a map of each of four groups, but groups={self.groups}: "
                "change either"
            )


class SpatialPrior(nnx.Module):
    """Maps of strides 4, 8, 16 and 32 by convolutions of the image."""

    def __init__(self, width: int, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        shapes = ((3, width, 2), (width, width, 1), (width, width, 1))
        self.stem = nnx.List(ConvNorm(*io, 3, stride=stride, **settings) for *io, stride in shapes)
        channels = [width, 2 * width, 4 * width, 4 * width]
        pairs = itertools.pairwise(channels)
        self.convs = nnx.List(ConvNorm(*pair, 3, stride=2, **settings) for pair in pairs)
        init = normal_init((2 / features) ** 0.5)
        self.projections = nnx.List(
            Linear(inputs, features, kernel_init=init, rngs=rngs, **dtypes) for inputs in channels
        )

    def __call__(
        self, images: Float[Array, "B H W 3"], train: bool
    ) -> list[Float[Array, "B _h _w C"]]:
        x = images
        for layer in self.stem:
            x = layer(x, train)
        maps = [nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))]
        for layer in self.convs:
            maps.append(layer(maps[-1], train))
        return [project(x) for project, x in zip(self.projections, maps, strict=True)]


class Injector(nnx.Module):
    """tokens + gamma attention(norm(tokens), norm(branch)); gamma starts at 0."""

    def __init__(self, options: ViTAdapterOptions, *, rngs: nnx.Rngs, dtypes: dict):
        self.query_norm, self.token_norm = _norms(options, 2, rngs=rngs, dtypes=dtypes)
        self.attn = _deformable(options, _LEVELS, rngs=rngs, dtypes=dtypes)
        self.scale = LayerScale(options.width, 0.0, dtypes["param_dtype"])

    def __call__(
        self,
        tokens: Float[Array, "B L C"],
        grid: Grid,
        branch: Float[Array, "B S C"],
        sizes: Sequence[Grid],
    ) -> Float[Array, "B L C"]:
        """Returns the ViT's tokens of a map of `grid`; `branch` has those of maps of `sizes`."""
        query, values = self.query_norm(tokens), self.token_norm(branch)
        return tokens + self.scale(self.attn(query, _places([grid]), values, sizes))


class Extractor(nnx.Module):
    """branch + attention(norm(branch), norm(tokens)), then branch + mlp(norm(branch)).

    The MLP has a depthwise convolution of each map before its activation.
    """

    def __init__(self, options: ViTAdapterOptions, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        norms = _norms(options, 3, **settings)
        self.query_norm, self.token_norm, self.mlp_norm = norms
        self.attn = _deformable(options, 1, **settings)
        hidden = int(options.width * options.adapter_ratio)
        self.fc1 = linear(options.width, hidden, **settings)
        self.fc2 = linear(hidden, options.width, **settings)
        self.conv = DepthwiseConv(hidden, **settings)
        draw_he(self.conv, 9, rngs)

    def __call__(
        self,
        branch: Float[Array, "B S C"],
        sizes: Sequence[Grid],
        tokens: Float[Array, "B L C"],
        grid: Grid,
        drop: float,
        key: Array | None,
    ) -> Float[Array, "B S C"]:
        """Returns the tokens of maps of `sizes`; `tokens` are the ViT's, of a map of `grid`.

        Args:
            drop: probability of dropping the MLP.
            key: for drop path; None (evaluation) drops nothing.
        """
        query, values = self.query_norm(branch), self.token_norm(tokens)
        branch = branch + self.attn(query, _places(sizes), values, [grid])
        hidden = self.fc1(self.mlp_norm(branch))
        hidden = flatten([self.conv(x) for x in unflatten(hidden, sizes)])
        out = self.fc2(jax.nn.gelu(hidden, approximate=False))
        return branch + drop_path(out, drop, key)


class Interaction(nnx.Module):
    """The modules around one group of blocks: an injector before it, extractors after it."""

    def __init__(
        self, options: ViTAdapterOptions, extractors: int, *, rngs: nnx.Rngs, dtypes: dict
    ):
        self.injector = Injector(options, rngs=rngs, dtypes=dtypes)
        self.extractors = nnx.List(
            Extractor(options, rngs=rngs, dtypes=dtypes) for _ in range(extractors)
        )


class ViTAdapter(ViT):
    """A ViT whose `features` are four maps, of strides 4, 8, 16 and 32.

    Source: arXiv 2205.08534. As a classifier it is the ViT alone.
    """

    own_maps = True
    # LayerScale begins at 1, where it is none.
    beyond_classifier = ("prior", "levels", "interactions", "up", "map_norms", "blocks.{i}.scale")

    def add_modules(self, *, rngs: nnx.Rngs, dtypes: dict) -> None:
        options, width = self.options, self.options.width
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.prior = SpatialPrior(options.prior_width, width, **settings)
        levels = jax.random.normal(rngs.params(), (_LEVELS, width), dtypes["param_dtype"])
        self.levels = nnx.Param(levels, decay=False)
        last = len(options.groups) - 1
        self.interactions = nnx.List(
            Interaction(options, 3 if index == last else 1, **settings) for index in range(last + 1)
        )
        self.up = Deconv(width, width, **settings)
        draw_he(self.up, 4 * width, rngs)
        self.map_norms = nnx.List(BatchNorm(width, dtypes=dtypes) for _ in range(_LEVELS + 1))

    @allow_any_mesh
    def features(
        self,
        images: Float[Array, "B h w 3"],
        *,
        blocks: Sequence[int] | None = None,
        norm: bool | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> list[Float[Array, "B _H _W C"]]:
        """The four maps, batch-normalised.

        Args:
            images, train, key: as in `Backbone.features`.
            blocks: must be None.
            norm: must not be True.

        Raises:
            ValueError: blocks, or norm=True.
        """
        if blocks is not None or norm:
            raise ValueError(
                f"blocks={blocks} and norm={norm} cannot be combined with ViT-Adapter, whose four "
                "maps belong to no single block and have norms of their own: leave both out"
            )
        options, (grid,) = self.options, self.grids(check_images(images))
        keys = self.training_keys(train, key, 1 + len(options.groups))
        finest, *priors = self.prior(images, train)
        sizes = [x.shape[1:3] for x in priors]
        levels = self.levels[...].astype(finest.dtype)
        branch = flatten([x + level for x, level in zip(priors, levels, strict=True)])
        x, run = self.start(images, train, keys[0])
        prefix, first, maps = x.shape[1] - grid[0] * grid[1], 0, []
        groups = zip(self.interactions, options.groups, keys[1:], strict=True)
        for interaction, last, group_key in groups:
            injected = interaction.injector(x[:, prefix:], grid, branch, sizes)
            x = run(jnp.concatenate([x[:, :prefix], injected], axis=1), range(first, last + 1))
            first, tokens = last + 1, x[:, prefix:]
            maps.append(tokens.reshape(-1, *grid, options.width))
            for index, extractor in enumerate(interaction.extractors):
                drop_key = None if group_key is None else jax.random.fold_in(group_key, index)
                branch = extractor(branch, sizes, tokens, grid, options.drop_path, drop_key)
        outputs = unflatten(branch, sizes)
        outputs = [finest + self.up(outputs[0]), *outputs]
        maps = maps if options.added == "groups" else maps[-1:] * len(outputs)
        return [
            normalize(x + resize_maps(vit_map, x.shape[1:3]), train)
            for normalize, x, vit_map in zip(self.map_norms, outputs, maps, strict=True)
        ]


def _places(sizes: Sequence[Grid]) -> Float[Array, "1 S 1 2"]:
    """Centres of the tokens of maps, as references of deformable attention."""
    return jnp.asarray(centres(sizes))[None, :, None]


def _norms(
    options: ViTAdapterOptions, count: int, *, rngs: nnx.Rngs, dtypes: dict
) -> list[nnx.Module]:
    width, epsilon = options.width, options.norm_epsilon
    return [layer_norm(width, epsilon, rngs=rngs, dtypes=dtypes) for _ in range(count)]


def _deformable(
    options: ViTAdapterOptions, levels: int, *, rngs: nnx.Rngs, dtypes: dict
) -> DeformableAttention:
    return DeformableAttention(
        options.width,
        levels=levels,
        heads=options.deform_heads,
        points=options.deform_points,
        ratio=options.deform_ratio,
        rngs=rngs,
        dtypes=dtypes,
    )


_ADAPTER = ViTAdapterOptions(class_token=False, layer_scale=1.0, last_norm=False, drop_path=0.1)
_ADAPTERS = {
    "ti": {},
    "s": {"drop_path": 0.2},
    "b": {"drop_path": 0.3, "deform_heads": 12, "deform_ratio": 0.5},
    "l": {"drop_path": 0.4, "deform_heads": 16, "deform_ratio": 0.5, "groups": (5, 11, 17, 23)},
}

for size, changes in _ADAPTERS.items():
    register(f"vit_adapter_{size}16", ViTAdapter, _ADAPTER, position="ape", **SIZES[size] | changes)
