"""What happened to the images that a set of weights was evaluated on."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a source prepares images; the same weights lose up to half a per cent of accuracy under another's rules.

    The image is resized so that its short side is `resized(size)` pixels, cut to size x size in the centre, scaled to 0..1, and
    normalised: (image - mean) / std.

    Attributes:
        mean, std: of the channels red, green, blue, in 0..1.
        crop: share of the resized short side that the cut keeps.
        interpolation: of the resizing.
    """

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    crop: float = 0.875
    interpolation: str = "bicubic"

    def resized(self, size: int) -> int:
        """The short side in pixels before the cut to `size`: rounded down, as by timm, DeiT and Swin (248 of 224 with a crop of 0.9)."""
        return math.floor(size / self.crop)
