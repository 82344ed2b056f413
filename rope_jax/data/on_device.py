"""What the jitted training step does to images: augmentation, mixing, and batches of a set that lies on the device.

What happens to an image is a function of (seed, epoch, example), as on the host.
"""

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8, UInt32, UInt64

from rope_jax.data import augment as host
from rope_jax.data.augment import Augmentation
from rope_jax.data.cuts import cut_and_resize, pack
from rope_jax.data.frames import FRAMES
from rope_jax.data.image_ops import AUGMENTATIONS, Fill, Image, Scalar, erase, in_box
from rope_jax.data.order import places
from rope_jax.data.sources import Images, Streamed


@dataclass(frozen=True)
class Plan:
    """`data.augment` by where it is done.

    Attributes:
        host: what the loader does, in the words of `rope_jax.data.augment`.
        pixels: what the step does to uint8 images.
        erasing: what it does to normalised ones.
    """

    host: str
    pixels: tuple[Augmentation, ...]
    erasing: tuple[Augmentation, ...]


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Plan:
    """Reads `"resized_crop+flip+rand_augment(m=9,mstd=0.5)+erase(p=0.25)"`: names of the host first, then those of this module.

    Raises:
        ValueError: as `rope_jax.data.augment.parse`, and for names in another order.
    """
    parts = [part.strip() for part in text.split("+")]
    ours = [part.partition("(")[0] in AUGMENTATIONS for part in parts]
    first = ours.index(True) if any(ours) else len(parts)
    before = "+".join(parts[:first]) or "none"
    known = [*host.FRAMES, *host.AUGMENTATIONS]
    for part in parts[first:]:
        name = part.partition("(")[0]
        if name in known:
            raise ValueError(f"augmentation {text!r}: {name} is done by the loader, so it stands before {parts[first].partition('(')[0]}")
    for part in parts[:first]:
        if part != "none" and part.partition("(")[0] not in known:
            raise ValueError(f"augmentation {part!r} is unknown; known are none, {', '.join([*known, *AUGMENTATIONS])}")
    if first and any(ours) and "none" in parts:
        raise ValueError(f"augmentation {text!r}: none stands alone")
    host.parse(before)
    chain = tuple(host.parse_one(part, AUGMENTATIONS) for part in parts[first:])
    split = next((place for place, one in enumerate(chain) if one.name == "erase"), len(chain))
    if any(one.name != "erase" for one in chain[split:]):
        raise ValueError(f"augmentation {text!r}: erase is done to normalised images, so it stands last")
    plan = Plan(before, chain[:split], chain[split:])
    jax.eval_shape(lambda images, keys: apply(images, keys, plan.pixels, (0, 0, 0)), *_shapes(jnp.uint8))  # refuses options out of range
    jax.eval_shape(lambda images, keys: apply_erasing(images, keys, plan.erasing), *_shapes(jnp.float32))
    return plan


def _shapes(dtype: Any) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((1, 8, 8, 3), dtype), jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))


