"""Loss and accuracy of the classes of pixels, from logits of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

from rope_jax.models.heads.maps import resize_maps

IGNORED = 255
"""The label of pixels that belong to no class."""


def pixel_loss(
    logits: Float[Array, "B h w K"], labels: UInt8[Array, "B H W"], *, divisor: str = "all"
) -> Float[Array, ""]:
    """Cross entropy of the softmax of resized logits, in nats.

    >>> labels = jnp.uint8([[[0, 255]]])
    >>> [round(float(pixel_loss(jnp.zeros((1, 1, 1, 4)), labels, divisor=n)), 4)
    ...  for n in ("all", "valid")]
    [0.6931, 1.3863]

    The resized logits and their softmax are recomputed in the backward pass: they are the largest
    arrays of a step, 16 times as large as the logits.

    Args:
        logits: of any size.
        labels: 0 to K - 1, or 255 for pixels without a class.
        divisor: of the sum over pixels with a class: the number of "all" pixels (mmsegmentation) or
            that of the "valid" ones (Segmenter).
    """

    @jax.checkpoint
    def total(logits: Float[Array, "B h w K"]) -> Float[Array, ""]:
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        full = resize_maps(wide, labels.shape[1:])
        losses = optax.softmax_cross_entropy_with_integer_labels(full, jnp.where(valid, labels, 0))
        return jnp.where(valid, losses, 0).sum()

    valid = labels != IGNORED
    count = valid.sum() if divisor == "valid" else labels.size
    return total(logits) / jnp.maximum(count, 1)


def pixel_accuracy(
    logits: Float[Array, "B h w K"], labels: UInt8[Array, "B H W"]
) -> Float[Array, ""]:
    """The fraction of the logits' cells whose class is that of the pixel at their centre.

    It is for progress in training only: no pixel's own logits are computed.

    >>> logits = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])
    >>> float(pixel_accuracy(logits, jnp.uint8([[[0, 0, 0, 0]]])))
    0.5

    Args:
        logits: of any size.
        labels: 0 to K - 1, or 255 for pixels without a class, which do not count.
    """
    rows, columns = (
        ((np.arange(n) + 0.5) * size / n).astype(int)
        for n, size in zip(logits.shape[1:3], labels.shape[1:], strict=True)
    )
    labels = labels[:, rows[:, None], columns]
    right = (logits.argmax(-1) == labels).sum()
    return right / jnp.maximum((labels != IGNORED).sum(), 1)
