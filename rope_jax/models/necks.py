"""Necks: from the maps of a backbone to those that a head takes."""

from collections.abc import Sequence
from typing import ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.layers import BatchNorm, Deconv, Linear, conv, layer_norm


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


class MultiLevel(nnx.Module):
    """Four maps of a plain ViT, projected, resized to 4, 2, 1 and 1/2 times their size, convolved.

    The channels stay as they are, and nothing lies between the linear operations.

    Source: mmsegmentation's MultiLevelNeck, with its initial weights.

    Attributes:
        least: side in tokens of the smallest maps, which are halved.
    """

    least: ClassVar[int] = 2
    scales: ClassVar[tuple[float, ...]] = (4, 2, 1, 0.5)

    def __init__(self, features: int, *, rngs: nnx.Rngs, dtypes: dict):
        init = jax.nn.initializers.glorot_uniform()
        settings = {"kernel_init": init, "rngs": rngs}
        self.laterals = nnx.List(
            Linear(features, features, **settings, **dtypes) for _ in self.scales
        )
        settings |= {"bias_init": jax.nn.initializers.zeros, "dtypes": dtypes}
        settings |= {"stride": 1, "padding": 1, "use_bias": True}
        self.convs = nnx.List(conv(features, features, 3, **settings) for _ in self.scales)

    def __call__(
        self, maps: Sequence[Float[Array, "B _H _W C"]], train: bool
    ) -> list[Float[Array, "B _h _w C"]]:
        outputs = []
        for scale, x, lateral, smooth in zip(
            self.scales, maps, self.laterals, self.convs, strict=True
        ):
            x = lateral(x)
            if scale < 1:  # bilinear resizing to half the size; an odd row or column is left out
                x = nnx.avg_pool(x, (2, 2), (2, 2))
            else:
                x = resize_maps(x, tuple(scale * side for side in x.shape[1:3]))
            outputs.append(smooth(x))
        return outputs


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


NECKS: dict[str, type[nnx.Module] | None] = {
    "deconv": FourScales,
    "multilevel": MultiLevel,
    "none": None,
}
"""Necks between four blocks of an isotropic model and a head, by the name in the head's options."""