def example_keys(seed: int | UInt32[Array, ""], epoch: Int[Array, " B"], index: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key for each example of a batch, a function of (seed, epoch, index)."""
    base = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"augmentation"))
    return jax.vmap(lambda epoch, index: jax.random.fold_in(jax.random.fold_in(base, epoch), index))(epoch, index)


def apply(
    images: UInt8[Array, "B H W 3"], keys: Key[Array, " B"], augmentations: Sequence[Augmentation], fill: Fill
) -> UInt8[Array, "B H W 3"]:
    """Applies augmentations of uint8 images in their order.

    Args:
        images: uint8 [B, H, W, 3].
        keys: from `example_keys`.
        augmentations: `Plan.pixels`.
        fill: colour of what comes in from outside; timm takes the mean of the data.
    """
    for place, one in enumerate(augmentations):
        function, options = AUGMENTATIONS[one.name], dict(one.options)
        mapped = lambda image, key, place=place, function=function, options=options: function(
            image, jax.random.fold_in(key, place), fill, **options
        )
        images = jax.vmap(mapped)(images, keys)
    return images


def apply_erasing(
    images: Float[Array, "B H W 3"], keys: Key[Array, " B"], augmentations: Sequence[Augmentation]
) -> Float[Array, "B H W 3"]:
    """Applies random erasing to normalised images; arguments as in `apply`, augmentations being `Plan.erasing`."""
    for place, one in enumerate(augmentations):
        mapped = lambda image, key, place=place, one=one: erase(
            image, jax.random.fold_in(key, zlib.crc32(b"erase") + place), **dict(one.options)
        )
        images = jax.vmap(mapped)(images, keys)
    return images


def mix(
    images: Float[Array, "B H W 3"],
    key: Key[Array, ""],
    *,
    mixup: float,
    cutmix: float,
    prob: float = 1.0,
    switch_prob: float = 0.5,
    enabled: Bool[Array, ""] | bool = True,
) -> tuple[Float[Array, "B H W 3"], Scalar]:
    """Mixup or cutmix of a batch with itself in reverse order, with one draw for the whole batch, as timm's "batch" mode.

    Args:
        images: [B, H, W, 3].
        key: a scalar key.
        mixup: alpha of the Beta distribution of the share, 0 for no mixup; cutmix likewise, whose share is then that of the pixels.
        cutmix: see there; one of the two is above 0.
        prob: that anything is mixed.
        switch_prob: that it is cutmix, where both are above 0.
        enabled: False to mix nothing.

    Returns:
        The mixed images, and the share of each image's own label; the rest belongs to the label in reverse order.
    """
    wanted, switch, share_key, place = jax.random.split(key, 4)
    cutting = jax.random.bernoulli(switch, switch_prob if mixup > 0 and cutmix > 0 else float(cutmix > 0))
    alpha = jnp.where(cutting, cutmix, mixup)
    share = jax.random.beta(share_key, alpha, alpha)
    share = jnp.where(jax.random.bernoulli(wanted, prob) & enabled, share, 1.0)
    height, width = images.shape[1:3]
    tall, wide = (jnp.floor(side * jnp.sqrt(1 - share)) for side in (height, width))
    y, x = jnp.floor(jax.random.uniform(place, (2,)) * jnp.array((height, width)))
    top, left = y - tall // 2, x - wide // 2
    inside = in_box((height, width), top, left, y + tall // 2, x + wide // 2)
    weight = jnp.where(cutting, 1.0 - inside, share)
    mixed = weight[..., None] * images + (1 - weight[..., None]) * images[::-1]
    return mixed, weight.mean()


class Places(Iterator[dict[str, np.ndarray]]):
    """The training batches of a set that lies on the device: which examples there are, and the loader's draws about them. See `take`.

    The stream is that of `rope_jax.data.batches`, bit for bit.
    """

    skipped: frozenset[int] = frozenset()  # images that could not be used: none, they are all in memory

    def __init__(
        self,
        images: Images | Streamed,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        augment: str = "none",
        repeats: int = 1,
        shard: tuple[int, int] = (0, 1),
    ):
        """Arguments as in `rope_jax.data.batches`; ValueError for sets that are not in memory, and for augmentations not of `_OF_HOST`."""
        if not isinstance(images, Images):
            raise ValueError(f"on_device=True, but {images.name} is too large to lie in memory: set it to False")
        self._augmentations, self._size = host.parse(augment), images.size
        if others := [one.name for one in self._augmentations if one.name not in _OF_HOST]:
            raise ValueError(
                f"on_device=True goes with {', '.join(_OF_HOST)} and what the step does, not with {others[0]}: set it to False"
            )
        if self._augmentations and self._augmentations[0].name in FRAMES:
            self._boxes(self._augmentations[0], np.zeros(1, np.uint64))  # refuses options that the device has not
        self._count, self._seed, self._step = len(images.labels), seed, start_step
        self._places = functools.partial(places, batch_size=batch_size, seed=seed, count=self._count, repeats=repeats, shard=shard)
        self._total = self._count * repeats

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns `epoch` and `index` int32 [b], as `rope_jax.data.batches`, and `draws` uint32 [b, augmentations, 2], high words first."""
        epochs, indices = self._places(self._step)
        self._step += 1
        draws = np.empty((len(indices), len(self._augmentations)), np.uint64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            for place, one in enumerate(self._augmentations):
                drawn = host.epoch_draws(self._seed, epoch, self._total, host.stream(place, one))[indices[here]]
                draws[here, place] = self._boxes(one, drawn) if one.name in FRAMES else drawn
        words = np.stack([draws >> np.uint64(32), draws & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
        return {"epoch": epochs.astype(np.int32), "index": indices.astype(np.int32), "draws": words}

    def _boxes(self, frame: Augmentation, draws: UInt64[np.ndarray, " b"]) -> UInt64[np.ndarray, " b"]:
        """What a frame decides, as the device takes it."""
        decide, (height, width) = host.as_frame(frame), self._size
        return np.array([pack(decide(width, height, self._size, draw)) for draw in draws.tolist()], np.uint64)

    def close(self) -> None:
        """There is nothing to end."""


def take(images: UInt8[Array, "n H W 3"], labels: Int[Array, " n"], batch: dict[str, Array], augment: str) -> dict[str, Array]:
    """The batch that the loader would have made, from the whole set on the device.

    Args:
        images: the set, uint8 [n, H, W, 3].
        labels: int32 [n].
        batch: from `Places`.
        augment: as it was given there.

    Returns:
        `image` uint8 [b, H, W, 3], `label`, `epoch` and `index` int32 [b].
    """
    examples = batch["index"] % len(labels)
    pixels = images[examples]
    for place, one in enumerate(host.parse(augment)):
        pixels = jax.vmap(functools.partial(_OF_HOST[one.name], **dict(one.options)))(pixels, batch["draws"][:, place])
    return {"image": pixels, "label": labels[examples], "epoch": batch["epoch"], "index": batch["index"]}


def _crop(image: Image, draw: UInt32[Array, "2"], *, pad: int = 4) -> Image:
    """`rope_jax.data.augment.crop`."""
    count = 2 * pad + 1
    start = (((draw >> 16) * count + (((draw & 0xFFFF) * count) >> 16)) >> 16).astype(jnp.int32)  # draw * count / 2**32 without 64 bits
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return jax.lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape)


def _flip(image: Image, draw: UInt32[Array, "2"], *, p: float = 0.5) -> Image:
    """`rope_jax.data.augment.flip`: the upper 53 bits of the draw against p in units of 2**-53."""
    limit = math.ceil(p * 2**53)
    high, low = draw[0] >> 11, (draw[0] << 21) | (draw[1] >> 11)
    below = (high < limit >> 32) | ((high == limit >> 32) & (low < np.uint32(limit & 0xFFFFFFFF)))
    return jnp.where(below, image[:, ::-1], image)


def _resized_crop(image: Image, draw: UInt32[Array, "2"], **options: float | str) -> Image:
    """`rope_jax.data.frames.resized_crop`; the loader has drawn the box."""
    del options
    return cut_and_resize(image, draw)


_OF_HOST = {"resized_crop": _resized_crop, "crop": _crop, "flip": _flip}
