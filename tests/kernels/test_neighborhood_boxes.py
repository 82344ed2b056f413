"""Tiles and boxes of neighbourhoods along one axis, against the definition of the pattern."""

import itertools

import numpy as np
import pytest

from rope_jax_kernels.attention.neighborhood_boxes import Axis
from tests.kernels.attention_pairs import neighbors

KERNELS = (1, 2, 3, 4, 7, 13)
MEMBERS = (1, 3, 4, 7, 8, 15, 16, 29, 56)


@pytest.mark.parametrize("transposed", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("tile", [4, 8, 16])
def test_boxes_hold_the_pairs_of_every_tile(tile, transposed):
    """Those of an example of each kind, also of queries past the end, which are masked."""
    for members, size in itertools.product(MEMBERS, KERNELS):
        axis = Axis(members, size, tile, transposed, masked=True)
        near = [set(neighbors(members, size, 1, i)) for i in range(members)]
        start = np.arange(axis.tiles) * tile
        first = axis.first(start)
        offsets, attends = axis.pairs(
            axis.first(axis.examples * tile)[:, None, None], axis.box, axis.examples
        )
        for number in range(axis.tiles):
            kind, found = axis.kind(number), set()
            for i, j in zip(*np.nonzero(attends[kind]), strict=True):
                member, other = start[number] + i, first[number] + j
                query, key = (other, member) if transposed else (member, other)
                assert offsets[kind, i, j] == key - query
                found.add((query, key))
            of_tile = range(start[number], min(start[number] + tile, members))
            assert found == {
                (query, key)
                for query, keys in enumerate(near)
                for key in keys
                if (key if transposed else query) in of_tile
            }


@pytest.mark.parametrize("tile", [4, 8, 16])
def test_queries_past_the_end_see_the_keys_of_the_last_one(tile):
    """Unless they are masked."""
    for members, size in itertools.product(MEMBERS, KERNELS):
        axis = Axis(members, size, tile, transposed=False, masked=False)
        last = axis.examples[-1:]
        _, attends = axis.pairs(axis.first(last * tile)[:, None, None], axis.box, last)
        end = members - int(last[0]) * tile
        assert (attends[0, end - 1 :] == attends[0, end - 1]).all()
        assert attends[0, end - 1].sum() == axis.kernel
