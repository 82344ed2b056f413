"""Images in the jitted step: normalisation, and augmentation of one image or a batch.

Augmentations are those of timm, torchvision and Pillow, equal to Pillow's up to the rounding of
single pixels. RandAugment does not compute its fifteen operations: each is one affine warp, one
table of 256 entries per channel and one blend with another picture, of which all but the drawn ones
are identities.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8, UInt32

from rope_jax.names.options import Count, NotNegative, Probability, Range

Image = UInt8[Array, "H W 3"]
Pixels = Int[Array, "H W 3"]
Scalar = Float[Array, ""]
Fill = tuple[int, int, int]

OPERATIONS = (
    "auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add",
    "color", "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x",
    "translate_y",
)  # fmt: skip


def normalise(
    images: UInt8[Array, "*B H W 3"],
    mean: Sequence[float],
    std: Sequence[float],
    extent: Int[Array, "*B 2"] | None = None,
) -> Float[Array, "*B H W 3"]:
    """Returns (images / 255 - mean) / std in float32, and 0 where images are padded.

    Args:
        images: uint8 [..., H, W, 3].
        mean: of each channel, of values in [0, 1].
        std: likewise, above 0.
        extent: rows and columns of each image before padding at the bottom and on the right; None
            for images without padding.
    """
    mean, std = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    images = (images.astype(jnp.float32) / 255 - mean) / std
    if extent is None:
        return images
    rows, columns = jnp.indices(images.shape[-3:-1])
    inside = (rows < extent[..., :1, None]) & (columns < extent[..., 1:, None])
    return jnp.where(inside[..., None], images, 0)


def rand_augment(
    image: Image,
    key: Key[Array, ""],
    fill: Fill,
    *,
    n: Count = 2,
    m: Annotated[float, Range(low=0, high=10)] = 9.0,
    mstd: NotNegative = 0.5,
    p: Probability = 0.5,
    inc: bool = True,
    interpolation: Literal["bilinear", "bicubic", "random"] = "random",
) -> Image:
    """RandAugment (arXiv 1909.13719) in timm's form: `rand-m9-mstd0.5-inc1` with the defaults.

    Args:
        image: uint8 [H, W, 3].
        key: a scalar key.
        fill: colour of pixels that a warp takes from outside the image.
        n: number of successive operations, each drawn from all fifteen.
        m: magnitude, 0 to 10.
        mstd: standard deviation of the magnitude, which is then clipped to 0 to 10.
        p: probability that a drawn operation is applied.
        inc: True if posterize, solarize and the enhancements grow with the magnitude.
        interpolation: of the warps: "bilinear", "bicubic", or "random" for either at random.
    """

    def layer(image: Image, key: Key[Array, ""]) -> tuple[Image, None]:
        choice, chance, size, sign, kernel = jax.random.split(key, 5)
        drawn = jax.random.randint(choice, (), 0, len(OPERATIONS))
        operation = jnp.where(jax.random.bernoulli(chance, p), drawn, -1)
        level = jnp.clip(m + mstd * jax.random.normal(size), 0, 10) / 10
        signed = jnp.where(jax.random.bernoulli(sign), level, -level)
        cubic = jnp.asarray(interpolation == "bicubic")
        if interpolation == "random":
            cubic = jax.random.bernoulli(kernel)
        return operate(image, operation, level, signed, fill, cubic, inc=inc), None

    # A scan, because XLA would fuse the operations and recompute the first for each pixel that the
    # second reads.
    return jax.lax.scan(layer, image, jax.random.split(key, n))[0]


def operate(
    image: Image,
    operation: Int[Array, ""],
    level: Scalar,
    signed: Scalar,
    fill: Fill,
    cubic: Bool[Array, ""],
    *,
    inc: bool = True,
) -> Image:
    """One operation of RandAugment.

    Args:
        image: uint8 [H, W, 3].
        operation: index into `OPERATIONS`; any other number changes nothing.
        level: 0 to 1, magnitude / 10.
        signed: the level or its negative, for operations with a sign.
        fill: see `rand_augment`.
        cubic: True if warps interpolate bicubically.
        inc: see `rand_augment`.
    """

    def is_any(*names: str) -> Bool[Array, ""]:
        return jnp.isin(operation, jnp.array([OPERATIONS.index(name) for name in names]))

    def scale_level(scale: int) -> Int[Array, ""]:
        return jnp.floor(level * scale).astype(jnp.int32)

    height, width, _ = image.shape
    # The warp, as Pillow's AFFINE: the position in the input of each position in the output.
    angle = jnp.where(is_any("rotate"), -jnp.radians(30 * signed), 0.0)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    right = (1 - cos) * width / 2 - sin * height / 2
    right = jnp.where(is_any("translate_x"), 0.45 * width * signed, right)
    down = (1 - cos) * height / 2 + sin * width / 2
    down = jnp.where(is_any("translate_y"), 0.45 * height * signed, down)
    shear_x = jnp.where(is_any("shear_x"), 0.3 * signed, sin)
    shear_y = jnp.where(is_any("shear_y"), 0.3 * signed, -sin)
    matrix = (cos, shear_x, right, shear_y, cos, down)
    pixels = warp(image.astype(jnp.int32), matrix, fill, cubic)
    # The table.
    values = jnp.arange(256)[:, None]
    bits = 4 - scale_level(4) if inc else scale_level(4)
    threshold = 256 - scale_level(256) if inc else scale_level(256)
    counts = histogram(image)
    table = jnp.broadcast_to(values, (256, 3))
    for name, entries in (
        ("auto_contrast", _stretch_table(counts)),
        ("equalize", _equalize_table(counts)),
        ("invert", 255 - values),
        ("posterize", values & ~((1 << (8 - bits)) - 1)),
        ("solarize", jnp.where(values < threshold, values, 255 - values)),
        (
            "solarize_add",
            jnp.where(values < 128, jnp.minimum(values + scale_level(110), 255), values),
        ),
    ):
        table = jnp.where(is_any(name), entries, table)
    pixels = look_up(table, pixels)
    # The blend, as Pillow's ImageEnhance.
    enhancing = is_any("color", "contrast", "brightness", "sharpness")
    factor = jnp.maximum(1 + 0.9 * signed, 0.1) if inc else 1.8 * level + 0.1
    factor = jnp.where(enhancing, factor, 1.0)
    other = _degenerate(image, is_any("color"), is_any("contrast"))
    return blend(jnp.where(is_any("sharpness"), smooth(image), other), pixels, factor)


def warp(pixels: Pixels, matrix: Sequence[Any], fill: Fill, cubic: Bool[Array, ""]) -> Pixels:
    """Pillow's `transform(size, AFFINE, matrix)` with its bilinear or bicubic (a = -1) kernel.

    Args:
        pixels: [H, W, 3], 0 to 255.
        matrix: (a, b, c, d, e, f): the output at (x, y) is the input at (ax + by + c,
            dx + ey + f); the first pixel's centre is (0.5, 0.5).
        fill: colour outside of the input.
        cubic: True for a bicubic kernel.
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

    def interpolate(values: list[Array], place: Array) -> Array:
        """Interpolates between the second and the third of four values in a row."""
        before, first, second, behind = values
        step = second - first
        bend = 2 * (before - first) + second - behind + place * (behind - before - step)
        curve = second - before + place * bend
        return first + place * jnp.where(cubic, curve, step)

    x_place, y_place = (x - 0.5 - left)[..., None], (y - 0.5 - top)[..., None]
    across = [
        interpolate([flat[row * width + column] for column in columns], x_place) for row in rows
    ]
    value = interpolate(across, y_place)
    return jnp.where(inside[..., None], jnp.clip(value, 0, 255).astype(jnp.int32), jnp.array(fill))


