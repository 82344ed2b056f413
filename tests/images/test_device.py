"""Augmentations of the training step against Pillow's own operations, and their statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from rope_jax.data import split_augment
from rope_jax.data.images import device

FILL = (124, 116, 104)
HEIGHT, WIDTH = 18, 24


def pictures():
    """One of noise, one of smooth colours with flat parts, one dark without contrast."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    smooth = np.stack([x * 10, y * 13, np.where(x > 12, 200, x * 3 + y)], axis=-1)
    noise = random.integers(0, 256, (HEIGHT, WIDTH, 3))
    return [picture.astype(np.uint8) for picture in (noise, smooth, 40 + noise // 8)]


def with_pillow(picture, operation, level, signed, cubic, increasing):
    """Applies timm's operations in Pillow; level is magnitude / 10."""
    image = Image.fromarray(picture)
    width, height = image.size
    factor = max(0.1, 1 + 0.9 * signed) if increasing else 1.8 * level + 0.1
    bits, threshold = int(level * 4), int(level * 256)
    bits, threshold = (4 - bits, 256 - threshold) if increasing else (bits, threshold)
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    affine = lambda matrix: image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=FILL
    )
    done = {
        "nothing": lambda: image,
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "rotate": lambda: image.rotate(30 * signed, resample, fillcolor=FILL),
        "posterize": lambda: image.point([i & ~(2 ** (8 - bits) - 1) for i in range(256)] * 3),
        "solarize": lambda: ImageOps.solarize(image, threshold),
        "solarize_add": lambda: image.point(
            [min(255, i + int(level * 110)) if i < 128 else i for i in range(256)] * 3
        ),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "shear_x": lambda: affine((1, 0.3 * signed, 0, 0, 1, 0)),
        "shear_y": lambda: affine((1, 0, 0, 0.3 * signed, 1, 0)),
        "translate_x": lambda: affine((1, 0, 0.45 * signed * width, 0, 1, 0)),
        "translate_y": lambda: affine((1, 0, 0, 0, 1, 0.45 * signed * height)),
    }[operation]
    return np.asarray(done())


@functools.cache
def operate_all(increasing):
    """Cases of all operations, and their results on all pictures, [pictures, cases, H, W, 3]."""
    cases = [
        (name, level, level * sign, bool(cubic))
        for name in device.OPERATIONS
        # At 1.0 a translation is by whole fifths of a pixel: every fifth value is a whole number.
        for level in (0.0, 0.437, 0.93, 0.997 if "translate" in name else 1.0)
        for sign, cubic in ((1, 0), (-1, 1))
    ]
    cases.append(("nothing", 0.9, 0.9, True))
    numbers = jnp.array(
        [device.OPERATIONS.index(name) if name != "nothing" else -1 for name, *_ in cases]
    )
    level, signed, cubic = (jnp.array([case[i] for case in cases]) for i in (1, 2, 3))
    operate = lambda image, number, level, signed, cubic: device.operate(
        image, number, level, signed, FILL, cubic, inc=increasing
    )
    operate_pairs = jax.jit(
        jax.vmap(jax.vmap(operate, (None, 0, 0, 0, 0)), (0, None, None, None, None))
    )
    return cases, np.asarray(
        operate_pairs(jnp.array(np.stack(pictures())), numbers, level, signed, cubic)
    )


@pytest.mark.parametrize("increasing", [True, False])
@pytest.mark.parametrize("operation", [*device.OPERATIONS, "nothing"])
def test_operations_match_pillow(operation, increasing):
    cases, results = operate_all(increasing)
    exact = operation in (
        "nothing", "equalize", "invert", "posterize", "solarize", "solarize_add"
    )  # fmt: skip
    for place, (name, *case) in enumerate(cases):
        if name == operation:
            for picture, image in zip(pictures(), results[:, place], strict=True):
                expected = with_pillow(picture, name, *case, increasing)
                difference = np.abs(image.astype(int) - expected)
                # Pillow truncates: a value that is whole except for rounding may differ by one.
                assert difference.max() <= (0 if exact else 1), case
                # Stretched to 255, the largest value is such a value, and it may occur often.
                assert (difference > 0).mean() < (1 if name == "auto_contrast" else 0.02), case


def test_blur_matches_pillow():
    radii = (0.1, 0.5, 0.99, 1.3, 2.0)
    blur = jax.jit(jax.vmap(jax.vmap(device.gaussian_blur, (None, 0)), (0, None)))
    blurred = np.asarray(blur(np.stack(pictures()), jnp.float32(radii)))
    filters = [ImageFilter.GaussianBlur(radius) for radius in radii]
    expected = [
        [np.asarray(Image.fromarray(picture).filter(x)) for x in filters] for picture in pictures()
    ]
    np.testing.assert_array_equal(blurred, expected)


def test_three_augment_chooses_uniformly():
    picture, keys = pictures()[1], jax.random.split(jax.random.key(0), 300)
    draw = jax.jit(jax.vmap(lambda key: device.three_augment(jnp.asarray(picture), key, FILL)))
    results, image = np.asarray(draw(keys)), Image.fromarray(picture)
    grey_and_solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image, 128)
    counts = [(results == x).all(axis=(1, 2, 3)).sum() for x in map(np.asarray, grey_and_solarized)]
    for count in (*counts, 300 - sum(counts)):
        assert 70 < count < 130  # 100, standard deviation 8


