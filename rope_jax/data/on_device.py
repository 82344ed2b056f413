"""Augmentations inside the jitted training step: what happens to an image is a function of (seed, epoch, example), as on the host.

They are those of timm, torchvision and Pillow, equal to Pillow's up to the rounding of single pixels. Each function is of one image and is
mapped over the batch. RandAugment does not compute its fifteen operations: whichever is drawn, it is one affine warp, one table of 256
entries a channel and one blend with another picture, of which all that are not wanted change nothing.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8, UInt32

from rope_jax.data import augment as host
from rope_jax.data.augment import Augmentation
from rope_jax.data.pipeline import places
from rope_jax.data.sources import Images

Image = UInt8[Array, "H W 3"]
Pixels = Int[Array, "H W 3"]
Scalar = Float[Array, ""]
Fill = tuple[int, int, int]

OPERATIONS = (
    "auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color", "contrast", "brightness",
    "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
_INTERPOLATIONS = ("bilinear", "bicubic", "random")


def rand_augment(
    image: Image,
    key: Key[Array, ""],
    fill: Fill,
    *,
    n: int = 2,
    m: float = 9.0,
    mstd: float = 0.5,
    p: float = 0.5,
    inc: bool = True,
    interpolation: str = "random",
) -> Image:
    """RandAugment (arXiv 1909.13719) in timm's form: `rand-m9-mstd0.5-inc1` with the defaults.

    Args:
        image: uint8 [H, W, 3].
        key: a scalar key.
        fill: colour of what a warp brings in from outside.
        n: operations one after the other, each drawn from all fifteen.
        m: magnitude, 0 to 10.
        mstd: standard deviation of the magnitude, which is then cut to 0 to 10.
        p: probability that a drawn operation is applied.
        inc: whether posterize, solarize and the enhancements grow with the magnitude.
        interpolation: of the warps: "bilinear", "bicubic", or "random" for either by chance.
    """
    if interpolation not in _INTERPOLATIONS:
        raise ValueError(f"rand_augment(interpolation={interpolation}) is not one of {', '.join(_INTERPOLATIONS)}")
    if n < 1 or not 0 <= m <= 10 or mstd < 0 or not 0 <= p <= 1:
        raise ValueError(f"rand_augment(n={n},m={m},mstd={mstd},p={p}): n is at least 1, m 0 to 10, mstd at least 0, p 0 to 1")
    for layer in jax.random.split(key, n):
        which, wanted, size, sign, kernel = jax.random.split(layer, 5)
        operation = jnp.where(jax.random.bernoulli(wanted, p), jax.random.randint(which, (), 0, len(OPERATIONS)), -1)
        level = jnp.clip(m + mstd * jax.random.normal(size), 0, 10) / 10
        signed = jnp.where(jax.random.bernoulli(sign), level, -level)
        cubic = jax.random.bernoulli(kernel) if interpolation == "random" else jnp.asarray(interpolation == "bicubic")
        image = operate(image, operation, level, signed, fill, cubic, inc=inc)
    return image


def operate(
    image: Image, operation: Int[Array, ""], level: Scalar, signed: Scalar, fill: Fill, cubic: Bool[Array, ""], *, inc: bool = True
) -> Image:
    """One operation of RandAugment.

    Args:
        image: uint8 [H, W, 3].
        operation: its place in `OPERATIONS`; any other number changes nothing.
        level: 0 to 1, magnitude / 10.
        signed: the same or its negative, for operations that go either way.
        fill: see `rand_augment`, like `inc`.
        cubic: whether warps interpolate bicubically.
        inc: see there.
    """
    chosen = lambda *names: jnp.isin(operation, jnp.array([_NUMBER[name] for name in names]))
    height, width, _ = image.shape
    # The warp, as Pillow's AFFINE: the place in the input of each place in the output.
    angle = jnp.where(chosen("rotate"), -jnp.radians(30 * signed), 0.0)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    right = jnp.where(chosen("translate_x"), 0.45 * width * signed, (1 - cos) * width / 2 - sin * height / 2)
    down = jnp.where(chosen("translate_y"), 0.45 * height * signed, (1 - cos) * height / 2 + sin * width / 2)
    shear = lambda name, other: jnp.where(chosen(name), 0.3 * signed, other)
    pixels = warp(image.astype(jnp.int32), (cos, shear("shear_x", sin), right, shear("shear_y", -sin), cos, down), fill, cubic)
    # The table.
    values = jnp.arange(256)[:, None]
    whole = lambda scale: jnp.floor(level * scale).astype(jnp.int32)
    bits = 4 - whole(4) if inc else whole(4)
    threshold = 256 - whole(256) if inc else whole(256)
    counts = histogram(image)
    table = jnp.broadcast_to(values, (256, 3))
    for name, entries in (
        ("auto_contrast", _stretched(counts)),
        ("equalize", _equalized(counts)),
        ("invert", 255 - values),
        ("posterize", values & ~((1 << (8 - bits)) - 1)),
        ("solarize", jnp.where(values < threshold, values, 255 - values)),
        ("solarize_add", jnp.where(values < 128, jnp.minimum(values + whole(110), 255), values)),
    ):
        table = jnp.where(chosen(name), entries, table)
    pixels = look_up(table, pixels)
    # The blend, as Pillow's ImageEnhance.
    enhancing = chosen("color", "contrast", "brightness", "sharpness")
    factor = jnp.where(enhancing, jnp.maximum(1 + 0.9 * signed, 0.1) if inc else 1.8 * level + 0.1, 1.0)
    other = _without(image, chosen("color"), chosen("contrast"))
    return blend(jnp.where(chosen("sharpness"), smooth(image), other), pixels, factor)


def warp(pixels: Pixels, matrix: Sequence[Any], fill: Fill, cubic: Bool[Array, ""]) -> Pixels:
    """Pillow's `transform(size, AFFINE, matrix)` with its bilinear or its bicubic (a = -1) kernel; `fill` where it looks outside.

    Args:
        pixels: [H, W, 3], 0 to 255.
        matrix: (a, b, c, d, e, f): the output at (x, y) is the input at (ax + by + c, dx + ey + f); the first pixel's centre is (0.5, 0.5).
        fill: a colour.
        cubic: which kernel.
    """
    height, width, _ = pixels.shape
    a, b, c, d, e, f = matrix
    y, x = jnp.arange(height)[:, None] + 0.5, jnp.arange(width) + 0.5
    x, y = a * x + b * y + c, d * x + e * y + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    left, top = jnp.floor(x - 0.5), jnp.floor(y - 0.5)
    columns = [jnp.clip(left.astype(jnp.int32) + i, 0, width - 1) for i in (-1, 0, 1, 2)]
    rows = [jnp.clip(top.astype(jnp.int32) + i, 0, height - 1) for i in (-1, 0, 1, 2)]
    flat = pixels.reshape(-1, 3).astype(jnp.float32)

    def between(values: list[Array], place: Array) -> Array:  # of four values, from the second to the third
        before, first, second, behind = values
        step = second - first
        curve = second - before + place * (2 * (before - first) + second - behind + place * (behind - before - step))
        return first + place * jnp.where(cubic, curve, step)

    across = [between([flat[row * width + column] for column in columns], (x - 0.5 - left)[..., None]) for row in rows]
    value = between(across, (y - 0.5 - top)[..., None])
    return jnp.where(inside[..., None], jnp.clip(value, 0, 255).astype(jnp.int32), jnp.array(fill))


def histogram(image: Image) -> Int[Array, "256 3"]:
    """How often each value occurs in each channel."""
    return jax.vmap(lambda channel: jnp.zeros(256, jnp.int32).at[channel].add(1), in_axes=1, out_axes=1)(image.reshape(-1, 3))


def _stretched(counts: Int[Array, "256 3"]) -> Int[Array, "256 3"]:
    """Table of ImageOps.autocontrast: the smallest value to 0, the largest to 255."""
    values = jnp.arange(256)[:, None]
    low = jnp.where(counts > 0, values, 255).min(axis=0)
    high = jnp.where(counts > 0, values, 0).max(axis=0)
    return jnp.where(high > low, jnp.clip((values - low) * 255 // jnp.maximum(high - low, 1), 0, 255), values)


def _equalized(counts: Int[Array, "256 3"]) -> Int[Array, "256 3"]:
    """Table of ImageOps.equalize: values by how many pixels are below."""
    values = jnp.arange(256)[:, None]
    last = jnp.where(counts > 0, values, 0).max(axis=0)
    step = (counts.sum(axis=0) - jnp.take_along_axis(counts, last[None], axis=0)[0]) // 255
    below = jnp.cumsum(counts, axis=0) - counts
    return jnp.where(step > 0, jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255), values)


def look_up(table: Int[Array, "256 3"], pixels: Pixels) -> Pixels:
    """Replaces each value by its channel's entry."""
    return jnp.take_along_axis(table, pixels.reshape(-1, 3), axis=0).reshape(pixels.shape)


