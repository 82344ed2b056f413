"""Segmentation of a test split at the images' own sizes: views and scores."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8

from rope_jax.config import ConfigError
from rope_jax.data import Images, Streamed, StreamedMaps
from rope_jax.data.images.joint import scaled_size
from rope_jax.data.sources.index import BadImages
from rope_jax.evaluate.accuracy import description
from rope_jax.evaluate.pictures import Segmented
from rope_jax.evaluate.results import Row
from rope_jax.evaluate.windows import Apply, Size, Windows, resize_image
from rope_jax.tasks import segmentation
from rope_jax.tasks.segmentation import IGNORED

_LONG = 4  # an image's longer side is at most this many times the size, as in mmsegmentation

Pair = tuple[UInt8[np.ndarray, "_h _w 3"], UInt8[np.ndarray, "_h _w"]]


@dataclasses.dataclass(frozen=True)
class Views:
    """How an image is segmented.

    Attributes:
        scales: of the resized images, relative to the size of evaluation.
        flip: whether each of them is seen mirrored, too.
        window: (height, width) that the model sees at once; None for whole images.
        stride: pixels from window to window.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: Size | None = None
    stride: int = 1

    def __str__(self) -> str:
        """A part of a protocol.

        >>> str(Views((0.5, 1.0), flip=True, window=(512, 512), stride=341))
        'scales 0.5, 1, each also flipped, windows of 512x512 at strides of 341 pixels'
        """
        words = [f"scales {', '.join(f'{scale:g}' for scale in self.scales)}"]
        words += ["each also flipped"] if self.flip else []
        if self.window is None:
            return ", ".join([*words, "whole images"])
        sides = "x".join(map(str, self.window))
        return ", ".join([*words, f"windows of {sides} at strides of {self.stride} pixels"])

    def of(
        self, image: Float[np.ndarray, "h w 3"], fit: Size | None
    ) -> Iterator[tuple[Float[np.ndarray, "_H _W 3"], bool]]:
        """The views of a normalised image, each with whether it is mirrored.

        With windows, no view is smaller than one (BEiT).

        Args:
            image: at its own size.
            fit: what its shorter and its longer side fit into at scale 1; None for its own size.
        """
        size = image.shape[:2]
        for scale in self.scales:
            if fit is None:
                resized = tuple(max(1, int(side * scale + 0.5)) for side in size)
            else:
                resized = scaled_size(size, scale, short=fit[0], long=fit[1])
            least = 1 if self.window is None else min(self.window)
            if min(resized) < least:
                resized = scaled_size(size, 1.0, short=least, long=math.inf)
            view = image if resized == size else resize_image(image, resized)
            yield view, False
            if self.flip:
                yield view[:, ::-1], True


def segment_split(
    apply: Apply,
    weights: Any,
    images: Images | Streamed,
    views: Views,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    multiple: int,
    mesh: Mesh,
    probabilities: Callable[[jax.Array], jax.Array],
    pictures: int = 0,
    bad_images: str = "error",
    poll: Callable[[int], None] = lambda images: None,
) -> tuple[Row, list[Segmented]]:
    """Scores a model on a split, each image compared with its labels at its own size.

    Logits of windows are averaged and resized to the image, and the softmaxes of views averaged
    (mmsegmentation). Mask2Former's scores are averaged as they are, as in its code.

    Args:
        apply: (weights, normalised windows) -> logits of every pixel.
        weights: of the model.
        images: of a source whose pixels have classes. Those that are read one at a time are resized
            to a short side of the split's size, and at most four times that.
        views: of each image.
        mean, std: normalisation per channel.
        batch_size: windows in a step on all devices together.
        multiple: of the sides of whole images, which are padded to it.
        mesh: the devices.
        probabilities: see `Windows`.
        pictures: number of images that are kept with their classes.
        bad_images: "error", or "skip" for images that cannot be used.
        poll: called after each image with the number of images so far.

    Returns:
        The row of scores, and the first images with their labels and the predicted classes.

    Raises:
        BadImages: an image or its labels cannot be used.
    """
    short = None if images.in_memory else min(images.size)
    windows = Windows(
        apply,
        size=views.window,
        stride=views.stride,
        batch=batch_size,
        multiple=multiple,
        exact=images.in_memory,
        mesh=mesh,
        probabilities=probabilities,
    )
    count = jax.jit(_count, static_argnames="number")
    skipped = (BadImages,) if bad_images == "skip" else ()
    parts, kept, used = [np.zeros((images.classes, 3), np.int64)], [], 0
    for number in range(len(images.labels)):
        try:
            image, label = _pair(images, number)
        except skipped:
            continue
        normalised = (image / np.float32(255) - np.float32(mean)) / np.float32(std)
        fit = None if short is None else (short, _LONG * short)
        scores = windows.scores(weights, views.of(normalised, fit), label.shape)
        wide = np.full(scores.shape[:2], IGNORED, np.uint8)
        wide[: label.shape[0], : label.shape[1]] = label
        found, counts = count(scores, wide, number=images.classes)
        parts.append(np.asarray(counts))
        used += 1
        if len(kept) < pictures:
            predicted = np.asarray(found)[: label.shape[0], : label.shape[1]]
            kept.append(Segmented(image, label, predicted))
        poll(number + 1)
    resized = "images at their own size"
    if short is not None:
        resized = f"images resized to a short side of {short} pixels, at most {_LONG * short} long"
    row = description(images) | {"count": used} | segmentation.scores(parts, images)
    row["protocol"] = f"{resized}, labels at their own size; {views}"
    return row, kept


def _pair(images: Images | Streamed, number: int) -> Pair:
    """An image and its labels, at the size at which they are stored."""
    if isinstance(images, StreamedMaps):
        return images.original(number)
    return images.images[number], images.labels[number]


def _count(
    scores: Float[jax.Array, "H W K"], label: UInt8[jax.Array, "H W"], number: int
) -> tuple[UInt8[jax.Array, "H W"], Int[jax.Array, "_K 3"]]:
    """The classes of the pixels, and `count_pixels` of them."""
    found = scores.argmax(-1)
    mask = jnp.ones(1, bool)
    counts = segmentation.count_pixels(found[None], label[None], mask, number)
    return found.astype(jnp.uint8), counts


def side_multiple(grids: Callable[[Size], Any]) -> int:
    """The least number of pixels whose multiples are sides of images that a model takes.

    >>> import rope_jax
    >>> side_multiple(rope_jax.create_model("vit_digits", depth=1).grids)
    2

    Args:
        grids: `Backbone.grids`.

    Raises:
        ConfigError: there is no such number up to 128.
    """
    for side in range(1, 129):
        try:
            for times in (6, 7, 11):
                grids((side * times, side * (times + 1)))
        except ValueError:
            continue
        return side
    raise ConfigError("the model takes images of few sizes only: name a --window that it takes")
