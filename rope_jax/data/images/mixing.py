"""Mixup and cutmix of a training batch, in the jitted step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from rope_jax.data.images import device


def mix(
    images: Float[Array, "B H W 3"],
    key: Key[Array, ""],
    *,
    mixup: float,
    cutmix: float,
    prob: float = 1.0,
    switch_prob: float = 0.5,
    enabled: Bool[Array, ""] | bool = True,
    drawn_at: tuple[int, int] | None = None,
) -> tuple[Float[Array, "B H W 3"], Float[Array, ""]]:
    """Mixup or cutmix of a batch with itself in reverse order: timm's "batch" mode.

    One draw for the whole batch (arXiv 1710.09412, 1905.04899). `mix_groups` has one for each of
    several groups.

    Args:
        images: [B, H, W, 3].
        key: a scalar key.
        mixup: alpha of the Beta distribution of the weight of an image; 0 for no mixup.
        cutmix: alpha of the distribution of the fraction of its pixels; 0 for no cutmix. One of the
            two is above 0.
        prob: probability that the batch is mixed.
        switch_prob: probability of cutmix if both are above 0.
        enabled: False to mix nothing.
        drawn_at: the size (height, width) at which the box of cutmix is drawn, before it is scaled
            to the images and rounded down; None for theirs.

    Returns:
        The mixed images, and the weight of each image's own label; the rest belongs to the label in
        reverse order.
    """
    chance, switch, fraction_key, place = jax.random.split(key, 4)
    cutmix_prob = switch_prob if mixup > 0 and cutmix > 0 else float(cutmix > 0)
    cutting = jax.random.bernoulli(switch, cutmix_prob)
    alpha = jnp.where(cutting, cutmix, mixup)
    fraction = jax.random.beta(fraction_key, alpha, alpha)
    fraction = jnp.where(jax.random.bernoulli(chance, prob) & enabled, fraction, 1.0)
    size = images.shape[1:3]
    height, width = drawn_at or size
    tall, wide = (jnp.floor(side * jnp.sqrt(1 - fraction)) for side in (height, width))
    y, x = jnp.floor(jax.random.uniform(place, (2,)) * jnp.array((height, width)))
    top, left = y - tall // 2, x - wide // 2
    edges = [top, left, y + tall // 2, x + wide // 2]
    if drawn_at is not None:
        sides = zip(edges, size * 2, drawn_at * 2, strict=True)
        edges = [jnp.floor(edge * side / drawn) for edge, side, drawn in sides]
    inside = device.in_box(size, *edges)
    weight = jnp.where(cutting, 1.0 - inside, fraction)
    mixed = weight[..., None] * images + (1 - weight[..., None]) * images[::-1]
    return mixed, weight.mean()


def mix_groups(
    images: Float[Array, "B H W 3"],
    labels: Int[Array, " B"],
    key: Key[Array, ""],
    groups: int,
    **options: Any,
) -> tuple[Float[Array, "B H W 3"], Int[Array, " B"], Float[Array, "B 1"]]:
    """`mix` within each of several groups, as official scripts mix within the batch of each GPU.

    Groups are consecutive: the first holds images 0 to B / groups - 1.

    Args:
        images: [B, H, W, 3].
        labels: int32 [B].
        key: a scalar key. That of group g is `fold_in(key, g)`; a single group has `key` itself.
        groups: their number, which divides B.
        **options: of `mix`.

    Returns:
        The mixed images, the label of each image's partner, and the weight of its own label.
    """
    keys = key[None]
    if groups > 1:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(groups))
    grouped, partners = (x.reshape(groups, -1, *x.shape[1:]) for x in (images, labels))
    mixed, fractions = jax.vmap(functools.partial(mix, **options))(grouped, keys)
    fractions = jnp.repeat(fractions, len(images) // groups)[:, None]
    return mixed.reshape(images.shape), partners[:, ::-1].reshape(-1), fractions