def grey(image: Image) -> Int[Array, "H W 1"]:
    """Pillow's luma."""
    weighted = image.astype(jnp.int32) * jnp.array((19595, 38470, 7471))
    return (weighted.sum(axis=-1, keepdims=True) + 32768) >> 16


def smooth(image: Image) -> Pixels:
    """Pillow's SMOOTH: the mean of 3 x 3 pixels, the middle one five times; the border stays."""
    pixels = image.astype(jnp.int32)
    height, width, _ = image.shape
    around = sum(pixels[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3))
    inner = (2 * (around + 4 * pixels[1:-1, 1:-1]) + 13) // 26
    return pixels.at[1:-1, 1:-1].set(inner)


def _without(image: Image, color: Bool[Array, ""], contrast: Bool[Array, ""]) -> Pixels:
    """The picture at the other end of an enhancement: without colour, without contrast, or else black."""
    luma = grey(image)
    mean = jnp.floor(luma.sum() / luma.size + 0.5).astype(jnp.int32)
    return jnp.broadcast_to(jnp.where(color, luma, jnp.where(contrast, mean, 0)), image.shape)


def blend(other: Pixels, pixels: Pixels, factor: Scalar) -> Image:
    """Pillow's blend: 0 is `other`, 1 is `pixels`, and beyond 1 away from `other`."""
    value = other + factor * (pixels - other).astype(jnp.float32)
    return jnp.clip(value, 0, 255).astype(jnp.uint8)


