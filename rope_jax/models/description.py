"""A model's description: the arguments that create it again, and its preprocessing."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from rope_jax.names import plugins
from rope_jax.positions.grids import Grid


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A source's preprocessing of images for evaluation.

    With the preprocessing of another source, weights lose up to half a per cent of accuracy. The
    image is resized so that its short side is `short_side(size)` pixels, cropped to size x size at
    the centre, scaled to 0..1, and normalised: (image - mean) / std.

    >>> Preprocessing(crop=0.9).crop_notation
    'centre(crop=0.9,interpolation=bicubic)'

    Attributes:
        mean, std: of the channels red, green, blue, in 0..1.
        crop: fraction of the resized short side that the crop keeps; 0 for whole images, which are
            resized without regard to their aspect.
        interpolation: method of resizing.
    """

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    crop: float = 0.875
    interpolation: str = "bicubic"

    @property
    def crop_notation(self) -> str:
        """The crop as written for `rope_jax.data.load`."""
        if not self.crop:
            return f"stretch(interpolation={self.interpolation})"
        return f"centre(crop={self.crop},interpolation={self.interpolation})"

    def short_side(self, size: int) -> int:
        """The short side in pixels before the crop to `size`, rounded down as by timm and DeiT.

        >>> Preprocessing(crop=0.9).short_side(224)
        248

        Args:
            size: side of the crop in pixels.
        """
        return math.floor(size / self.crop)


@dataclasses.dataclass(frozen=True)
class Description:
    """The arguments of `create_model` that create a model again, and metadata of its weights.

    Attributes:
        name: of the model.
        position: text of its scheme.
        num_classes: outputs of the head; 0 without one.
        image_size: (height, width) in pixels, for which its position tables are.
        options: all options of its family.
        preprocessing: what the weights expect of images, where known.
        class_names: of the logits, where known.
        plugins: modules that it may need (`rope_jax.names.plugins`).
        head: text of its head of dense prediction; None for a classifier.
        blocks: blocks whose maps that head takes; None for the last of every stage.
        trained_size: (height, width) in pixels from which its scheme extends.
        trained_options: options of its family from which its scheme extends.
    """

    name: str
    position: str
    num_classes: int
    image_size: Grid
    options: Mapping[str, Any]
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] | None = None
    plugins: tuple[str, ...] = ()
    head: str | None = None
    blocks: tuple[int, ...] | None = None
    trained_size: Grid | None = None
    trained_options: Mapping[str, Any] | None = None

    def __post_init__(self):
        for name, current in (("size", self.image_size), ("options", self.options)):
            if getattr(self, f"trained_{name}") is None:
                object.__setattr__(self, f"trained_{name}", current)

    @classmethod
    def from_model(cls, model: nnx.Module) -> "Description | None":
        """The description of a model; None for one that `create_model` did not create."""
        if model.name is None:
            return None
        head = model.head_notation
        return cls(
            model.name,
            model.notation,
            model.num_classes,
            model.image_size,
            dataclasses.asdict(model.options),
            model.preprocessing,
            model.class_names,
            plugins.find_needed(f"{model.name} {model.notation} {head or ''}"),
            head,
            None if head is None else model.blocks,
            model.trained_size,
            dataclasses.asdict(model.trained_options),
        )

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "Description":
        """The description stored as JSON; KeyError, TypeError or ValueError for anything else."""
        height, width = map(int, entries["image_size"])
        preprocessing, names = entries["preprocessing"], entries["class_names"]
        head, blocks = entries.get("head"), entries.get("blocks")  # older files have none
        trained, trained_options = entries.get("trained_size"), entries.get("trained_options")
        if preprocessing is not None:
            preprocessing = Preprocessing(
                tuple(map(float, preprocessing["mean"])),
                tuple(map(float, preprocessing["std"])),
                float(preprocessing["crop"]),
                str(preprocessing["interpolation"]),
            )
        return cls(
            str(entries["name"]),
            str(entries["position"]),
            int(entries["num_classes"]),
            (height, width),
            _as_options(entries["options"]),
            preprocessing,
            None if names is None else tuple(map(str, names)),
            tuple(map(str, entries["plugins"])),
            None if head is None else str(head),
            None if blocks is None else tuple(map(int, blocks)),
            None if trained is None else (int(trained[0]), int(trained[1])),
            None if trained_options is None else _as_options(trained_options),
        )


def _as_options(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_option(value) for name, value in dict(entries).items()}


def as_option(value: Any) -> Any:
    """The value of an option, whose sequences are tuples."""
    return tuple(map(as_option, value)) if isinstance(value, list) else value
