"""The linear head: a class for every patch, resized to pixels (Segmenter's linear decoder)."""

import dataclasses

from flax import nnx
from jaxtyping import Array

from rope_jax.models.heads.head import Maps, PixelLogits, SegmentationHead, register_head
from rope_jax.models.layers import linear
from rope_jax.models.registry import Options


@dataclasses.dataclass(frozen=True)
class LinearOptions(Options):
    """The linear head has no options."""

    draws = ()


class LinearHead(SegmentationHead):
    """A dense layer on each token of the last, normalised map.

    Source: Strudel et al., arXiv 2105.05633, section 3.1.
    """

    def __init__(
        self,
        options: LinearOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.options, self.out_features = options, num_classes
        self.classify = linear(channels[0], num_classes, rngs=rngs, dtypes=dtypes)

    def __call__(self, maps: Maps, *, train: bool = False, key: Array | None = None) -> PixelLogits:
        return PixelLogits(self.classify(maps[-1]))


register_head("linear", LinearHead, LinearOptions())
