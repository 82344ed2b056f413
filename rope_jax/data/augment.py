"""Augmentations of uint8 images on the host: what happens to an example depends on (seed, epoch, example) and nothing else.

One 64-bit draw decides about one example. The draws of an epoch are made in one call, so an example finds its own at any batch size, and
only the raw output of Philox is used, which numpy promises not to change between versions (of its distributions it does not).

A frame (`rope_jax.data.frames`) may come first: it brings pictures of any size to one. What follows keeps their size.
"""

import ast
import functools
import inspect
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8, UInt64

from rope_jax.data.frames import FRAMES, Frame, cut_pixels


def crop(images: UInt8[np.ndarray, "B H W 3"], draws: UInt64[np.ndarray, " B"], *, pad: int = 4) -> UInt8[np.ndarray, "B H W 3"]:
    """Pads each image with `pad` black pixels on every side and cuts its own size out at a random place.

    Args:
        images: uint8 [B, H, W, 3].
        draws: uint64 [B], uniform.
        pad: pixels, at least 1 and smaller than both sides of the image.

    Returns:
        uint8 [B, H, W, 3].

    Raises:
        ValueError: where `pad` is not in that range.
    """
    height, width = images.shape[1:3]
    if not 1 <= pad < min(height, width):
        raise ValueError(f"crop(pad={pad}) does not suit images of {height} x {width} pixels: pad is at least 1 and below both sides")
    places = 2 * pad + 1
    down = (_scaled(draws >> np.uint64(32), places) - pad).tolist()
    right = (_scaled(draws & np.uint64(0xFFFFFFFF), places) - pad).tolist()
    out = np.zeros_like(images)
    for image, source, y, x in zip(out, images, down, right, strict=True):
        image[max(-y, 0) : height - max(y, 0), max(-x, 0) : width - max(x, 0)] = source[
            max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)
        ]
    return out


