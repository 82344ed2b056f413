"""Options of Mask2Former."""

import dataclasses
from typing import ClassVar

from rope_jax.models.registry import Options, check_divisible
from rope_jax.names.options import Count


@dataclasses.dataclass(frozen=True)
class Mask2FormerOptions(Options):
    """Options of Mask2Former.

    Attributes:
        width: channels of both decoders.
        heads: of every attention.
        groups: of channels that are normalised together in the pixel decoder.
        pixel_depth, pixel_hidden: layers of the pixel decoder, and the hidden channels of each.
        depth, hidden: of the decoder of queries.
        queries: masks that are predicted, each with a class.
        loss_points: points at which the loss compares masks.
    """

    width: Count = 256
    heads: Count = 8
    groups: Count = 32
    pixel_depth: Count = 6
    pixel_hidden: Count = 1024
    depth: Count = 9
    hidden: Count = 2048
    queries: Count = 100
    loss_points: Count = 12_544

    draws: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        divisors = {"heads": self.heads, "groups": self.groups, "sines of x, y": 4}
        check_divisible("the head 'mask2former'", self.width, divisors)
