"""UperNet (Xiao et al., arXiv 1807.10221): pyramid pooling and a feature pyramid.

As in mmsegmentation, with its auxiliary head of one convolution, which takes part in the loss.
"""

import dataclasses
import functools
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.heads.head import Maps, PixelLogits, SegmentationHead, register_head
from rope_jax.models.heads.maps import ConvNorm, average_bins, resize_maps
from rope_jax.models.layers import Linear, dropout
from rope_jax.models.registry import Options
from rope_jax.names.options import Count, CountOrZero, Range, Rate
from rope_jax.positions.initializers import normal_init

_CHANNELS = (1, 2)  # the axes of a map that Dropout2d drops together


@dataclasses.dataclass(frozen=True)
class UperNetOptions(Options):
    """Options of UperNet.

    Attributes:
        width: channels of the head; None for those of the last map.
        dropout: probability of dropping a channel before the classifier.
        auxiliary_width: channels of the auxiliary head; 0 for none.
        auxiliary_weight: of its loss.
        auxiliary_map: the map that it takes, from 0, the largest.
        neck: that makes the maps from four blocks of an isotropic model: "deconv" (BEiT),
            "multilevel" (mmsegmentation's ViTs) or "none", which leaves them at one size.
    """

    width: Count | None = None
    dropout: Rate = 0.1
    auxiliary_width: CountOrZero = 256
    auxiliary_weight: float = 0.4
    auxiliary_map: Annotated[int, Range(low=0, high=3)] = 2
    neck: Literal["deconv", "multilevel", "none"] = "deconv"

    draws: ClassVar[tuple[str, ...]] = ("dropout",)


class Classifier(nnx.Module):
    """Dropout of channels, then a dense layer for every pixel, of a small initial spread."""

    def __init__(self, inputs: int, num_classes: int, rate: float, *, rngs: nnx.Rngs, dtypes: dict):
        self.rate = rate
        init = normal_init(0.01)
        self.linear = Linear(inputs, num_classes, kernel_init=init, rngs=rngs, **dtypes)

    def __call__(self, maps: Float[Array, "B H W I"], key: Array | None) -> Float[Array, "B H W K"]:
        return self.linear(dropout(maps, self.rate, key, shared=_CHANNELS))


class PyramidPooling(nnx.Module):
    """Averages of 1, 2, 3 and 6 bins per side, projected and resized, next to the map itself.

    Source: Zhao et al., arXiv 1612.01105.
    """

    bins: ClassVar[tuple[int, ...]] = (1, 2, 3, 6)

    def __init__(self, inputs: int, width: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.convs = nnx.List(ConvNorm(inputs, width, **settings) for _ in self.bins)
        self.fuse = ConvNorm(inputs + len(self.bins) * width, width, 3, **settings)

    def __call__(self, x: Float[Array, "B H W I"], train: bool) -> Float[Array, "B H W M"]:
        pooled = [
            resize_maps(conv(average_bins(x, bins), train), x.shape[1:3])
            for conv, bins in zip(self.convs, self.bins, strict=True)
        ]
        return self.fuse(jnp.concatenate([x, *pooled], axis=-1), train)


class ConvHead(nnx.Module):
    """A convolution of 3 x 3 and a classifier (Long et al., arXiv 1411.4038)."""

    def __init__(
        self,
        inputs: int,
        width: int,
        num_classes: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.conv = ConvNorm(inputs, width, 3, **settings)
        self.classify = Classifier(width, num_classes, rate, **settings)

    def __call__(
        self, x: Float[Array, "B H W I"], train: bool, key: Array | None
    ) -> Float[Array, "B H W K"]:
        return self.classify(self.conv(x, train), key)


class UperNet(SegmentationHead):
    """Pyramid pooling of the smallest map, added to the larger ones from the top down.

    All maps are then smoothed, resized to the largest, and fused.
    """

    strides: ClassVar[tuple[int, ...]] = (4, 8, 16, 32)
    normalised: ClassVar[bool] = False

    def __init__(
        self,
        options: UperNetOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        width, settings = options.width or channels[-1], {"rngs": rngs, "dtypes": dtypes}
        self.options, self.out_features = options, num_classes
        self.pooling = PyramidPooling(channels[-1], width, **settings)
        self.laterals = nnx.List(ConvNorm(inputs, width, **settings) for inputs in channels[:-1])
        self.smooth = nnx.List(ConvNorm(width, width, 3, **settings) for _ in channels[:-1])
        self.fuse = ConvNorm(len(channels) * width, width, 3, **settings)
        self.classify = Classifier(width, num_classes, options.dropout, **settings)
        hidden, inputs = options.auxiliary_width, channels[options.auxiliary_map]
        make = functools.partial(ConvHead, inputs, hidden, num_classes, options.dropout, **settings)
        self.auxiliary = make() if hidden else None

    def __call__(self, maps: Maps, *, train: bool = False, key: Array | None = None) -> PixelLogits:
        keys = (None, None) if key is None or not train else jax.random.split(key)
        levels = [conv(x, train) for conv, x in zip(self.laterals, maps[:-1], strict=True)]
        levels.append(self.pooling(maps[-1], train))
        for level in range(len(levels) - 2, -1, -1):
            levels[level] += resize_maps(levels[level + 1], levels[level].shape[1:3])
        smooth = [conv(x, train) for conv, x in zip(self.smooth, levels[:-1], strict=True)]
        size = maps[0].shape[1:3]
        resized = [resize_maps(x, size) for x in (*smooth, levels[-1])]
        fused = self.fuse(jnp.concatenate(resized, axis=-1), train)
        logits = self.classify(fused, keys[0])
        if self.auxiliary is None:
            return PixelLogits(logits)
        second = self.auxiliary(maps[self.options.auxiliary_map], train, keys[1])
        return PixelLogits(logits, second, self.options.auxiliary_weight)


register_head("upernet", UperNet, UperNetOptions())
