"""Changes of colours in the jitted training step: mmsegmentation's photometric distortion."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from rope_jax.names.options import Probability, Range

Image = UInt8[Array, "H W 3"]
Hsv = tuple[Int[Array, "H W"], Int[Array, "H W"], Int[Array, "H W"]]

_HUES = 180  # of 8-bit images in OpenCV: a step is two degrees
_SHIFT = 12  # OpenCV divides by multiplication with such fractions
_STEPS = np.maximum(np.arange(256), 1)
_PER_VALUE = np.where(np.arange(256) > 0, np.rint((255 << _SHIFT) / _STEPS), 0).astype(np.int32)
_PER_RANGE = np.where(np.arange(256) > 0, np.rint((30 << _SHIFT) / _STEPS), 0).astype(np.int32)


def photometric(
    image: Image,
    key: Key[Array, ""],
    fill: tuple[int, int, int] = (0, 0, 0),
    *,
    brightness: Annotated[float, Range(low=0, high=255)] = 32.0,
    contrast: Probability = 0.5,
    saturation: Probability = 0.5,
    hue: Annotated[int, Range(low=0, high=_HUES)] = 18,
    p: Probability = 0.5,
) -> Image:
    """PhotoMetricDistortion of mmsegmentation 1.2.2.

    Brightness, contrast (here, or at the end, equally often), saturation and hue are changed in
    this order. After each change the image is clipped to 8 bits.

    >>> image = jnp.full((2, 2, 3), 200, jnp.uint8)
    >>> photometric(image, jax.random.key(1), p=0.0)[0, 0].tolist()
    [200, 200, 200]

    Args:
        image: uint8 [H, W, 3].
        key: a scalar key.
        fill: not used.
        brightness: largest value that is added or subtracted.
        contrast: values are multiplied by a factor between 1 - contrast and 1 + contrast.
        saturation: likewise.
        hue: largest rotation of the hue, of 180.
        p: probability of each change.
    """
    return change_colours(image, draw(key, brightness, contrast, saturation, hue, p))


class Changes(NamedTuple):
    """The changes of one image.

    Attributes:
        enabled: True where brightness, contrast, saturation and hue are changed.
        early: True if contrast comes before saturation and hue.
        added: to all values.
        contrast, saturation: factors.
        turn: of the hue, of 180.
    """

    enabled: Bool[Array, "4"]
    early: Bool[Array, ""]
    added: Float[Array, ""]
    contrast: Float[Array, ""]
    saturation: Float[Array, ""]
    turn: Int[Array, ""]


def draw(
    key: Key[Array, ""], brightness: float, contrast: float, saturation: float, hue: int, p: float
) -> Changes:
    """Draws the changes of one image. Arguments as in `photometric`."""
    choice, early, *sizes = jax.random.split(key, 6)
    return Changes(
        enabled=jax.random.bernoulli(choice, p, (4,)),
        early=jax.random.bernoulli(early),
        added=jax.random.uniform(sizes[0], minval=-brightness, maxval=brightness),
        contrast=jax.random.uniform(sizes[1], minval=1 - contrast, maxval=1 + contrast),
        saturation=jax.random.uniform(sizes[2], minval=1 - saturation, maxval=1 + saturation),
        turn=jax.random.randint(sizes[3], (), -hue, max(hue, 1 - hue)),  # as NumPy's, without `hue`
    )


def change_colours(image: Image, changes: Changes) -> Image:
    """Changes the colours of an image."""
    brightness, contrast, saturation, hue = changes.enabled

    def apply_contrast(image: Image, when: Bool[Array, ""]) -> Image:
        return jnp.where(when, _clip(image * changes.contrast), image)

    image = jnp.where(brightness, _clip(image + changes.added), image)
    image = apply_contrast(image, contrast & changes.early)
    hues, saturations, values = to_hsv(image)
    saturated = _clip(saturations * changes.saturation).astype(jnp.int32)
    image = jnp.where(saturation, to_rgb((hues, saturated, values)), image)
    hues, saturations, values = to_hsv(image)
    turned = to_rgb(((hues + changes.turn) % _HUES, saturations, values))
    image = jnp.where(hue, turned, image)
    return apply_contrast(image, contrast & ~changes.early)


def _clip(values: Float[Array, "..."]) -> UInt8[Array, "..."]:
    return jnp.clip(values, 0, 255).astype(jnp.uint8)


def to_hsv(image: Image) -> Hsv:
    """Hue, 0 to 179, saturation and value, 0 to 255, as OpenCV's cvtColor of 8-bit images."""
    red, green, blue = jnp.moveaxis(image.astype(jnp.int32), -1, 0)
    value = jnp.maximum(jnp.maximum(red, green), blue)
    size = value - jnp.minimum(jnp.minimum(red, green), blue)
    half = 1 << (_SHIFT - 1)
    saturation = (size * jnp.asarray(_PER_VALUE)[value] + half) >> _SHIFT
    sixths = jnp.where(
        value == red,
        green - blue,
        jnp.where(value == green, blue - red + 2 * size, red - green + 4 * size),
    )
    hue = (sixths * jnp.asarray(_PER_RANGE)[size] + half) >> _SHIFT
    return jnp.where(hue < 0, hue + _HUES, hue), saturation, value


def to_rgb(hsv: Hsv) -> Image:
    """Inverse of `to_hsv` up to rounding."""
    hue, saturation, value = (x.astype(jnp.float32) for x in hsv)
    saturation = saturation / 255
    sector = jnp.floor(hue * (6 / _HUES))
    place = hue * (6 / _HUES) - sector
    low = value * (1 - saturation)
    falling, rising = value * (1 - saturation * place), value * (1 - saturation * (1 - place))
    sector = (sector.astype(jnp.int32) % 6)[..., None]
    channels = [
        (value, rising, low),
        (falling, value, low),
        (low, value, rising),
        (low, falling, value),
        (rising, low, value),
        (value, low, falling),
    ]
    pixels = [jnp.stack(channel, axis=-1) for channel in channels]
    rgb = jnp.select([sector == number for number in range(6)], pixels)
    return jnp.rint(rgb).astype(jnp.uint8)
