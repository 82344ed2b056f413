"""Segmentation of images of any size: by sliding windows or as a whole, at several scales, flipped.

Few programs serve a set. The model sees windows of one size, whatever the image. Logits, or the
scores of heads that have no logits, are added up on canvases, whose sides are rounded up to
`bucket`s; pixels beyond the image are left out.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rope_jax.positions.resample import bilinear_matrix
from rope_jax.system.sharding import put_batch, replicate
from rope_jax.tasks.evaluator import Apply

Size = tuple[int, int]


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """First pixels of the windows along an axis; the last window ends with the image.

    >>> window_starts(100, 64, 48), window_starts(64, 64, 48), window_starts(160, 64, 48)
    ([0, 36], [0], [0, 48, 96])
    """
    last = length - window
    return [*range(0, last, stride), last]


def bucket(side: int) -> int:
    """The next larger 2**n or 1.5 * 2**n, the side of a canvas.

    >>> [bucket(side) for side in (1, 64, 65, 100, 512, 683)]
    [1, 64, 96, 128, 512, 768]
    """
    power = 1 << (side - 1).bit_length()
    return power * 3 // 4 if side <= power * 3 // 4 else power


def resize_image(image: Float[np.ndarray, "h w 3"], size: Size) -> Float[np.ndarray, "H W 3"]:
    """Bilinear resizing without antialiasing."""
    rows, columns = (
        bilinear_matrix(before, after).astype(image.dtype)
        for before, after in zip(image.shape[:2], size, strict=True)
    )
    return np.einsum("yh,hwc,xw->yxc", rows, image, columns, optimize=True)


class Windows:
    """Segments images window by window.

    Attributes:
        size: (height, width) of windows; None for one window as large as the canvas, where the
            model sees the padding as it does in training.
        stride: pixels from each window to the next.
        batch: windows in a step on all devices together.
        multiple: of the sides of canvases that are windows: the patch size.
        exact: True to pad whole images to that multiple only, for sets of few sizes; otherwise they
            are padded to canvases.
    """

    def __init__(
        self,
        apply: Apply,
        *,
        size: Size | None,
        stride: int = 1,
        batch: int = 1,
        multiple: int = 1,
        exact: bool = False,
        mesh: Mesh,
        probabilities: Callable[[Array], Array] = jax.nn.softmax,
    ):
        """Compiles nothing yet.

        Args:
            apply: (weights, normalised windows) -> logits of every pixel.
            size, stride, batch, multiple, exact: see above.
            mesh: the devices.
            probabilities: of the classes of pixels, from mean logits; see `SegmentationHead`.
        """
        self.size, self.stride, self.multiple, self.exact = size, stride, multiple, exact
        self.batch = -(-batch // mesh.size) * mesh.size if size else mesh.size
        self._mesh = mesh
        self._apply = jax.jit(apply, out_shardings=replicate(mesh))
        # Of this object: as a static argument, a head's method would stay in jax's cache.
        self._probabilities = jax.jit(functools.partial(_canvas_probabilities, probabilities))

    def scores(
        self,
        weights: Any,
        views: Iterable[tuple[Float[np.ndarray, "_h _w 3"], bool]],
        original: Size,
    ) -> Float[Array, "H W K"]:
        """Mean probabilities of the classes over several views of an image.

        Args:
            weights: of the model.
            views: of the image, normalised, each with whether it is flipped.
            original: (height, width) of the image itself.

        Returns:
            On the bucket of the original; beyond the original they have no meaning.
        """
        probabilities = [
            self._view(weights, image, flipped=flipped, original=original)
            for image, flipped in views
        ]
        return sum(probabilities[1:], probabilities[0]) / len(probabilities)

    def _view(
        self, weights: Any, image: Float[np.ndarray, "h w 3"], *, flipped: bool, original: Size
    ) -> Float[Array, "H W K"]:
        """Probabilities of one view: those of the mean logits, resized to the original."""
        sides = [max(n, least) for n, least in zip(image.shape, self.size or (1, 1), strict=False)]
        canvas, tight = (
            tuple(math.ceil(side / self.multiple) * self.multiple for side in lengths)
            for lengths in (map(bucket, sides), sides)
        )
        window = self.size or (tight if self.exact else canvas)
        canvas = tuple(map(max, canvas, window))
        sums, count = self._sums(weights, image, window, canvas)
        rows, columns = (
            np.zeros((bucket(after), side), count.dtype)
            for after, side in zip(original, canvas, strict=True)
        )
        for matrix, before, after in zip((rows, columns), image.shape, original, strict=False):
            matrix[:after, :before] = bilinear_matrix(before, after)
        if flipped:
            columns[: original[1]] = columns[: original[1]][::-1]
        return self._probabilities(sums, count, rows, columns)

    def _sums(
        self, weights: Any, image: Float[np.ndarray, "h w 3"], window: Size, canvas: Size
    ) -> tuple[Float[Array, "H W K"], Float[np.ndarray, "H W"]]:
        """Sums of the windows' logits on a canvas, and the number of windows at every pixel."""
        sides = [max(side, least) for side, least in zip(image.shape, window, strict=False)]
        padding = [(0, n - side) for n, side in zip((*sides, 3), image.shape, strict=True)]
        image = np.pad(image, padding)
        anchors = map(window_starts, sides, window, (self.stride,) * 2)
        starts = np.array(list(itertools.product(*anchors)), np.int32)
        boxes = [(slice(y, y + window[0]), slice(x, x + window[1])) for y, x in starts.tolist()]
        count, sums = np.zeros(canvas, image.dtype), None
        for box in boxes:
            count[box] += 1
        for first in range(0, len(starts), self.batch):
            indices = np.minimum(np.arange(first, first + self.batch), len(starts) - 1)
            crops = np.stack([image[boxes[i]] for i in indices])
            batch = put_batch({"image": crops}, self._mesh)
            logits = self._apply(weights, batch["image"])
            if sums is None:
                wide = jnp.promote_types(logits.dtype, jnp.float32)
                shape = (*canvas, logits.shape[-1])
                sums = jnp.zeros(shape, wide, device=replicate(self._mesh))
            sums = _add_windows(sums, logits, starts[indices], len(starts) - first)
        return sums, np.maximum(count, 1)


@functools.partial(jax.jit, donate_argnums=0)
def _add_windows(
    sums: Float[Array, "H W K"],
    logits: Float[Array, "B h w K"],
    starts: Int[Array, "B 2"],
    count: Int[Array, ""] | int,
) -> Float[Array, "H W K"]:
    """Adds the first `count` windows to a canvas, at their first pixels."""

    def add(i: Array, sums: Array) -> Array:
        top, left = starts[i]
        at, shape = (top, left, jnp.zeros_like(top)), logits.shape[1:]
        before = jax.lax.dynamic_slice(sums, at, shape)
        return jax.lax.dynamic_update_slice(sums, before + logits[i].astype(sums.dtype), at)

    return jax.lax.fori_loop(0, jnp.minimum(count, len(starts)), add, sums)


def _canvas_probabilities(
    probabilities: Callable[[Array], Array],
    sums: Float[Array, "h w K"],
    count: Float[Array, "h w"],
    rows: Float[Array, "H h"],
    columns: Float[Array, "W w"],
) -> Float[Array, "H W K"]:
    """Probabilities of mean logits after resizing by a matrix for each axis."""
    means = sums / count[..., None]
    means = jnp.einsum("yh,hwk->ywk", rows, means, precision="highest")
    return probabilities(jnp.einsum("xw,ywk->yxk", columns, means, precision="highest"))
