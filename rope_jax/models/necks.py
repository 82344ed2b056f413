"""Necks: from the maps of a backbone to those that a head takes."""

from collections.abc import Sequence
from typing import ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.layers import BatchNorm, Deconv, layer_norm


class FourScales(nnx.Module):
    """Four maps of a plain ViT at 4, 2, 1 and 1/2 times their size, with the same channels.

    Source: BEiT's segmentation (arXiv 2106.08254, appendix; its code).

    Attributes:
        least: side in tokens of the smallest maps, which are halved.
    """

    least: ClassVar[int] = 2

    def __init__(self, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        self.up1 = Deconv(features, features, **settings)
        self.norm = BatchNorm(features, dtypes=dtypes)
        self.up2 = Deconv(features, features, **settings)
        self.up = Deconv(features, features, **settings)

    def __call__(
        self, maps: Sequence[Float[Array, "B _H _W C"]], train: bool
    ) -> list[Float[Array, "B _h _w C"]]:
        first, second, third, fourth = maps
        larger = jax.nn.gelu(self.norm(self.up1(first), train), approximate=False)
        halved = nnx.max_pool(fourth, (2, 2), (2, 2))
        return [self.up2(larger), self.up(second), third, halved]


class StageNorms(nnx.Module):
    """A layer norm for the map of every stage of a hierarchical backbone.

    Source: Swin's detection and segmentation (arXiv 2103.14030); not part of a classifier.
    """

    def __init__(self, features: Sequence[int], epsilon: float, *, rngs: nnx.Rngs, dtypes: dict):
        self.norms = nnx.List(layer_norm(n, epsilon, rngs=rngs, dtypes=dtypes) for n in features)

    def __call__(
        self, maps: Sequence[Float[Array, "B _h _w _C"]], train: bool
    ) -> list[Float[Array, "B _h _w _C"]]:
        return [norm(x) for norm, x in zip(self.norms, maps, strict=True)]
