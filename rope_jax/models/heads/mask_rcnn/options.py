"""Options of Mask R-CNN."""

import dataclasses
from typing import Annotated, ClassVar

from rope_jax.models.registry import Options
from rope_jax.names.options import Count, Range


@dataclasses.dataclass(frozen=True)
class MaskRcnnOptions(Options):
    """Options of Mask R-CNN, by default those of mmdetection.

    Attributes:
        width: channels of the pyramid and of the head of masks.
        hidden: channels of the head of boxes.
        anchor_samples: anchors of an image in the loss, at most half of them positive.
        box_samples: boxes of an image in the loss, at most a quarter of them positive.
        train_candidates, candidates: boxes of a map that compete to be proposals, in training and
            in evaluation.
        proposals: of an image.
        detections: largest number of detections in an image.
    """

    width: Count = 256
    hidden: Count = 1024
    anchor_samples: Annotated[int, Range(low=2)] = 256
    box_samples: Annotated[int, Range(low=4)] = 512
    train_candidates: Count = 2000
    candidates: Count = 1000
    proposals: Count = 1000
    detections: Count = 100

    draws: ClassVar[tuple[str, ...]] = ("anchor_samples", "box_samples")
