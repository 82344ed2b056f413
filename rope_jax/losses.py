"""Losses of logits [..., classes] against soft targets [..., classes]: what mixup, cutmix and label smoothing make of labels."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def softmax_loss(logits: Float[Array, "*B K"], targets: Float[Array, "*B K"]) -> Float[Array, ""]:
    """Cross entropy of the softmax, the mean over examples.

    Args:
        logits: [..., classes].
        targets: [..., classes], each row a distribution.

    Returns:
        a number, in nats.
    """
    return optax.softmax_cross_entropy(logits, targets).mean()


def binary_loss(logits: Float[Array, "*B K"], targets: Float[Array, "*B K"]) -> Float[Array, ""]:
    """Cross entropy of one sigmoid a class, the mean over classes and examples; every class with a share above 0 is a full target.

    As DeiT-III trains (arXiv 2204.07118): both classes of a mixed image are there.

    Args:
        logits: [..., classes].
        targets: [..., classes], without label smoothing, which would make every class a target.

    Returns:
        a number, in nats.
    """
    return optax.sigmoid_binary_cross_entropy(logits, (targets > 0).astype(logits.dtype)).mean()


LOSSES = {"softmax": softmax_loss, "binary": binary_loss}


def soft_targets(first: Array, second: Array, share: Float[Array, ""] | float, classes: int, smoothing: float) -> Float[Array, "B K"]:
    """Targets of examples that are mixed: `share` of the first label and the rest of the second, both smoothed.

    Args:
        first: int [B], 0 to classes - 1.
        second: int [B], likewise.
        share: of the first, 0 to 1.
        classes: number of classes.
        smoothing: in [0, 1): the part of each target that is spread evenly over all classes.

    Returns:
        float32 [B, classes], rows of sum 1.
    """
    first, second = (jax.nn.one_hot(labels, classes, dtype=jnp.float32) for labels in (first, second))
    return optax.smooth_labels(share * first + (1 - share) * second, smoothing)
