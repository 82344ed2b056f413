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


def test_padding_is_that_of_the_nearest_pixel():
    """As torch's interpolation of masks: token i of n is pixel floor(i N / n) of N."""
    for size, found in zip(SIZES, some_padding(), strict=True):
        rows, columns = (np.arange(n) * side // n for n, side in zip(size, IMAGE, strict=True))
        for image, (height, width) in enumerate(EXTENT):
            wanted = (rows[:, None] >= height) | (columns >= width)
            np.testing.assert_array_equal(found[image], wanted)


@pytest.mark.parametrize("channels", [8, 24])
def test_positions_are_sines_of_places_within_the_extent(channels):
    run = jax.jit(lambda padding: [map_positions(x, channels) for x in padding])
    made = [np.asarray(x) for x in run(some_padding())]
    for (rows, columns), padding, found in zip(SIZES, some_padding(), made, strict=True):
        for image, y, x in np.ndindex(2, rows, columns):
            if padding[image, y, x]:
                continue
            heights, widths = (~padding[image]).sum(0)[x], (~padding[image]).sum(1)[y]
            wanted, features = [], channels // 2
            for place, count in ((y, heights), (x, widths)):
                for i in range(features):
                    angle = (place + 0.5) / (count + 1e-6) * 2 * math.pi
                    angle /= 10000 ** (2 * (i // 2) / features)
                    wanted.append(math.cos(angle) if i % 2 else math.sin(angle))
            np.testing.assert_allclose(found[image, y, x], wanted, atol=1e-6)


def test_proposals_are_boxes_around_tokens_within_the_extent():
    padding, token = some_padding(), 0

    @jax.jit
    def run(padding):
        levels = Levels.from_padding(padding)
        return *proposals(levels), levels.places(), levels.padding

    boxes, valid, places, flat = (np.asarray(x) for x in run([jnp.asarray(x) for x in padding]))
    for level, ((rows, columns), own) in enumerate(zip(SIZES, padding, strict=True)):
        for y, x in np.ndindex(rows, columns):
            for image in range(2):
                counts = (~own[image, 0]).sum(), (~own[image, :, 0]).sum()
                centre = [(x + 0.5) / counts[0], (y + 0.5) / counts[1]]
                wanted = [*centre, 0.05 * 2**level, 0.05 * 2**level]
                np.testing.assert_allclose(boxes[image, token], wanted, rtol=1e-6)
                assert valid[image, token] == all(0.01 < value < 0.99 for value in wanted)
                np.testing.assert_array_equal(flat[image, token], own[image, y, x])
                # The same place on a map of which another share is padding.
                for other, size in enumerate(SIZES):
                    mask = padding[other][image]
                    shares = (~mask[0]).sum() / size[1], (~mask[:, 0]).sum() / size[0]
                    np.testing.assert_allclose(
                        places[image, token, other], np.multiply(centre, shares), rtol=1e-6
                    )
            token += 1
    assert not valid[1].all()  # centres in padding are beyond 0.99
