"""The tiles of all patterns: every token is in one tile, every pair is met exactly once."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention.tiles import cut
from tests.kernels.attention_pairs import pairs, token_coords
from tests.kernels.covering import covering

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
    places = (grid[0] * grid[1],) if isinstance(pattern, Global) else grid
    return cut(pattern, places, rows=rows, columns=columns)


@functools.cache
def all_slots(tiles, transposed):
    """(tile, block, allowed pairs, entry of each pair in the bias), over all tiles and blocks."""
    view = tiles.transpose() if transposed else tiles

    @jax.jit
    def look_at_all(indices, steps):
        (by_slot,) = view.by_slot(jnp.arange(tiles.entries, dtype=jnp.float32)[None])

        def look(index, step):
            tile, block = view.tile(index), view.block(index, step)
            q, k = (block, tile) if transposed else (tile, block)
            seen = q.exists[:, None] & tiles.sees(q, k)
            lines = q.line[:, None], k.line[None, :]
            inside = [(x >= 0) & (x < size) for x, size in zip(lines, by_slot.shape, strict=True)]
            return tile, block, seen, jnp.where(inside[0] & inside[1], by_slot[lines], np.nan)

        over_blocks = jax.vmap(look, (None, 0), (None, 0, 0, 0))
        return jax.vmap(over_blocks, (0, None))(indices, steps)

    return jax.tree.map(np.asarray, look_at_all(np.arange(view.tiles), np.arange(view.blocks)))


def met_pairs(tiles, transposed):
    """(query, key, entry) of all pairs that the kernels compute."""
    tile, block, seen, entry = all_slots(tiles, transposed)
    assert np.isfinite(entry).all()  # also of pairs that do not attend
    tile, block = tile.token[:, None], block.token
    q, k = (block, tile) if transposed else (tile, block)
    q, k = np.broadcast_arrays(q[..., :, None], k[..., None, :])
    return zip(q[seen].tolist(), k[seen].tolist(), entry[seen].tolist(), strict=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", covering(CASES, CASES[1::3]), ids=str)
def test_every_pair_is_met_once_with_its_bias(case, transposed):
    assert sorted(met_pairs(make_tiles(*case), transposed)) == sorted(pairs(*case[:2]))


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
        assert sorted(met_pairs(make_tiles(pattern, grid, rows, columns), transposed)) == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_is_in_one_tile_with_its_coordinates(case):
    (pattern, grid), tokens = case[:2], math.prod(case[1])
    slots, *_ = all_slots(make_tiles(*case), False)
    assert sorted(slots.token[slots.exists]) == list(range(tokens))
    assert (slots.token[~slots.exists] >= tokens).all()
    coords = np.full(tokens, -1)
    coords[slots.token[slots.exists]] = slots.coord[slots.exists]
    np.testing.assert_array_equal(coords, token_coords(pattern, grid))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_by_slot_fold_to_entries(case):
    tiles = make_tiles(*case)
    distinct = tiles.tiles // tiles.repeats
    by_slot = np.zeros((1, distinct * tiles.rows, tiles.blocks * tiles.columns))
    expected = np.zeros((1, tiles.entries))
    rng = np.random.default_rng(0)
    _, _, seen, entry = all_slots(tiles, False)
    for index, step in np.ndindex(seen.shape[:2]):
        attends = seen[index, step]
        gradient = np.where(attends, rng.standard_normal(attends.shape), 0)
        np.add.at(expected[0], entry[index, step][attends].astype(int), gradient[attends])
        row, column = index % distinct * tiles.rows, step * tiles.columns
        by_slot[0, row : row + tiles.rows, column : column + tiles.columns] += gradient
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(tiles.fold)(by_slot), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pattern", [Window((32, 32)), Neighborhood((13, 13))])
def test_bias_lookups_hold_no_indices(pattern):
    tiles = make_tiles(pattern, (64, 64), 64, 64).transpose()
    bias = jax.ShapeDtypeStruct((2, tiles.entries), "float32")
    assert len(jax.jit(tiles.by_slot).lower(bias).as_text()) < 20_000
