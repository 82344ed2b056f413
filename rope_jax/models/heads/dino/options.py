"""Options of DINO."""

import dataclasses
from typing import ClassVar

from rope_jax.models.registry import Options, check_divisible
from rope_jax.names.options import Count, CountOrZero


@dataclasses.dataclass(frozen=True)
class DinoOptions(Options):
    """Options of DINO.

    Attributes:
        width: channels, also of the feature pyramid of a plain ViT.
        levels: number of maps; those that the backbone lacks are made from its last one.
        groups: of channels that are normalised together in projected maps.
        heads: of every attention.
        points: of deformable attention, on each map.
        encoder_depth, decoder_depth: numbers of layers.
        hidden: channels of feed-forward layers.
        queries: that are decoded, at least as many as an image has boxes.
        denoising: pairs of queries of denoising in training, of all groups; 0 for none. The number
            of groups follows from the image with most boxes in the batch, or in each of the parts
            that the setting `accumulate` divides it into; detrex chooses it on each GPU.
        detections: number of detections in an image.
    """

    width: Count = 256
    levels: Count = 4
    groups: Count = 32
    heads: Count = 8
    points: Count = 4
    encoder_depth: Count = 6
    decoder_depth: Count = 6
    hidden: Count = 2048
    queries: Count = 900
    denoising: CountOrZero = 100
    detections: Count = 300

    draws: ClassVar[tuple[str, ...]] = ("denoising",)

    def __post_init__(self):
        super().__post_init__()
        divisors = {"heads": self.heads, "groups": self.groups, "sines of x, y": 4}
        check_divisible("the head 'dino'", self.width, divisors)