def histogram(image: Image) -> Int[Array, "256 3"]:
    """Number of pixels of each value, by channel."""
    count_values = functools.partial(jnp.bincount, length=256)
    return jax.vmap(count_values, in_axes=1, out_axes=1)(image.reshape(-1, 3))


def _stretch_table(counts: Int[Array, "256 3"]) -> Int[Array, "256 3"]:
    """Table of ImageOps.autocontrast: the smallest value to 0, the largest to 255."""
    values = jnp.arange(256)[:, None]
    low = jnp.where(counts > 0, values, 255).min(axis=0)
    high = jnp.where(counts > 0, values, 0).max(axis=0)
    stretched = jnp.clip((values - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, values)


def _equalize_table(counts: Int[Array, "256 3"]) -> Int[Array, "256 3"]:
    """Table of ImageOps.equalize: values by the number of pixels below."""
    values = jnp.arange(256)[:, None]
    last = jnp.where(counts > 0, values, 0).max(axis=0)
    step = (counts.sum(axis=0) - jnp.take_along_axis(counts, last[None], axis=0)[0]) // 255
    below = jnp.cumsum(counts, axis=0) - counts
    equalized = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, equalized, values)


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


def _degenerate(image: Image, color: Bool[Array, ""], contrast: Bool[Array, ""]) -> Pixels:
    """The degenerate image of an enhancement: without colour, without contrast, or black."""
    luma = grey(image)
    mean = jnp.floor(luma.sum() / luma.size + 0.5).astype(jnp.int32)
    return jnp.broadcast_to(jnp.where(color, luma, jnp.where(contrast, mean, 0)), image.shape)


