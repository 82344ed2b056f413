"""The vision transformer against its definition in NumPy, float64, image by image and head by head.

Tolerance: float64 and logits of size 1 leave 1e-13 of rounding; LayerNorm's epsilon moves them by 1e-6 and more.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import SMALL, small_model

pytestmark = pytest.mark.usefixtures("x64", "quick_compiles")

PATCH, WIDTH, HEADS, GRID = SMALL["patch_size"], SMALL["width"], SMALL["heads"], (3, 5)
HEAD_DIM = WIDTH // HEADS
EPSILON = {"deit_ti16": 1e-6, "deit3_ti16": 1e-6, "vit_s16": 1e-5, "nat_isotropic_s16": 1e-5}
PLACES = list(itertools.product(range(GRID[0]), range(GRID[1])))


def norm(x, layer, epsilon):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * np.asarray(layer.scale[...]) + np.asarray(layer.bias[...])


def dense(x, layer):
    return x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def turn(x, theta, interleaved):
    """x [L, D], theta [L, R]."""
    pairs, out = theta.shape[1], x.copy()
    for r in range(pairs):
        a, b = (2 * r, 2 * r + 1) if interleaved else (r, pairs + r)
        out[:, a] = x[:, a] * np.cos(theta[:, r]) - x[:, b] * np.sin(theta[:, r])
        out[:, b] = x[:, b] * np.cos(theta[:, r]) + x[:, a] * np.sin(theta[:, r])
    return out


def attend(x, block, theta, interleaved, bias, allowed):
    """One image: x [L, C]; theta(head) [L, R] or None; bias [N, L, L] or None."""
    q, k, v = np.split(dense(x, block.attn.qkv), 3, axis=1)
    out = []
    for head in range(HEADS):
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        qh, kh = (y[:, part] if theta is None else turn(y[:, part], theta(head), interleaved) for y in (q, k))
        logits = qh @ kh.T / math.sqrt(HEAD_DIM)
        if bias is not None:
            logits = logits + bias[head]
        logits = np.where(allowed, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, part])
    return dense(np.concatenate(out, axis=1), block.attn.proj)


def neighbours(kernel):
    """Who attends to whom: the `kernel` nearest rows and columns, moved inwards at the border."""
    first = [[min(max(i - kernel // 2, 0), n - kernel) for i in range(n)] for n in GRID]
    near = lambda axis, i, j: first[axis][i] <= j < first[axis][i] + kernel
    return np.array([[near(0, qy, ky) and near(1, qx, kx) for ky, kx in PLACES] for qy, qx in PLACES])


def logits_of(model, image, scheme, epsilon):
    """scheme(model) gives: added to the tokens, theta(layer, head), interleaved, bias(layer), joins(layer): all for tokens with prefix."""
    o = model.options
    kernel = np.asarray(model.patch_embed.proj.kernel[...]).reshape(-1, WIDTH)
    patches = [image[y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].reshape(-1) for y, x in PLACES]
    x = np.array(patches) @ kernel + np.asarray(model.patch_embed.proj.bias[...])
    if o.patch_norm:
        x = norm(x, model.patch_embed.norm, epsilon)
    if o.class_token:
        x = np.concatenate([np.asarray(model.class_token[...])[0], x])
    x = x + scheme.get("tokens", 0)
    allowed = neighbours(o.kernel_size) if o.attention == "neighborhood" else np.ones((len(x), len(x)), bool)
    for layer, block in enumerate(model.blocks):
        scale = [1 if s is None else np.asarray(s.gamma[...]) for s in (block.scale1, block.scale2)]
        theta = (lambda head, layer=layer: scheme["theta"](layer, head)) if "theta" in scheme else None
        bias = scheme["bias"](layer) if "bias" in scheme else None
        joins = scheme["joins"](layer) if "joins" in scheme else 0
        normed = norm(x, block.norm1, epsilon) + joins
        x = x + scale[0] * attend(normed, block, theta, scheme.get("interleaved", False), bias, allowed)
        x = x + scale[1] * dense(gelu(dense(norm(x, block.norm2, epsilon), block.mlp.fc1)), block.mlp.fc2)
    x = norm(x, model.norm, epsilon)
    return dense(x[0] if o.class_token else x.mean(axis=0), model.head)


def behind_class_token(rows):
    return np.concatenate([np.zeros((1, rows.shape[1])), rows])


def ape_of_deit(model):
    return {"tokens": np.asarray(model.position.embedding[...])}


def mixed_and_ape(model):
    mixed, ape = model.position.parts

    def theta(layer, head):
        f = np.asarray(mixed.mixed[...])[layer, head]
        return behind_class_token(np.array([y * f[0] + x * f[1] for y, x in PLACES]))

    return {"tokens": behind_class_token(np.asarray(ape.embedding[...])), "theta": theta, "interleaved": True}


def axial(model):
    """Two pairs for each axis; rows first."""
    freqs = lambda head: math.pi * 10 ** ((np.arange(2) * HEADS + head) / (2 * HEADS))
    place = lambda i, n: (2 * i + 1 - n) / max(GRID)
    angles = lambda y, x, f: np.concatenate([place(y, GRID[0]) * f, place(x, GRID[1]) * f])
    return {"theta": lambda layer, head: np.array([angles(y, x, freqs(head)) for y, x in PLACES])}


def key_minus_query(model):
    table = np.asarray(model.position.offsets[...])
    reach = (table.shape[2] // 2, table.shape[3] // 2)

    def bias(layer):
        out = np.zeros((HEADS, len(PLACES), len(PLACES)))
        for (i, (qy, qx)), (j, (ky, kx)) in itertools.product(enumerate(PLACES), repeat=2):
            if abs(ky - qy) <= reach[0] and abs(kx - qx) <= reach[1]:
                out[:, i, j] = table[layer, :, ky - qy + reach[0], kx - qx + reach[1]]
        return out

    return {"bias": bias}


def key_minus_query_behind_class_token(model):
    inner = key_minus_query(model)["bias"]
    return {"bias": lambda layer: np.pad(inner(layer), [(0, 0), (1, 0), (1, 0)])}


def lape_of_sines(model):
    lape = model.position
    wave = lambda place, i: (math.cos if i % 2 else math.sin)(place / 10000 ** (2 * (i // 2) / WIDTH))
    p, chain = np.array([[wave(place, i) for i in range(WIDTH)] for place in range(16)]), []
    for scale, shift in zip(np.asarray(lape.scale[...]), np.asarray(lape.bias[...]), strict=True):
        p = (p - p.mean(axis=1, keepdims=True)) / np.sqrt(p.var(axis=1, keepdims=True) + 1e-6) * scale + shift
        chain.append(p)
    return {"joins": lambda layer: chain[layer]}


@pytest.mark.parametrize(
    ("name", "position", "scheme"),
    [
        ("deit_ti16", "ape", ape_of_deit),
        ("deit_ti16", "rpb", key_minus_query_behind_class_token),
        ("deit_ti16", "lape(sincos1d)", lape_of_sines),
        ("deit3_ti16", "rope_mixed(pairing=interleaved)+ape", mixed_and_ape),
        ("vit_s16", "axial_rope", axial),
        ("vit_s16", "rpb", key_minus_query),
        ("nat_isotropic_s16", "rpb", key_minus_query),
        ("nat_isotropic_s16", "axial_rope", axial),
    ],
)
def test_logits_are_those_of_the_definition(name, position, scheme):
    model = small_model(name, position, dtype=jnp.float64)
    images = np.random.default_rng(1).standard_normal((2, 6, 10, 3))
    logits = model(jnp.asarray(images))
    assert logits.dtype == jnp.float64
    want = [logits_of(model, image, scheme(model), EPSILON[name]) for image in images]
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-9)
