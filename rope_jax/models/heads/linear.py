"""The linear head: a class for every patch, or for the cells of a patch, resized to pixels."""

import dataclasses

from flax import nnx
from jaxtyping import Array

from rope_jax.models.heads.head import Maps, PixelLogits, SegmentationHead, register_head
from rope_jax.models.layers import linear
from rope_jax.models.registry import Options
from rope_jax.names.options import Count


@dataclasses.dataclass(frozen=True)
class LinearOptions(Options):
    """Options of the linear head.

    Attributes:
        cells: predictions along each side of a token; 1 in Segmenter's linear decoder.
    """

    cells: Count = 1

    draws = ()


class LinearHead(SegmentationHead):
    """A dense layer on each token of the last, normalised map.

    Source: Strudel et al., arXiv 2105.05633, section 3.1. Several cells per token are not in the
    paper: they follow outlines finer than a patch.
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
        outputs = options.cells**2 * num_classes
        self.classify = linear(channels[0], outputs, rngs=rngs, dtypes=dtypes)

    def __call__(self, maps: Maps, *, train: bool = False, key: Array | None = None) -> PixelLogits:
        logits, cells = self.classify(maps[-1]), self.options.cells
        batch, height, width, _ = logits.shape
        logits = logits.reshape(batch, height, width, cells, cells, self.out_features)
        shape = (batch, height * cells, width * cells, self.out_features)
        return PixelLogits(logits.swapaxes(2, 3).reshape(shape))


register_head("linear", LinearHead, LinearOptions())
