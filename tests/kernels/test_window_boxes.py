"""Boxes of windows: each token of the map is in one slot of one window, masks are the pattern's."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Window
from rope_jax_kernels.attention.window_boxes import ALIGNED, COPIED, make_boxes
from tests.kernels.attention_pairs import pairs

# Grid, window, head dimension.
CASES = [
    ((14, 14), Window((7, 7), (3, 3)), 32),
    ((13, 25), Window((12, 12), (6, 6)), 32),
    ((10, 17), Window((7, 7), (3, 2)), 64),
    ((7, 11), Window((3, 5), (1, 4)), 32),
    ((9, 8), Window((7, 7)), 32),
    ((4, 20), Window((9, 9), (5, 0)), 64),
    ((16, 8), Window((8, 8), (4, 4)), 32),
    ((5, 5), Window((1, 1)), 32),
]


def tokens_of(boxes, index):
    """The token of the map in each slot of a window, as boxes place them; -1 for none."""
    tokens = np.full(boxes.tiles * 64, -1)
    for box in boxes.boxes():
        for i, j in np.ndindex(*box.size):
            place = []
            for axis, local in enumerate((i, j)):
                x = index[axis] * boxes.window.size[axis] + box.place[axis] + local
                x += boxes.window.shift[axis]
                carried = box.carried[axis] and index[axis] == boxes.windows[axis] - 1
                place.append(x - boxes.padded[axis] if carried else x)
            if place[0] < boxes.grid[0] and place[1] < boxes.grid[1]:
                tokens[box.slot + i * box.size[1] + j] = place[0] * boxes.grid[1] + place[1]
    return tokens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_are_the_pairs_of_the_pattern(case):
    """For every window by its kind, with the bias of every pair."""
    grid, window, _ = case
    boxes = make_boxes(case[1], case[0], case[2])
    table = np.arange(1, 1 + math.prod(2 * n - 1 for n in boxes.window.size), dtype=np.float32)
    masked = jax.jit(boxes.masked_bias, static_argnums=1, static_argnames="queries")
    masks = {
        queries: np.asarray(masked(jnp.asarray(table)[None], -1.0, queries=queries))
        for queries in (False, True)
    }
    windows = {x: tokens_of(boxes, x) for x in itertools.product(*map(range, boxes.windows))}
    slots = {token: (x, i) for x, y in windows.items() for i, token in enumerate(y) if token >= 0}
    held = np.concatenate(list(windows.values()))
    assert sorted(held[held >= 0]) == list(range(math.prod(grid)))
    expected = {x: np.full((y.size, y.size), -1.0) for x, y in windows.items()}
    for query, key, entry in pairs(window, grid):
        (index, i), (_, j) = slots[query], slots[key]
        expected[index][i, j] = table[entry]
    for index, tokens in windows.items():
        axes = zip(index, boxes.windows, boxes.kinds, strict=True)
        down, across = (max(0, i - n + kinds) for i, n, kinds in axes)
        kind, exists = down * boxes.kinds[1] + across, tokens >= 0
        np.testing.assert_array_equal(masks[True][kind, 0], expected[index])
        np.testing.assert_array_equal(masks[False][kind, 0][exists], expected[index][exists])
        # A missing query sees all keys, so that it sees some.
        assert ((masks[False][kind, 0][~exists] != -1) == exists).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_boxes_can_be_copied(case):
    """Whole pieces of 128 bytes, to places where the swizzle begins, without overlaps."""
    boxes = make_boxes(case[1], case[0], case[2])
    end = 0
    for box in boxes.boxes():
        assert box.slot >= end
        assert box.slot % ALIGNED == 0
        end = box.slot + box.rows_read * box.size[1]
        assert box.rows_read * box.size[1] * boxes.row_bytes % COPIED == 0
        assert box.rows_read >= box.size[0]
    assert end <= 64 * boxes.tiles < end + 64


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_fold_is_the_transpose_of_the_lookup(case):
    _, window, channels = case
    boxes = make_boxes(window, tuple(3 * n for n in window.size), channels)
    (h, w), slots = window.size, 64 * boxes.tiles
    gradient = np.random.default_rng(0).standard_normal((2, slots, slots), np.float32)
    # The first kind of window lacks no token.
    lookup = lambda table: boxes.masked_bias(table, 0.0, queries=True)[0]
    table = jnp.zeros((2, (2 * h - 1) * (2 * w - 1)))
    (want,) = jax.jit(lambda d: jax.vjp(lookup, table)[1](d))(gradient)
    np.testing.assert_allclose(jax.jit(boxes.fold)(gradient), want, rtol=1e-5, atol=1e-5)
