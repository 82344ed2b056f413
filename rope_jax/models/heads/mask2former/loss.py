"""Mask2Former's loss: queries are matched with classes, and masks compared at sampled points.

Targets are the classes that occur in an image, each with the mask of its pixels, which is read from
the map of labels where it is needed. A label of 255 is in no mask.

Source: Cheng et al., arXiv 2112.01527, section 3.3, and facebookresearch/Mask2Former; the choice of
points is PointRend's (Kirillov et al., arXiv 1912.08193, section 3).
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from rope_jax.models.deformable import find_corners, gather_sum
from rope_jax.models.heads.mask2former.decoder import mask_logits
from rope_jax.models.heads.matching import match_layers
from rope_jax.system.sharding import over_batch

CLASS, CROSS_ENTROPY, DICE = 2.0, 5.0, 5.0
"""Weights of the parts of the cost of a match, and of the loss."""
NO_OBJECT = 0.1
"""Weight of queries without a target in the loss of classes."""
OVERSAMPLED, UNCERTAIN = 3, 0.75
"""Candidates for each point, and the fraction of points that are the least certain candidates."""


def find_targets(
    labels: UInt8[Array, "B H W"], classes: int, rows: int
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
    """Finds the classes that occur in each image, in ascending order.

    >>> found, real = find_targets(jnp.uint8([[[3, 255, 1]]]), 5, 3)
    >>> found[0, :2].tolist(), real.tolist()
    ([1, 3], [[True, True, False]])

    Args:
        labels: 0 to classes - 1, or 255.
        classes: number of classes.
        rows: M, of which those of classes that do not occur are padding. With more classes than
            that, the last ones are left out.

    Returns:
        The class of each row, and whether it occurs.
    """
    occurs = (labels[..., None] == jnp.arange(classes)).any(axis=(1, 2))
    order = jnp.argsort(~occurs, axis=1, stable=True)[:, :rows]
    return order, jnp.take_along_axis(occurs, order, axis=1)


def sample_maps(
    maps: Float[Array, "B h w C"], points: Float[Array, "B P N 2"]
) -> Float[Array, "B P C"]:
    """Bilinear values of maps at points, as torch's `grid_sample` with align_corners=False.

    >>> sample_maps(jnp.array([2.0, 4.0]).reshape(1, 1, 2, 1), jnp.array([[[[0.5, 0.5]]]])).item()
    3.0

    Args:
        maps: of any size; 0 outside.
        points: x and y, from 0 at one border to 1 at the other. N is 1 for points of all channels,
            or C for points of each channel.
    """
    batch, height, width, channels = maps.shape
    values = maps.reshape(batch, height * width, points.shape[2], -1)
    return gather_sum(values, *_corners(points, (height, width))).reshape(batch, -1, channels)


def sample_masks(
    labels: UInt8[Array, "B H W"], classes: Int[Array, "B M"], points: Float[Array, "B P N 2"]
) -> Float[Array, "B P M"]:
    """Bilinear values of the masks of classes at points: `sample_maps` of `labels == class`.

    Args:
        labels: of the pixels.
        classes: of the masks.
        points: as in `sample_maps`, with N = 1 or M.
    """
    indices, weights = _corners(points, labels.shape[1:])
    read = jax.vmap(lambda pixels, at: pixels.at[at].get(mode="promise_in_bounds"))
    values = read(labels.reshape(len(labels), -1), indices)
    return jnp.where(values == classes[:, None, :, None], weights, 0).sum(axis=-1)


def _corners(
    points: Float[Array, "B P N 2"], size: tuple[int, int]
) -> tuple[Int[Array, "B P N 4"], Float[Array, "B P N 4"]]:
    """The four pixels around each point, and their weights."""
    ones = jnp.ones((*points.shape[:3], 1, 1), points.dtype)
    return find_corners(points[..., None, None, :], ones, [size])


def dice_loss(
    overlap: Float[Array, "..."], first: Float[Array, "..."], second: Float[Array, "..."]
) -> Float[Array, "..."]:
    """One minus the fraction of two masks that they have in common.

    Args:
        overlap: sum over points of the masks' product.
        first, second: sums over points of either mask.
    """
    return 1 - (2 * overlap + 1) / (first + second + 1)


def matching_costs(
    classes: Float[Array, "B Q K1"],
    masks: Float[Array, "B h w Q"],
    labels: UInt8[Array, "B H W"],
    targets: Int[Array, "B M"],
    points: Float[Array, "B P 1 2"],
) -> Float[Array, "B M Q"]:
    """The cost of each target's match with each query.

    Args:
        classes: logits of the queries' classes, the last of which is that of no object.
        masks: logits of their masks.
        labels: of the pixels.
        targets: classes.
        points: of an image, the same for all of its masks.
    """
    multiply = functools.partial(jnp.einsum, "bpm,bpq->bmq", precision="highest")
    logits, expected = sample_maps(masks, points), sample_masks(labels, targets, points)
    probabilities = jax.nn.softmax(classes.astype(logits.dtype)).swapaxes(1, 2)
    probability = jnp.take_along_axis(probabilities, targets[..., None], axis=1)
    # softplus(x) - x t is the cross entropy of the logit x with the target t.
    entropy = jax.nn.softplus(logits).sum(1)[:, None] - multiply(expected, logits)
    inside = jax.nn.sigmoid(logits)
    areas = (inside.sum(1)[:, None], expected.sum(1)[..., None])
    dice = dice_loss(multiply(expected, inside), *areas)
    return CROSS_ENTROPY * entropy / points.shape[1] + DICE * dice - CLASS * probability


def class_loss(
    logits: Float[Array, "B Q K1"],
    targets: Int[Array, "B M"],
    real: Bool[Array, "B M"],
    queries: Int[Array, "B M"],
) -> Float[Array, ""]:
    """The weighted mean of the cross entropy of all queries with their targets, or no object.

    Args:
        logits: of classes, the last of which is that of no object.
        targets: classes.
        real: False for rows that are padding.
        queries: matched with the targets.
    """
    batch, count, outputs = logits.shape
    at = (jnp.arange(batch)[:, None], jnp.where(real, queries, count))
    expected = jnp.full((batch, count), outputs - 1).at[at].set(targets, mode="drop")
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    losses = optax.softmax_cross_entropy_with_integer_labels(wide, expected)
    weights = jnp.where(expected == outputs - 1, NO_OBJECT, 1)
    return (losses * weights).sum() / weights.sum()


def uncertain_points(
    masks: Float[Array, "B h w M"], count: int, key: Key[Array, ""]
) -> Float[Array, "B P M 2"]:
    """Points of each mask: three quarters are the least certain of three times as many.

    Args:
        masks: logits, which are least certain near 0.
        count: P, of the points of a mask.
        key: of the draw.
    """
    keys, kept = jax.random.split(key), int(UNCERTAIN * count)
    batch, channels = masks.shape[0], masks.shape[-1]

    def draw(key: Key[Array, ""], count: int) -> Float[Array, "B M n 2"]:
        return jax.random.uniform(key, (batch, channels, count, 2), masks.dtype)

    def least_certain(candidates: tuple[Array, Array], _: None) -> Float[Array, "_B M n 2"]:
        points, certainty = candidates
        _, chosen = jax.lax.top_k(-certainty, kept)
        return jnp.take_along_axis(points, chosen[..., None], axis=2)

    many = draw(keys[0], OVERSAMPLED * count)
    certainty = jnp.abs(sample_maps(masks, many.swapaxes(1, 2))).swapaxes(1, 2)
    # Each device chooses of its own images: XLA would gather the numbers of all.
    least = over_batch(least_certain, (many, certainty), None)
    return jnp.concatenate([least, draw(keys[1], count - kept)], axis=2).swapaxes(1, 2)


def mask_loss(
    masks: Float[Array, "B h w M"],
    labels: UInt8[Array, "B H W"],
    targets: Int[Array, "B M"],
    real: Bool[Array, "B M"],
    points: Float[Array, "B P M 2"],
) -> Float[Array, ""]:
    """Cross entropy and dice loss of matched masks, as means over the targets of the batch.

    Args:
        masks: logits of the masks of the matched queries.
        labels: of the pixels.
        targets: classes.
        real: False for rows that are padding.
        points: of each mask.
    """
    logits, expected = sample_maps(masks, points), sample_masks(labels, targets, points)
    entropy = optax.sigmoid_binary_cross_entropy(logits, expected).mean(axis=1)
    inside = jax.nn.sigmoid(logits)
    dice = dice_loss(*(x.sum(axis=1) for x in (inside * expected, inside, expected)))
    losses = jnp.where(real, CROSS_ENTROPY * entropy + DICE * dice, 0)
    return losses.sum() / jnp.maximum(real.sum(), 1)


def set_loss(
    classes: Float[Array, "layers B Q K1"],
    embeddings: Float[Array, "layers B Q C"],
    pixels: Float[Array, "B h w C"],
    labels: UInt8[Array, "B H W"],
    *,
    points: int,
    key: Key[Array, ""],
) -> Float[Array, ""]:
    """The sum over layers of the losses of classes and masks, each layer with a separate match.

    Masks are computed from embeddings and pixels for one layer at a time, and once more in the
    backward pass.

    Args:
        classes: logits of the queries' classes, the last of which is that of no object.
        embeddings: of their masks.
        pixels: features of pixels.
        labels: 0 to K1 - 2, or 255.
        points: number of points at which masks are compared.
        key: of their draw.
    """
    layers, batch, queries, outputs = classes.shape
    targets, real = find_targets(labels, outputs - 1, min(outputs - 1, queries))
    keys = jax.random.split(key, (2, layers))

    def costs(layer: tuple[Array, Array, Array]) -> Float[Array, "B M Q"]:
        layer_classes, embedding, key = layer
        sample = jax.random.uniform(key, (batch, points, 1, 2))
        return matching_costs(
            layer_classes, mask_logits(embedding, pixels), labels, targets, sample
        )

    match_costs = jax.lax.map(costs, jax.lax.stop_gradient((classes, embeddings, keys[0])))
    matches = match_layers(jax.lax.stop_gradient(match_costs), real)

    @jax.checkpoint
    def loss(layer: tuple[Array, Array, Array, Array]) -> Float[Array, ""]:
        layer_classes, embedding, queries, key = layer
        masks = mask_logits(jnp.take_along_axis(embedding, queries[..., None], axis=1), pixels)
        sample = uncertain_points(jax.lax.stop_gradient(masks), points, key)
        sample = jax.lax.stop_gradient(sample)
        value = CLASS * class_loss(layer_classes, targets, real, queries)
        return value + mask_loss(masks, labels, targets, real, sample)

    return jax.lax.map(loss, (classes, embeddings, matches, keys[1])).sum()
