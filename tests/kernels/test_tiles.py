"""The tiles of all patterns: every pair is met exactly once."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention.tiles import cut
from tests.kernels.attention_pairs import pairs
from tests.slow import some_slow

CASES = [
    (Global(), (1, 1), 64, 32),
    (Global(), (7, 10), 32, 16),
    (Global(), (10, 10), 32, 64),
    (Window((7, 7), (3, 3)), (14, 14), 64, 64),
    (Window((3, 4), (1, 2)), (5, 9), 64, 16),
    (Window((5, 5), (2, 0)), (11, 7), 16, 16),  # a window in two tiles
    (Window((9, 9)), (4, 20), 64, 32),
    (Neighborhood((3, 3)), (8, 8), 64, 64),
    (Neighborhood((7, 7)), (17, 25), 64, 64),
    (Neighborhood((7, 7)), (7, 7), 64, 32),
    (Neighborhood((7, 7)), (4, 9), 64, 32),
    (Neighborhood((3, 5), (2, 3)), (11, 20), 64, 32),
    (Neighborhood((4, 2), (3, 1)), (29, 5), 32, 32),
    (Neighborhood((8, 8)), (12, 12), 32, 32),  # a tile of half the kernel
    (Neighborhood((16, 5), (1, 2)), (21, 9), 64, 32),
    (Neighborhood((13, 3), (1, 2)), (20, 9), 32, 64),
    (Neighborhood((13, 11), (2, 2)), (21, 25), 64, 64),
    (Neighborhood((5, 5), (9, 2)), (4, 7), 64, 32),
]


def make_tiles(pattern, grid, rows, columns):
    """Tiles, and the number of entries of a head's bias."""
    places = (grid[0] * grid[1],) if isinstance(pattern, Global) else grid
    tiles = cut(pattern, places, rows=rows, columns=columns)
    return tiles, math.prod(pattern.bias_shape(1, places))


def met_pairs(tiles, entries, transposed):
    """(query, key, entry) of all pairs that the kernels compute."""
    view = tiles.transpose() if transposed else tiles

    @jax.jit
    def look_at_all(indices, steps):
        (by_slot,) = view.by_slot(jnp.arange(entries, dtype=jnp.float32)[None])

        def look(index, step):
            tile, block = view.tile(index), view.block(index, step)
            q, k = (block, tile) if transposed else (tile, block)
            seen = q.exists[:, None] & tiles.sees(q, k)
            lines = q.line[:, None], k.line[None, :]
            inside = [(x >= 0) & (x < size) for x, size in zip(lines, by_slot.shape, strict=True)]
            tokens = jnp.broadcast_arrays(q.token[:, None], k.token)
            return *tokens, seen, jnp.where(inside[0] & inside[1], by_slot[lines], np.nan)

        over_blocks = jax.vmap(look, (None, 0))
        return jax.vmap(over_blocks, (0, None))(indices, steps)

    slots = look_at_all(np.arange(view.tiles), np.arange(view.blocks))
    q, k, seen, entry = map(np.asarray, slots)
    assert np.isfinite(entry).all()  # also of pairs that do not attend
    return zip(q[seen].tolist(), k[seen].tolist(), entry[seen].tolist(), strict=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("pattern", "grid", "rows", "columns"), some_slow(CASES, CASES[1::3]))
def test_every_pair_is_met_once_with_its_bias(pattern, grid, rows, columns, transposed):
    met = met_pairs(*make_tiles(pattern, grid, rows, columns), transposed)
    assert sorted(met) == sorted(pairs(pattern, grid))


@pytest.mark.slow
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_pattern(data):
    pair = lambda low, high: data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))
    size, grid = pair(1, 13), pair(3, 14)
    window = Window(size, tuple(data.draw(st.integers(0, n - 1)) for n in size))
    pattern = data.draw(st.sampled_from([Neighborhood(size, pair(1, 4)), window]))
    rows, columns = (data.draw(st.sampled_from(sizes)) for sizes in ([64, 32], [16, 32, 64]))
    expected = sorted(pairs(pattern, grid))
    for transposed in (False, True):
        assert sorted(met_pairs(*make_tiles(pattern, grid, rows, columns), transposed)) == expected


@pytest.mark.parametrize("pattern", [Window((32, 32)), Neighborhood((13, 13))])
def test_bias_lookups_hold_no_indices(pattern):
    tiles, entries = make_tiles(pattern, (64, 64), 64, 64)
    bias = jax.ShapeDtypeStruct((2, entries), "float32")
    assert len(jax.jit(tiles.transpose().by_slot).lower(bias).as_text()) < 20_000
