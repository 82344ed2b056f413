"""Decomposed relative positions; in windows they are compared in tests/models/test_windows.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.positions.resample import bilinear_matrix
from rope_jax_kernels import Global, Window
from tests.models.definition import softmax
from tests.positions.schemes import (
    HEAD_DIM,
    HEADS,
    compiled,
    compiled_terms,
    normal,
    scheme,
    trained_scheme,
)

pytestmark = pytest.mark.usefixtures("x64")

WINDOWS = {"pattern": Window((2, 2)), "global_layers": (1,)}


@pytest.mark.parametrize(("grid", "prefix"), [((3, 5), 0), ((3, 5), 2), ((4, 3), 0)])
def test_logits_match_the_definition(grid, prefix):
    """On the map of creation (3, 5), and on another one, where tables are interpolated."""
    position = trained_scheme("decomposed", prefix=prefix)
    tokens = prefix + grid[0] * grid[1]
    q, k, v = normal(3, 2, tokens, HEADS, HEAD_DIM)

    def attend(q, k, v):
        logits = jnp.einsum("blnd,bmnd->bnlm", q, k) * HEAD_DIM**-0.5
        return jnp.einsum("bnlm,bmnd->blnd", jax.nn.softmax(logits), v)

    run = lambda position, *qkv: position.terms(grid).layer(1).transform(*qkv, attend)
    got = compiled(run, position, q, k, v)
    rows, columns = (
        bilinear_matrix(2 * trained_side - 1, 2 * n - 1) @ np.asarray(tables[1][...])
        for tables, trained_side, n in zip(
            (position.rows, position.columns), (3, 5), grid, strict=True
        )
    )
    logits = np.einsum("blnd,bmnd->bnlm", q, k) * HEAD_DIM**-0.5
    for query, key in np.ndindex(tokens - prefix, tokens - prefix):
        (y, x), (y2, x2) = (divmod(token, grid[1]) for token in (query, key))
        vector = rows[y - y2 + grid[0] - 1] + columns[x - x2 + grid[1] - 1]
        logits[:, :, prefix + query, prefix + key] += q[:, prefix + query] @ vector
    want = np.einsum("bnlm,bmnd->blnd", softmax(logits), v)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "settings", "rows", "columns"),
    [
        ("decomposed", {}, (5, 5, 5), (9, 9, 9)),
        ("decomposed(side=4)", {}, (7, 7, 7), (7, 7, 7)),
        ("decomposed", WINDOWS, (3, 5, 3), (3, 9, 3)),
        ("decomposed(side=4)", WINDOWS, (3, 7, 3), (3, 7, 3)),
    ],
)
def test_tables_cover_the_range_of_each_layer(text, settings, rows, columns):
    position = scheme(text, **settings)
    assert tuple(table.shape[0] for table in position.rows) == rows
    assert tuple(table.shape[0] for table in position.columns) == columns


def test_resizing_interpolates_only_tables_of_the_map():
    position = trained_scheme("decomposed", **WINDOWS)
    before = [np.asarray(table[...]) for table in position.rows]
    interpolated = compiled_terms(position.with_pattern(Global()), (6, 6)).layer(1).transform.rows
    position.resize((6, 6))
    np.testing.assert_array_equal(position.rows[0][...], before[0])
    np.testing.assert_allclose(position.rows[1][...], bilinear_matrix(5, 11) @ before[1])
    again = compiled_terms(position.with_pattern(Global()), (6, 6)).layer(1).transform.rows
    np.testing.assert_allclose(again, interpolated, rtol=1e-12)
