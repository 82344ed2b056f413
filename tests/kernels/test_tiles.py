"""How kernels cut patterns: every token in one tile, every pair that attends met exactly once, from either side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention.tiles import cut
from tests.kernels.attention_pairs import pairs, token_coords

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
    (Neighborhood((8, 8)), (12, 12), 32, 32),  # a tile of half the kernel, which reaches one less down and right
    (Neighborhood((16, 5), (1, 2)), (21, 9), 64, 32),
    (Neighborhood((13, 3), (1, 2)), (20, 9), 32, 64),
    (Neighborhood((13, 11), (2, 2)), (21, 25), 64, 64),
    (Neighborhood((5, 5), (9, 2)), (4, 7), 64, 32),
]


def met(tiles, *, transposed):
    """(query, key, entry) of all pairs that the kernels see, and the tokens of all tiles; one array each."""
    view = tiles.transposed() if transposed else tiles

    @jax.jit
    def look(index, step):
        tile, block = view.tile(index), view.block(index, step)
        q, k = (block, tile) if transposed else (tile, block)
        seen = q.exists[:, None] & k.exists[None, :]
        sees = tiles.sees(q, k)
        seen = seen if sees is None else seen & sees
        return seen, q.token, k.token, tiles.entry(q, k)

    every, index = [], np.arange(view.tiles)
    for step in range(view.blocks):
        seen, q, k, entry = (np.asarray(x) for x in jax.vmap(look, (0, None))(index, jnp.int32(step)))
        q, k = np.broadcast_to(q[:, :, None], seen.shape), np.broadcast_to(k[:, None, :], seen.shape)
        every += zip(q[seen].tolist(), k[seen].tolist(), entry[seen].tolist(), strict=True)
    return every


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("pattern", "grid", "rows", "columns"), CASES)
def test_every_pair_is_met_once_with_its_entry_of_the_bias(pattern, grid, rows, columns, transposed):
    places = (grid[0] * grid[1],) if isinstance(pattern, Global) else grid
    tiles = cut(pattern, places, rows=rows, columns=columns)
    assert sorted(met(tiles, transposed=transposed)) == sorted(pairs(pattern, grid))


@pytest.mark.parametrize(("pattern", "grid", "rows", "columns"), CASES)
def test_every_token_is_in_one_tile_with_its_coordinates(pattern, grid, rows, columns):
    places = (grid[0] * grid[1],) if isinstance(pattern, Global) else grid
    tiles = cut(pattern, places, rows=rows, columns=columns)
    slots = jax.vmap(tiles.tile)(np.arange(tiles.tiles))
    there = np.asarray(slots.exists)
    assert sorted(np.asarray(slots.token)[there]) == list(range(grid[0] * grid[1]))
    assert (np.asarray(slots.token)[~there] >= grid[0] * grid[1]).all()
    coords = np.full(grid[0] * grid[1], -1)
    coords[np.asarray(slots.token)[there]] = np.asarray(slots.coord)[there]
    np.testing.assert_array_equal(coords, token_coords(pattern, grid))


@pytest.mark.parametrize(("pattern", "grid", "rows", "columns"), CASES)
def test_gradients_by_slot_fold_to_those_of_the_entries(pattern, grid, rows, columns):
    places = (grid[0] * grid[1],) if isinstance(pattern, Global) else grid
    tiles = cut(pattern, places, rows=rows, columns=columns)
    shares = tiles.tiles // tiles.repeats
    by_slot, wanted = np.zeros((1, shares * tiles.rows, tiles.blocks * tiles.columns)), np.zeros((1, tiles.entries))
    rng = np.random.default_rng(0)
    for index in range(tiles.tiles):
        for step in range(tiles.blocks):
            q, k = tiles.tile(jnp.int32(index)), tiles.block(jnp.int32(index), jnp.int32(step))
            seen = q.exists[:, None] & k.exists[None, :]
            sees = tiles.sees(q, k)
            seen = np.asarray(seen if sees is None else seen & sees)
            gradient = np.where(seen, rng.standard_normal(seen.shape), 0)
            np.add.at(wanted[0], np.asarray(tiles.entry(q, k))[seen], gradient[seen])
            row, column = index % shares * tiles.rows, step * tiles.columns
            by_slot[0, row : row + tiles.rows, column : column + tiles.columns] += gradient
    with jax.enable_x64(True):
        np.testing.assert_allclose(tiles.fold(jnp.asarray(by_slot)), wanted, rtol=0, atol=1e-10)