def flip(images: UInt8[np.ndarray, "B H W 3"], draws: UInt64[np.ndarray, " B"], *, p: float = 0.5) -> UInt8[np.ndarray, "B H W 3"]:
    """Mirrors each image left to right with probability `p`.

    Args:
        images: uint8 [B, H, W, 3].
        draws: uint64 [B], uniform.
        p: probability, 0 to 1.

    Returns:
        uint8 [B, H, W, 3].

    Raises:
        ValueError: where `p` is not in that range.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"flip(p={p}) is no probability: p is between 0 and 1")
    mirrored = (draws >> np.uint64(11)) * 2.0**-53 < p
    out = images.copy()
    pixels = out.view("V3")  # three bytes moved at a time
    pixels[mirrored] = pixels[mirrored, :, ::-1]
    return out


AUGMENTATIONS: dict[str, Callable[..., np.ndarray]] = {"crop": crop, "flip": flip}


@dataclass(frozen=True)
class Augmentation:
    """A name of `FRAMES` or `AUGMENTATIONS` with its options, as (option, value) pairs."""

    name: str
    options: tuple[tuple[str, int | float | str], ...] = ()


@functools.lru_cache(maxsize=16)
def parse(text: str) -> tuple[Augmentation, ...]:
    """Reads `"resized_crop(scale_min=0.2)+flip"`, applied from left to right; `"none"` is no augmentation.

    Args:
        text: names joined by `+`, options in brackets. A frame stands first or not at all.

    Returns:
        one Augmentation a name.

    Raises:
        ValueError: for text of another form, unknown names or options, values of another kind, and frames in other places.
    """
    if text.strip() == "none":
        return ()
    parsed = tuple(parse_one(part, FRAMES | AUGMENTATIONS) for part in text.split("+"))
    if misplaced := [one.name for one in parsed[1:] if one.name in FRAMES]:
        raise ValueError(f"augmentation {text!r}: {misplaced[0]} brings pictures of any size to one, so it stands first")
    return parsed


def parse_frame(text: str) -> Frame:
    """Reads one frame, as `"centre(crop=0.875)"`.

    Raises:
        ValueError: as `parse`, and for augmentations that are no frames.
    """
    parsed = parse(text)
    if len(parsed) != 1 or parsed[0].name not in FRAMES:
        raise ValueError(f"{text!r} is not a frame; frames are {', '.join(FRAMES)}, with options as in centre(crop=0.875)")
    return as_frame(parsed[0])


def as_frame(augmentation: Augmentation) -> Frame:
    """The function of a frame with its options."""
    return functools.partial(FRAMES[augmentation.name], **dict(augmentation.options))


def parse_one(text: str, known: dict[str, Callable]) -> Augmentation:
    """Reads one name of `known`, whose keyword-only arguments are its options, as `"crop(pad=4)"`; raises as `parse`."""
    text = text.strip()
    form = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if form is None or form[1] not in known:
        raise ValueError(f"augmentation {text!r} is unknown; known are none, {', '.join(known)}, with options as in crop(pad=4)")
    parameters = inspect.signature(known[form[1]]).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    options = {}
    for pair in filter(None, (form[2] or "").split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name in options:
            raise ValueError(f"augmentation {text!r} names option {name} twice")
        if name not in defaults:
            raise ValueError(f"augmentation {text!r} has an unknown option {name!r}; {form[1]} takes {', '.join(defaults)}")
        if isinstance(defaults[name], str):
            options[name] = value
            continue
        kind = type(defaults[name])
        try:
            number = ast.literal_eval(value)
            if not isinstance(number, int | float) or kind(number) != number:
                raise ValueError
            options[name] = kind(number)
        except (ValueError, SyntaxError, TypeError, OverflowError):
            wanted = {int: "a whole number", bool: "True or False"}.get(kind, "a number")
            raise ValueError(f"augmentation {text!r}: option {name} is {value!r}, not {wanted}") from None
    return Augmentation(form[1], tuple(sorted(options.items())))


def augment(
    images: UInt8[np.ndarray, "B H W 3"],
    examples: np.ndarray,
    augmentations: tuple[Augmentation, ...],
    *,
    seed: int,
    epoch: int,
    count: int,
) -> UInt8[np.ndarray, "B H W 3"]:
    """Applies the augmentations in their order to examples of one epoch.

    Args:
        images: uint8 [B, H, W, 3].
        examples: integers [B], the ids of the images, each below `count`.
        augmentations: from `parse`.
        seed: the run's seed.
        epoch: the epoch's number.
        count: examples in an epoch.

    Returns:
        uint8 [B, H, W, 3]; `images` itself where there is nothing to apply.
    """
    for place, augmentation in enumerate(augmentations):
        draws = epoch_draws(seed, epoch, count, stream(place, augmentation))[examples]
        images = apply(augmentation, images, draws)
    return images


def apply(
    augmentation: Augmentation, images: UInt8[np.ndarray, "B H W 3"], draws: UInt64[np.ndarray, " B"]
) -> UInt8[np.ndarray, "B h w 3"]:
    """One augmentation of images of one size, which a frame keeps."""
    if augmentation.name not in FRAMES:
        return AUGMENTATIONS[augmentation.name](images, draws, **dict(augmentation.options))
    frame, size = as_frame(augmentation), images.shape[1:3]
    return np.stack([cut_pixels(image, frame, size, int(draw)) for image, draw in zip(images, draws, strict=True)])


def stream(place: int, augmentation: Augmentation) -> str:
    """The name of the draws of an augmentation at a place in the list."""
    return f"{place} {augmentation.name}"


def epoch_draws(seed: int, epoch: int, count: int, stream: str) -> UInt64[np.ndarray, " count"]:
    """Uniform 64-bit numbers, one for each example of an epoch: a pure function of its arguments.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
        count: examples in an epoch.
        stream: what the numbers are for; other streams are independent.

    Returns:
        uint64 [count], read-only.

    Raises:
        ValueError: for a seed out of range.
    """
    return _draws(seed, count)(epoch, stream)


@functools.lru_cache(maxsize=64)
def _draws(seed: int, count: int) -> Callable[[int, str], UInt64[np.ndarray, " count"]]:
    """`epoch_draws` of a seed, which remembers those of a few augmentations, each for the last two epochs."""

    @functools.lru_cache(maxsize=16)
    def draws_of(epoch: int, stream: str) -> np.ndarray:
        draws = _generator(seed, epoch, stream).random_raw(count)
        draws.setflags(write=False)
        return draws

    return draws_of


class ExampleDraws:
    """The numbers of single examples in `epoch_draws`, without those of the others: for sets whose epochs are millions of examples.

    Args:
        seed: 0 to 2**64 - 1. An object serves one thread.

    Raises:
        ValueError: for a seed out of range.
    """

    def __init__(self, seed: int):
        self._generator = _generator(seed, 0, "")
        self._state = self._generator.state

    def __call__(self, epoch: int, example: int, stream: str) -> int:
        """The number of an example, 0 to 2**64 - 1."""
        block, place = divmod(example, 4)  # Philox makes four numbers at each count
        counted = self._state["state"]
        counted["key"][1], counted["counter"][:] = epoch, (block, 0, 0, zlib.crc32(stream.encode()))
        self._generator.state = self._state  # a new generator would cost three times as much
        return int(self._generator.random_raw(4)[place])


def _generator(seed: int, epoch: int, stream: str) -> np.random.Philox:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is out of range: 0 to 2**64 - 1")
    # The generator counts in the first word of its counter, so streams that start with another last word never meet.
    counter = np.array([0, 0, 0, zlib.crc32(stream.encode())], np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter)


def _scaled(draws: np.ndarray, places: int) -> np.ndarray:
    """Whole numbers 0 to places - 1 from 32-bit ones, without a division."""
    return (draws * np.uint64(places) >> np.uint64(32)).astype(np.int64)