def three_augment(image: Image, key: Key[Array, ""], fill: Fill) -> Image:
    """What 3-Augment (arXiv 2204.07118) does between flip and colour jitter: grey, solarized from 128 on, or blurred by 0.1 to 2 pixels."""
    which, width = jax.random.split(key)
    choice = jax.random.randint(which, (), 0, 3)
    pixels = image.astype(jnp.int32)
    blurred = gaussian_blur(image, jax.random.uniform(width, minval=0.1, maxval=2.0))
    solarized = jnp.where(pixels < 128, pixels, 255 - pixels)
    return jnp.where(choice == 0, grey(image), jnp.where(choice == 1, solarized, blurred)).astype(jnp.uint8)


def gaussian_blur(image: Image, radius: Scalar) -> Pixels:
    """Pillow's GaussianBlur for radii up to 2: three box filters with fractions of a pixel at their ends, first along rows.

    Args:
        image: uint8 [H, W, 3].
        radius: standard deviation in pixels, above 0 and at most 2.
    """
    square = radius**2 / 3
    whole = jnp.floor((jnp.sqrt(12 * square + 1) - 1) / 2)  # 0 or 1 pixel on each side is in the box entirely
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * square) / (6 * (square - (whole + 1) ** 2))
    # Weights of pixels at distance 0, 1, 2 in units of 2**-24, so that a weighted sum just fits into 32 bits.
    inner = jnp.floor(2**24 / (2 * (whole + part) + 1)).astype(jnp.uint32)
    outer = (2**24 - (2 * whole.astype(jnp.uint32) + 1) * inner) // 2
    near, far = jnp.where(whole > 0, inner, outer), jnp.where(whole > 0, outer, 0)
    pixels = image.astype(jnp.uint32)
    for axis in (1, 0):
        size = image.shape[axis]
        for _ in range(3):
            left2, left, right, right2 = (jnp.take(pixels, jnp.clip(jnp.arange(size) + i, 0, size - 1), axis=axis) for i in (-2, -1, 1, 2))
            pixels = (inner * pixels + near * (left + right) + far * (left2 + right2) + 2**23) >> 24
    return pixels.astype(jnp.int32)