def blend(other: Pixels, pixels: Pixels, factor: Scalar) -> Image:
    """Pillow's blend: 0 is `other`, 1 is `pixels`, and beyond 1 away from `other`."""
    value = other + factor * (pixels - other).astype(jnp.float32)
    return jnp.clip(value, 0, 255).astype(jnp.uint8)


def three_augment(image: Image, key: Key[Array, ""], fill: Fill) -> Image:
    """3-Augment (arXiv 2204.07118): grey, solarized from 128 on, or blurred by 0.1 to 2 pixels."""
    which, width = jax.random.split(key)
    choice = jax.random.randint(which, (), 0, 3)
    pixels = image.astype(jnp.int32)
    blurred = gaussian_blur(image, jax.random.uniform(width, minval=0.1, maxval=2.0))
    solarized = jnp.where(pixels < 128, pixels, 255 - pixels)
    changed = jnp.where(choice == 1, solarized, blurred)
    return jnp.where(choice == 0, grey(image), changed).astype(jnp.uint8)


def gaussian_blur(image: Image, radius: Scalar) -> Pixels:
    """Pillow's GaussianBlur for radii up to 2.

    Three box filters with fractions of a pixel at their ends, first along rows.

    Args:
        image: uint8 [H, W, 3].
        radius: standard deviation in pixels, above 0 and at most 2.
    """
    square = radius**2 / 3
    # 0 or 1 pixel on each side is in the box entirely.
    full = jnp.floor((jnp.sqrt(12 * square + 1) - 1) / 2)
    part = (2 * full + 1) * (full * (full + 1) - 3 * square) / (6 * (square - (full + 1) ** 2))
    # Weights of pixels at distance 0, 1, 2 in units of 2**-24: a weighted sum just fits 32 bits.
    inner = jnp.floor(2**24 / (2 * (full + part) + 1)).astype(jnp.uint32)
    outer = (2**24 - (2 * full.astype(jnp.uint32) + 1) * inner) // 2
    near, far = jnp.where(full > 0, inner, outer), jnp.where(full > 0, outer, 0)

    def box_filter(_: Any, pixels: UInt32[Array, "H W 3"], *, axis: int) -> UInt32[Array, "H W 3"]:
        padded = jnp.pad(pixels, [(2, 2) if k == axis else (0, 0) for k in range(3)], mode="edge")
        left2, left, middle, right, right2 = (
            jax.lax.slice_in_dim(padded, i, i + pixels.shape[axis], axis=axis) for i in range(5)
        )
        return (inner * middle + near * (left + right) + far * (left2 + right2) + 2**23) >> 24

    pixels = image.astype(jnp.uint32)
    # In loops: XLA would fuse all six filters into one and compute the first 5**5 times.
    for axis in (1, 0):
        pixels = jax.lax.fori_loop(0, 3, functools.partial(box_filter, axis=axis), pixels)
    return pixels.astype(jnp.int32)


