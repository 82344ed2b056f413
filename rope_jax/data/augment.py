"""Augmentations of uint8 batches on the host: what happens to an example depends on (seed, epoch, example) and nothing else.

One 64-bit draw decides about one example. The draws of an epoch are made in one call, so an example finds its own at any batch size, and
only the raw output of Philox is used, which numpy promises not to change between versions (of its distributions it does not).
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
    """A name of `AUGMENTATIONS` with its options, as (option, value) pairs."""

    name: str
    options: tuple[tuple[str, int | float], ...] = ()


@functools.lru_cache(maxsize=16)
def parse(text: str) -> tuple[Augmentation, ...]:
    """Reads `"crop(pad=4)+flip"`, applied from left to right; `"none"` is no augmentation.

    Args:
        text: names joined by `+`, options in brackets.

    Returns:
        one Augmentation a name.

    Raises:
        ValueError: for text of another form, unknown names or options, and values that are not numbers.
    """
    return () if text.strip() == "none" else tuple(_parse_one(part.strip()) for part in text.split("+"))


def _parse_one(text: str) -> Augmentation:
    form = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if form is None or form[1] not in AUGMENTATIONS:
        raise ValueError(f"augmentation {text!r} is unknown; known are none, {', '.join(AUGMENTATIONS)}, with options as in crop(pad=4)")
    parameters = inspect.signature(AUGMENTATIONS[form[1]]).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    options = {}
    for pair in filter(None, (form[2] or "").split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in defaults:
            raise ValueError(f"augmentation {text!r} has an unknown option {name!r}; {form[1]} takes {', '.join(defaults)}")
        try:
            options[name] = type(defaults[name])(ast.literal_eval(value))
        except (ValueError, SyntaxError, TypeError):
            raise ValueError(f"augmentation {text!r}: option {name} is {value!r}, not a number") from None
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
        draws = epoch_draws(seed, epoch, count, f"{place} {augmentation.name}")[examples]
        images = AUGMENTATIONS[augmentation.name](images, draws, **dict(augmentation.options))
    return images


@functools.lru_cache(maxsize=16)  # a few augmentations, each for the last two epochs
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
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is out of range: 0 to 2**64 - 1")
    # The generator counts in the first word of its counter, so streams that start with another last word never meet.
    counter = np.array([0, 0, 0, zlib.crc32(stream.encode())], np.uint64)
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter).random_raw(count)
    draws.setflags(write=False)
    return draws


def _scaled(draws: np.ndarray, places: int) -> np.ndarray:
    """Whole numbers 0 to places - 1 from 32-bit ones, without a division."""
    return (draws * np.uint64(places) >> np.uint64(32)).astype(np.int64)
