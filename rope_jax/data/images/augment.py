"""The registry of augmentations, their stages, and the notation of `data.augment`.

The augmentation of an example depends only on (seed, epoch, example). Augmentations run in four
stages, in this order: one crop, which brings pictures of any size to one size (loader); changes of
images that keep their size (loader); changes of uint8 images in the jitted training step; and
random erasing of normalised images in that step.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from rope_jax.data.images import crops, device, device_colours, device_crops, fits, joint
from rope_jax.names.notation import Call, parse
from rope_jax.names.options import convert_options, find_options
from rope_jax.names.registry import Registry

CROP, LOADER, STEP, ERASING = range(4)  # stages


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kind of augmentation.

    Attributes:
        stage: when it runs.
        function: with the signature of its stage; keyword-only arguments are its options.
        on_device: the equivalent within the step, for data sets on the device.
        labels: the kinds (`rope_jax.data.labels`) that it changes together with images, or that
            stay valid. A crop that is not for "images" gets the labels, too, or is a `Placing`.
            Others for "pixels" or "masks" take images of any number of channels.
        random: False for a crop without random numbers, which is not only for training.
        boxes: for an augmentation that keeps the size, the corresponding change of boxes:
            (boxes, width, draws) -> boxes.
    """

    stage: int
    function: Callable[..., Any]
    on_device: Callable[..., Any] | None = None
    labels: tuple[str, ...] = ("images",)
    random: bool = True
    boxes: Callable[..., Any] | None = None


_ALL = ("images", "pixels", "boxes", "masks")
_MAPS, _BOXES = ("images", "pixels"), ("boxes", "masks")
AUGMENTATIONS = Registry(
    "augmentation",
    {
        "resized_crop": Entry(CROP, crops.resized_crop, device_crops.resized_crop, _MAPS),
        "centre": Entry(CROP, crops.centre, labels=_MAPS, random=False),
        "stretch": Entry(CROP, crops.stretch, labels=_MAPS, random=False),
        "scaled_crop": Entry(CROP, joint.scaled_crop, labels=("pixels",)),
        "detr_crop": Entry(CROP, fits.detr_crop, labels=_BOXES),
        "fit": Entry(CROP, fits.fit, labels=_BOXES, random=False),
        "crop": Entry(LOADER, crops.pad_and_crop, device_crops.pad_and_crop),
        "flip": Entry(LOADER, crops.flip, device_crops.flip, _ALL, boxes=fits.flip_boxes),
        "rand_augment": Entry(STEP, device.rand_augment),
        "three_augment": Entry(STEP, device.three_augment, labels=_ALL),
        "color_jitter": Entry(STEP, device.color_jitter, labels=_ALL),
        "photometric": Entry(STEP, device_colours.photometric, labels=_ALL),
        "erase": Entry(ERASING, device.erase),
    },
)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """An augmentation with its options, which a call passes to the function of its entry."""

    name: str
    options: tuple[tuple[str, int | float | str], ...] = ()

    @property
    def entry(self) -> Entry:
        """Its stage and functions."""
        return AUGMENTATIONS[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with these arguments and the options."""
        return self.entry.function(*args, **kwargs, **dict(self.options))

    def option(self, name: str) -> int | float | str | None:
        """The value of an option, given or by default; None if there is no such option."""
        parameter = inspect.signature(self.entry.function).parameters.get(name)
        return dict(self.options).get(name, parameter and parameter.default)

    def move_labels(self, function: Callable[..., Any], labels: Any, draws: Any) -> Any:
        """Moves labels of pixels [..., H, W] by `function`, as images of one channel."""
        return function(labels[..., None], draws)[..., 0]

    def move_boxes(self, boxes: Any, width: int, draws: Any) -> Any:
        """Moves the boxes [B, n, 4] of images of this width together with the images."""
        return self.entry.boxes(boxes, width, draws, **dict(self.options))

    def __str__(self) -> str:
        return str(Call(self.name, options=self.options))


@dataclasses.dataclass(frozen=True)
class AugmentSplit:
    """Parts of `data.augment` by where they run.

    Attributes:
        loader: the part for `rope_jax.data.batches`, as text.
        pixels: for uint8 images in the training step.
        erasing: for normalised images in the training step.
    """

    loader: str
    pixels: tuple[Augmentation, ...]
    erasing: tuple[Augmentation, ...]


@functools.lru_cache(maxsize=16)
def split_augment(text: str) -> AugmentSplit:
    """Splits the notation of `data.augment` by where each part runs.

    >>> split = split_augment("resized_crop+flip+rand_augment(m=9,mstd=0.5)+erase(p=0.25)")
    >>> split.loader, split.pixels[0].name, split.erasing[0].options
    ('resized_crop+flip', 'rand_augment', (('p', 0.25),))

    Args:
        text: names of `AUGMENTATIONS` joined by `+`, in the order of their stages, with options in
            parentheses; or "none".

    Raises:
        ValueError: text of another form, unknown names or options, values of a wrong type or out of
            range, a wrong order.
    """
    augmentations = parse_augment(text)
    pixels = tuple(
        augmentation for augmentation in augmentations if augmentation.entry.stage == STEP
    )
    erasing = tuple(
        augmentation for augmentation in augmentations if augmentation.entry.stage == ERASING
    )
    return AugmentSplit(
        "+".join(map(str, augmentations[: _step_start(augmentations)])) or "none", pixels, erasing
    )


@functools.lru_cache(maxsize=16)
def parse_loader(text: str) -> tuple[Augmentation, ...]:
    """Reads the loader's augmentations, `AugmentSplit.loader`.

    Raises:
        ValueError: as `split_augment`, and for augmentations of the training step.
    """
    augmentations = parse_augment(text)
    if others := augmentations[_step_start(augmentations) :]:
        raise ValueError(
            f"augmentation {text!r}: {others[0].name} runs in the training step, "
            "not in the loader: leave it out here"
        )
    return augmentations


def parse_crop(text: str) -> Augmentation:
    """Reads one crop, such as "centre(crop=0.875)".

    Raises:
        ValueError: as `split_augment`, and for augmentations that are not crops.
    """
    augmentations = parse_augment(text)
    if len(augmentations) != 1 or augmentations[0].entry.stage != CROP:
        choices = ", ".join(name for name, entry in AUGMENTATIONS.items() if entry.stage == CROP)
        raise ValueError(
            f"{text!r} is not a crop; crops are {choices}, with options as in centre(crop=0.875)"
        )
    return augmentations[0]


def parse_augment(text: str) -> tuple[Augmentation, ...]:
    """Reads augmentations of all stages; contradictory options raise an error only when used."""
    calls = parse(text, "augmentation")
    if [call.name for call in calls] == ["none"]:
        return ()
    augmentations = tuple(_bind(call, text) for call in calls)
    stages = [augmentation.entry.stage for augmentation in augmentations]
    if stages != sorted(stages) or stages.count(CROP) > 1:
        raise ValueError(
            f"augmentation {text!r} is in another order than that of its stages: one crop that "
            "brings pictures to one size, what else the loader does, what the step does, and erase"
        )
    return augmentations


def _step_start(augmentations: tuple[Augmentation, ...]) -> int:
    """The number of augmentations before those of the training step."""
    return sum(augmentation.entry.stage < STEP for augmentation in augmentations)


def _bind(call: Call, text: str) -> Augmentation:
    function = AUGMENTATIONS[call.name].function
    if call.inner:
        raise ValueError(f"augmentation {text!r}: {call.name} takes options, as in crop(pad=4)")
    options = convert_options(call.name, dict(call.options), find_options(function))
    return Augmentation(call.name, tuple(sorted(options.items())))