def color_jitter(
    image: Image,
    key: Key[Array, ""],
    fill: Fill,
    *,
    brightness: Probability = 0.3,
    contrast: Probability = 0.3,
    saturation: Probability = 0.3,
) -> Image:
    """torchvision's ColorJitter without hue.

    Three enhancements in random order, each by a factor of U(1 - x, 1 + x).
    """
    order, sizes = jax.random.split(key)
    strengths = jnp.array((brightness, contrast, saturation))
    factors = 1 + jax.random.uniform(sizes, (3,), minval=-1) * strengths
    for which in jax.random.permutation(order, 3):
        other = _degenerate(image, which == 2, which == 1)
        image = blend(other, image.astype(jnp.int32), factors[which])
    return image


def erase(
    image: Float[Array, "H W 3"], key: Key[Array, ""], *, p: Probability = 0.25
) -> Float[Array, "H W 3"]:
    """Random erasing (arXiv 1708.04896) in timm's "pixel" mode.

    A box of a normalised image becomes standard normal noise.

    Args:
        image: [H, W, 3], normalised.
        key: a scalar key.
        p: probability. The box has 0.02 to 1/3 of the area and an aspect of 0.3 to 1/0.3; the
            first of ten draws that fits is taken.
    """
    height, width, _ = image.shape
    chance, size, shape, place, noise = jax.random.split(key, 5)
    area = height * width * jax.random.uniform(size, (10,), minval=0.02, maxval=1 / 3)
    aspect = jnp.exp(jax.random.uniform(shape, (10,), minval=np.log(0.3), maxval=-np.log(0.3)))
    tall, wide = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
    fits = (tall < height) & (wide < width)
    first = jnp.argmax(fits)
    down, right = jax.random.uniform(place, (2,))
    tall, wide = tall[first], wide[first]
    top = jnp.floor(down * (height - tall + 1))
    left = jnp.floor(right * (width - wide + 1))
    inside = in_box(image.shape[:2], top, left, top + tall, left + wide)
    erased = inside & fits[first] & jax.random.bernoulli(chance, p)
    return jnp.where(erased[..., None], jax.random.normal(noise, image.shape, image.dtype), image)


def in_box(
    size: tuple[int, ...], top: Any, left: Any, bottom: Any, right: Any
) -> Bool[Array, "H W"]:
    """Mask of the pixels in the box from (top, left) to before (bottom, right)."""
    y, x = jnp.arange(size[0])[:, None], jnp.arange(size[1])
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def example_keys(
    seed: int | UInt32[Array, ""], epoch: Int[Array, " B"], index: Int[Array, " B"]
) -> Key[Array, " B"]:
    """One key for each example of a batch, a function of (seed, epoch, index).

    Args:
        seed: of the run.
        epoch: int32 [B], from the batch.
        index: int32 [B], from the batch.
    """
    base = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"augmentation"))

    def example_key(epoch: Int[Array, ""], index: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(base, epoch), index)

    return jax.vmap(example_key)(epoch, index)


ERASING = zlib.crc32(b"erase")  # number of the first augmentation of normalised images


def apply(
    images: Shaped[Array, "B H W 3"],
    keys: Key[Array, " B"],
    augmentations: Sequence[Callable[..., Shaped[Array, "H W 3"]]],
    *,
    first: int = 0,
    **options: Any,
) -> Shaped[Array, "B H W 3"]:
    """Applies augmentations of images in their order.

    Args:
        images: uint8 [B, H, W, 3], or normalised.
        keys: from `example_keys`.
        augmentations: `AugmentSplit.pixels`, or `AugmentSplit.erasing`.
        first: number of the first, from which each has its own keys: `ERASING` for `erasing`.
        **options: of all augmentations: for pixels `fill`, the colour outside of a warped image;
            timm uses the mean of the data.
    """
    for number, augmentation in enumerate(augmentations, first):
        numbered = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        images = jax.vmap(functools.partial(augmentation, **options))(images, numbered)
    return images
