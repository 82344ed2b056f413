import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.models.heads.dino.levels import Levels, map_positions, padding_mask
from rope_jax.models.heads.dino.transformer import proposals

IMAGE = (40, 64)
EXTENT = np.array([[40, 64], [23, 40]])
SIZES = [(5, 8), (3, 4), (2, 2)]


@functools.cache
def some_padding():
    run = jax.jit(lambda extent: [padding_mask(extent, IMAGE, size) for size in SIZES])
    return [np.asarray(x) for x in run(EXTENT)]


def test_padding_follows_the_nearest_pixel():
    """Masks are interpolated as by torch: token i of n is pixel floor(i N / n) of N."""
    for size, padding in zip(SIZES, some_padding(), strict=True):
        rows, columns = (np.arange(n) * side // n for n, side in zip(size, IMAGE, strict=True))
        for image, (height, width) in enumerate(EXTENT):
            expected = (rows[:, None] >= height) | (columns >= width)
            np.testing.assert_array_equal(padding[image], expected)


@pytest.mark.parametrize("channels", [8, 24])
def test_positions_encode_places_within_the_extent(channels):
    run = jax.jit(lambda padding: [map_positions(x, channels) for x in padding])
    encodings = [np.asarray(x) for x in run(some_padding())]
    for (rows, columns), padding, encoding in zip(SIZES, some_padding(), encodings, strict=True):
        for image, y, x in np.ndindex(2, rows, columns):
            if padding[image, y, x]:
                continue
            heights, widths = (~padding[image]).sum(0)[x], (~padding[image]).sum(1)[y]
            expected, features = [], channels // 2
            for place, count in ((y, heights), (x, widths)):
                for i in range(features):
                    angle = (place + 0.5) / (count + 1e-6) * 2 * math.pi
                    angle /= 10000 ** (2 * (i // 2) / features)
                    expected.append(math.cos(angle) if i % 2 else math.sin(angle))
            np.testing.assert_allclose(encoding[image, y, x], expected, atol=1e-6)


def test_proposals_are_boxes_around_tokens_within_the_extent():
    padding, token = some_padding(), 0

    @jax.jit
    def run(padding):
        levels = Levels.from_padding(padding)
        return *proposals(levels), levels.places(), levels.padding

    boxes, valid, places, flat = (np.asarray(x) for x in run([jnp.asarray(x) for x in padding]))
    for level, ((rows, columns), padded) in enumerate(zip(SIZES, padding, strict=True)):
        for y, x in np.ndindex(rows, columns):
            for image in range(2):
                counts = (~padded[image, 0]).sum(), (~padded[image, :, 0]).sum()
                centre = [(x + 0.5) / counts[0], (y + 0.5) / counts[1]]
                expected = [*centre, 0.05 * 2**level, 0.05 * 2**level]
                np.testing.assert_allclose(boxes[image, token], expected, rtol=1e-6)
                assert valid[image, token] == all(0.01 < value < 0.99 for value in expected)
                np.testing.assert_array_equal(flat[image, token], padded[image, y, x])
                # The place on maps with another fraction of padding.
                for other, size in enumerate(SIZES):
                    mask = padding[other][image]
                    fractions = (~mask[0]).sum() / size[1], (~mask[:, 0]).sum() / size[0]
                    np.testing.assert_allclose(
                        places[image, token, other], np.multiply(centre, fractions), rtol=1e-6
                    )
            token += 1
    assert not valid[1].all()  # centres in padding are beyond 0.99
