"""Every scheme in every attention pattern, against dense attention by definition, in float64.

The dense attention has all pairs of tokens. `attention_pairs` determines which of them a pattern
allows, and their entries in a bias table; rotations and transforms are those of the scheme in
global attention, on the whole map.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import create_model
from rope_jax.models.attention import SelfAttention
from rope_jax.positions import list_positions
from rope_jax.positions.scheme import SCHEMES
from rope_jax_kernels import Global, Neighborhood, Window
from tests.kernels.attention_pairs import pairs
from tests.positions.schemes import CHANNELS, HEAD_DIM, HEADS, rotate_by_definition, scheme

pytestmark = pytest.mark.usefixtures("x64")

GRID = (5, 8)
PATTERNS = {
    "global": Global(),
    "windows": Window((3, 3)),
    "shifted windows": Window((2, 3), (1, 1)),
    "dilated neighbourhoods": Neighborhood((3, 3), (1, 2)),
}
TEXTS = {"lape": "lape(ape)", "cpb": "cpb(hidden=8)"}
NAMES = ["rope_log", *list_positions()]
PAIRS = [
    (name, pattern)
    for name in NAMES
    for pattern in PATTERNS
    # Biases that depend on queries do not support windows (those of ViTs: tests/models).
    if name not in ("irpe", "decomposed") or pattern == "global"
]
# A rotation on the map, one by windows, a table of each kind.
FAST = [
    ("rope_log", "shifted windows"),
    ("rope_log", "dilated neighbourhoods"),
    ("rope_mixed", "windows"),
    ("rpb", "shifted windows"),
    ("rpb", "dilated neighbourhoods"),
]


def make_different(text, pattern):
    """A scheme with random parameters, equal in all patterns."""
    position = scheme(text, depth=2, grid=GRID, pattern=pattern)
    for path, param in nnx.to_flat_state(nnx.state(position, nnx.Param)):
        rng = np.random.default_rng(zlib.crc32(repr(path).encode()))
        param.set_value(jnp.asarray(0.5 * rng.standard_normal(param.shape)))
    return position


def mask_and_bias(pattern, table):
    """A mask [L, L], minus infinity for pairs that are not allowed, and the biases of all pairs."""
    # Tables of global attention have offsets, like those of a window that is the map.
    q, k, entry = np.array(pairs(Window(GRID) if pattern == Global() else pattern, GRID)).T
    length = GRID[0] * GRID[1]
    mask, bias = np.full((length, length), -np.inf), np.zeros((HEADS, length, length))
    mask[q, k] = 0
    if table is not None:
        bias[:, q, k] = np.asarray(table).reshape(len(table), -1)[:, entry]
    return mask, bias


def dense(attention, tokens, terms, mask, bias):
    """The layer by its definition; `terms` of global attention, without their bias."""
    x = tokens if terms.add is None else tokens + np.asarray(terms.add)
    qkv = x @ np.asarray(attention.qkv.kernel[...]) + np.asarray(attention.qkv.bias[...])
    q, k, v = np.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, HEAD_DIM), 2, 0)

    xp = np if terms.transform is None else jnp  # a transform may be vectorised over examples

    def attend(q, k, v, added=0.0):
        q, k = rotate_by_definition(q, terms.rotation), rotate_by_definition(k, terms.rotation)
        logits = xp.einsum("bqnd,bknd->bnqk", q, k) * HEAD_DIM**-0.5 + bias + added + mask
        weights = xp.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return xp.einsum("bnqk,bknd->bqnd", weights, v)

    if terms.transform is None:
        out = attend(q, k, v)
    else:
        out = np.asarray(terms.transform(*map(jnp.asarray, (q, k, v)), attend))
    return out.reshape(x.shape) @ np.asarray(attention.proj.kernel[...])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS],
)
def test_patterns_equal_masked_dense_attention(name, pattern, rope_log):
    text, pattern = TEXTS.get(name, name), PATTERNS[pattern]
    plain = dataclasses.replace(pattern, shift=(0, 0)) if isinstance(pattern, Window) else pattern
    position, on_map = make_different(text, plain), make_different(text, Global())
    rng = np.random.default_rng(1)
    dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    attention = SelfAttention(CHANNELS, HEADS, rngs=nnx.Rngs(0), dtypes=dtypes)
    for layer in (attention.qkv, attention.proj):
        layer.kernel.set_value(jnp.asarray(0.3 * rng.standard_normal(layer.kernel.shape)))
    tokens = rng.standard_normal((2, GRID[0] * GRID[1], CHANNELS))
    attend = jax.jit(lambda tokens, terms: attention(tokens, GRID, pattern, terms))
    pattern_terms, map_terms = position.terms(GRID), on_map.terms(GRID)
    for layer in range(2):
        terms = pattern_terms.layer(layer)
        expected = dense(
            attention, tokens, map_terms.layer(layer), *mask_and_bias(pattern, terms.bias)
        )
        assert expected.std() > 1
        np.testing.assert_allclose(attend(jnp.asarray(tokens), terms), expected, rtol=0, atol=1e-10)


def test_windows_refuse_two_schemes_that_wrap_attention(rope_log):
    scheme(f"{rope_log}+lpe", grid=GRID).terms(GRID)
    with pytest.raises(ValueError, match="several schemes that wrap attention"):
        scheme(f"{rope_log}+lpe", grid=GRID, pattern=Window((3, 3)))
    with pytest.raises(ValueError, match="several schemes that wrap attention"):
        nnx.eval_shape(lambda: create_model("swin_t", position=f"{rope_log}+lpe"))


def test_uneven_coordinates_must_be_declared_in_windows(rope_log, monkeypatch):
    """A single window, which is the map, and other patterns need no declaration."""
    monkeypatch.setattr(SCHEMES[rope_log], "relative", True)
    for pattern in (Global(), Neighborhood((3, 3)), Window(GRID)):
        scheme(rope_log, grid=GRID, pattern=pattern).terms(GRID)
    with pytest.raises(ValueError, match=r"not evenly spaced.*declare `relative = False`"):
        scheme(rope_log, grid=GRID, pattern=Window((3, 3))).terms(GRID)