def color_jitter(
    image: Image, key: Key[Array, ""], fill: Fill, *, brightness: float = 0.3, contrast: float = 0.3, saturation: float = 0.3
) -> Image:
    """torchvision's ColorJitter without hue: three enhancements in random order, each by a factor of U(1 - x, 1 + x)."""
    if not all(0 <= x <= 1 for x in (brightness, contrast, saturation)):
        raise ValueError(f"color_jitter(brightness={brightness},contrast={contrast},saturation={saturation}): each is between 0 and 1")
    order, sizes = jax.random.split(key)
    factors = 1 + jax.random.uniform(sizes, (3,), minval=-1) * jnp.array((brightness, contrast, saturation))
    for which in jax.random.permutation(order, 3):
        other = _without(image, which == 2, which == 1)
        image = blend(other, image.astype(jnp.int32), factors[which])
    return image


def erase(image: Float[Array, "H W 3"], key: Key[Array, ""], *, p: float = 0.25) -> Float[Array, "H W 3"]:
    """Random erasing (arXiv 1708.04896) in timm's "pixel" mode: a box of a normalised image becomes standard normal noise.

    Args:
        image: [H, W, 3], normalised.
        key: a scalar key.
        p: probability. The box has 0.02 to 1/3 of the area and an aspect of 0.3 to 1/0.3; the first of ten draws that fits is taken.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"erase(p={p}) is no probability: p is between 0 and 1")
    height, width, _ = image.shape
    wanted, size, shape, place, noise = jax.random.split(key, 5)
    area = height * width * jax.random.uniform(size, (10,), minval=0.02, maxval=1 / 3)
    aspect = jnp.exp(jax.random.uniform(shape, (10,), minval=np.log(0.3), maxval=-np.log(0.3)))
    tall, wide = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = jnp.argmax(fits)
    down, right = jax.random.uniform(place, (2,))
    top, left = jnp.floor(down * (height - tall[first] + 1)), jnp.floor(right * (width - wide[first] + 1))
    box = _box(image.shape[:2], top, left, top + tall[first], left + wide[first])
    erased = box & fits[first] & jax.random.bernoulli(wanted, p)
    return jnp.where(erased[..., None], jax.random.normal(noise, image.shape, image.dtype), image)


def _box(size: tuple[int, ...], top: Any, left: Any, bottom: Any, right: Any) -> Bool[Array, "H W"]:
    y, x = jnp.arange(size[0])[:, None], jnp.arange(size[1])
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


AUGMENTATIONS: dict[str, Callable[..., Array]] = {
    "rand_augment": rand_augment,
    "three_augment": three_augment,
    "color_jitter": color_jitter,
    "erase": erase,
}


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


def example_keys(seed: int, epoch: Int[Array, " B"], index: Int[Array, " B"]) -> Key[Array, " B"]:
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
    box = _box((height, width), top, left, y + tall // 2, x + wide // 2)
    weight = jnp.where(cutting, 1.0 - box, share)
    mixed = weight[..., None] * images + (1 - weight[..., None]) * images[::-1]
    return mixed, weight.mean()


class Places(Iterator[dict[str, np.ndarray]]):
    """The training batches of a set that lies on the device: which examples there are, and the loader's draws about them. See `take`.

    The stream is that of `rope_jax.data.batches`, bit for bit.
    """

    skipped: frozenset[int] = frozenset()  # images that could not be used: none, they are all in memory

    def __init__(
        self,
        images: Images,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        augment: str = "none",
        repeats: int = 1,
        shard: tuple = (0, 1),
    ):
        """Arguments as in `rope_jax.data.batches`; ValueError for sets that are not in memory, and for augmentations but crop and flip."""
        if not isinstance(images, Images):
            raise ValueError(f"on_device=True, but {images.name} is too large to lie in memory: set it to False")
        self._augmentations = host.parse(augment)
        if others := [one.name for one in self._augmentations if one.name not in _OF_HOST]:
            raise ValueError(
                f"on_device=True goes with {', '.join(_OF_HOST)} and what the step does, not with {others[0]}: set it to False"
            )
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
                draws[here, place] = host.epoch_draws(self._seed, epoch, self._total, host.stream(place, one))[indices[here]]
        words = np.stack([draws >> np.uint64(32), draws & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
        return {"epoch": epochs.astype(np.int32), "index": indices.astype(np.int32), "draws": words}

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


_OF_HOST = {"crop": _crop, "flip": _flip}