def test_colour_jitter_enhances_in_random_order():
    options = {"brightness": 0.3, "contrast": 0.2, "saturation": 0.1}

    @jax.jit
    def draw(picture, key):
        order, sizes = jax.random.split(key)
        drawn = jax.random.permutation(order, 3), jax.random.uniform(sizes, (3,), minval=-1)
        return device.color_jitter(picture, key, FILL, **options), *drawn

    result, order, strengths = map(np.asarray, draw(pictures()[1], jax.random.key(3)))
    image = Image.fromarray(pictures()[1])
    for kind in order:
        enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[kind]
        image = enhance(image).enhance(float(1 + strengths[kind] * [*options.values()][kind]))
    assert np.abs(result.astype(int) - np.asarray(image)).max() <= 1


def test_erasing():
    """A quarter of the images has a box of noise, with areas and aspect ratios as defined."""
    count, size = 2000, 40
    images = np.full((count, size, size, 3), 7, np.float32)
    keys = jax.random.split(jax.random.key(0), count)
    options = {"augmentations": split_augment("erase").erasing, "first": device.ERASING}
    results = np.asarray(jax.jit(functools.partial(device.apply, **options))(images, keys))
    boxes = (results != 7).any(axis=-1)
    erased = boxes.any(axis=(1, 2))
    assert 440 < erased.sum() < 560  # 500, standard deviation 19
    np.testing.assert_allclose([results[boxes].mean(), results[boxes].std()], [0, 1], atol=0.01)
    tall, wide = boxes.any(axis=2).sum(axis=1)[erased], boxes.any(axis=1).sum(axis=1)[erased]
    np.testing.assert_array_equal(boxes[erased].sum(axis=(1, 2)), tall * wide)  # one box
    area = tall * wide / size**2
    assert 0.015 < area.min() < area.max() < 0.36
    assert abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.02
    assert 0.25 < (tall / wide).min() < 0.4 < 2.5 < (tall / wide).max() < 4


def test_draws_do_not_depend_on_the_batch():
    plan = split_augment("three_augment+color_jitter+erase(p=0.5)")

    @jax.jit
    def augment(images, epoch, index):
        keys = device.example_keys(1, epoch, index)
        pixels = device.apply(images, keys, plan.pixels, fill=FILL)
        normalised = pixels.astype(jnp.float32)
        return pixels, device.apply(normalised, keys, plan.erasing, first=device.ERASING)

    images = np.stack([pictures()[0]] * 6)
    epoch, index = np.int32([0, 0, 0, 0, 1, 1]), np.int32([5, 3, 8, 2, 5, 3])
    order = np.array([2, 5, 0, 1, 4, 3])
    first = map(np.asarray, augment(images, epoch, index))
    again = augment(images, epoch[order], index[order])
    for result, permuted in zip(first, again, strict=True):
        np.testing.assert_array_equal(permuted, result[order])
        # Other epochs and other examples differ.
        assert len(np.unique(result.reshape(6, -1), axis=0)) == 6


def test_rand_augment_draws_operations_and_magnitudes():
    """The colour of a flat picture reveals the operation: 200 of each in 6,000 draws."""
    flat = jnp.full((4, 4, 3), 100, jnp.uint8)
    draw = jax.jit(jax.vmap(lambda key: device.rand_augment(flat, key, (100, 100, 100), n=1)))
    results = np.asarray(draw(jax.random.split(jax.random.key(0), 6000)))
    assert (results == results[:, :1, :1, :1]).all()
    value = results[:, 0, 0, 0]
    dark = value[(value > 0) & (value < 100)]  # brightness down
    # Warps, auto contrast, equalize, colour, contrast and sharpness change nothing here.
    assert 4850 < (value == 100).sum() < 5150
    for count, expected in (
        ((value == 155).sum(), 400),  # inverted or solarized
        ((value == 0).sum(), 200),  # posterized
        (len(dark), 100),
        ((value > 155).sum(), 300),  # brightness up or solarize_add
    ):
        assert abs(count - expected) < 4 * expected**0.5
    # Darkened by 9 for each unit of a magnitude of 9 +- 0.5, with fractions cut off.
    assert abs(dark.mean() - (100 - 9 * 9 - 0.5)) < 2
    assert 3.3 < dark.std() < 5.5
