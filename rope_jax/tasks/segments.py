"""Segmentation of a test split at the images' own sizes: views and scores."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from rope_jax.config import ConfigError, blame
from rope_jax.data import BadImages, Images, Streamed
from rope_jax.data.images.joint import scale_size
from rope_jax.models.heads.pixels import IGNORED
from rope_jax.names.text import image_pair
from rope_jax.tasks.evaluator import Evaluator
from rope_jax.tasks.pictures import Segmented
from rope_jax.tasks.windows import Size, Windows, resize_image

_LONG = 4  # an image's longer side is at most this many times the size, as in mmsegmentation


@dataclasses.dataclass(frozen=True)
class Views:
    """The scales, flips and windows with which an image is segmented.

    Attributes:
        scales: of the resized images, relative to the size of evaluation.
        flip: True to segment each of them mirrored, too.
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

    def apply(
        self, image: Float[np.ndarray, "h w 3"], fit: Size | None
    ) -> Iterator[tuple[Float[np.ndarray, "_H _W 3"], bool]]:
        """Yields the views of a normalised image, each with True if it is mirrored.

        With windows, no view is smaller than one (BEiT).

        Args:
            image: at its own size.
            fit: limits of its shorter and its longer side at scale 1; None for its own size.
        """
        size = image.shape[:2]
        for scale in self.scales:
            if fit is None:
                resized = tuple(max(1, int(side * scale + 0.5)) for side in size)
            else:
                resized = scale_size(size, scale, short=fit[0], long=fit[1])
            least = 1 if self.window is None else min(self.window)
            if min(resized) < least:
                resized = scale_size(size, 1.0, short=least, long=math.inf)
            view = image if resized == size else resize_image(image, resized)
            yield view, False
            if self.flip:
                yield view[:, ::-1], True


def requested_views(
    images: Images | Streamed,
    *,
    scales: tuple[float, ...] | None = None,
    flip: bool = False,
    window: str | None = None,
    stride: int | None = None,
) -> Views:
    """The requested views; by default windows of the size of evaluation, or whole images of a set
    in memory.

    Args:
        images: to be segmented.
        scales, flip: see `Views`.
        window: "512", "512x768" or "whole".
        stride: see `Views`.

    Raises:
        ConfigError: with the argument to change.
    """
    scales = scales or (1.0,)
    window = window or ("whole" if images.in_memory else None)
    if window == "whole":
        if stride is not None:
            raise ConfigError("--stride is from window to window: name a --window, or leave it out")
        return Views(scales, flip)
    with blame("--window"):
        size = images.size if window is None else image_pair(window)
    if stride is not None and stride > min(size):
        raise ConfigError(
            f"--stride={stride} leaves out pixels between windows of "
            f"{size[0]}x{size[1]}: use at most {min(size)}"
        )
    return Views(scales, flip, size, stride or max(1, 2 * min(size) // 3))


def segment_split(
    evaluator: Evaluator,
    images: Images | Streamed,
    views: Views,
    multiple: int,
    probabilities: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
    *,
    pictures: int = 0,
) -> tuple[list[Int[np.ndarray, "_K 3"]], list[Segmented], str]:
    """Counts the pixels of a split, each image compared with its labels at its own size.

    Logits of windows are averaged and resized to the image, and the softmaxes of views averaged
    (mmsegmentation). Mask2Former's scores are averaged as they are, as in its code.

    Args:
        evaluator: of a model that gives logits of every pixel; its steps are of windows.
        images: of a source whose pixels have classes. Those that are read one at a time are resized
            to a short side of the split's size, and at most four times that.
        views: of each image.
        multiple: of the sides of whole images, which are padded to it.
        probabilities: see `Windows`.
        pictures: number of images that are kept with their classes.

    Returns:
        `count_pixels` of each image; the first images with their labels and the predicted classes;
        and the resizing in words.

    Raises:
        BadImages: an image or its labels cannot be used.
    """
    short = None if images.in_memory else min(images.size)
    windows = Windows(
        evaluator.apply,
        size=views.window,
        stride=views.stride,
        batch=evaluator.batch_size,
        multiple=multiple,
        exact=images.in_memory,
        mesh=evaluator.mesh,
        probabilities=probabilities,
    )
    count = jax.jit(_count, static_argnames="number")
    skipped = (BadImages,) if evaluator.config.data.bad_images == "skip" else ()
    mean, std = np.float32(evaluator.mean), np.float32(evaluator.std)
    fit = None if short is None else (short, _LONG * short)
    parts, kept = [], []
    for number in range(len(images.labels)):
        try:
            image, label = images.original(number)
        except skipped:
            continue
        seen = views.apply((image / np.float32(255) - mean) / std, fit)
        scores = windows.scores(evaluator.weights, seen, label.shape)
        wide = np.full(scores.shape[:2], IGNORED, np.uint8)
        wide[: label.shape[0], : label.shape[1]] = label
        classes, counts = count(scores, wide, number=images.classes)
        parts.append(np.asarray(counts))
        if len(kept) < pictures:
            predicted = np.asarray(classes)[: label.shape[0], : label.shape[1]]
            kept.append(Segmented(image, label, predicted))
        evaluator.poll(number + 1)
    if short is None:
        return parts, kept, "images at their own size"
    resized = f"images resized to a short side of {short} pixels, at most {_LONG * short} long"
    return parts, kept, resized


def _count(
    scores: Float[jax.Array, "H W K"], label: UInt8[jax.Array, "H W"], number: int
) -> tuple[UInt8[jax.Array, "H W"], Int[jax.Array, "_K 3"]]:
    """The classes of the pixels, and `count_pixels` of them."""
    classes = scores.argmax(-1)
    mask = jnp.ones(1, bool)
    counts = count_pixels(classes[None], label[None], mask, number)
    return classes.astype(jnp.uint8), counts


def count_pixels(
    classes: Int[Array, "B H W"], label: UInt8[Array, "B H W"], mask: Bool[Array, " B"], number: int
) -> Int[Array, "K 3"]:
    """Counts the pixels of each class in an evaluation batch.

    Args:
        classes: predicted.
        label: 0 to number - 1, or 255.
        mask: False for padding of the batch.
        number: K, of classes.

    Returns:
        Per class: pixels of that class that are predicted, pixels predicted as it, pixels of it.
    """
    valid = (label != IGNORED) & mask[:, None, None]

    def histogram(values: Array, chosen: Array) -> Array:
        # Integers, whose sum does not depend on the order in which they are added.
        return jnp.bincount(jnp.where(chosen, values, number).ravel(), length=number + 1)[:number]

    predicted, label = classes.astype(jnp.int32), label.astype(jnp.int32)
    counts = [
        histogram(label, valid & (predicted == label)),
        histogram(predicted, valid),
        histogram(label, valid),
    ]
    return jnp.stack(counts, axis=-1).astype(jnp.int32)
