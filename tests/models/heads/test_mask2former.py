"""Mask2Former's decoders and scores: sizes, definitions, gradients, and what it learns."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax
from rope_jax.data.sources import scenes
from rope_jax.models.heads import create_head
from rope_jax.models.heads.mask2former import MaskPredictions
from rope_jax.models.heads.masked_decoder import Attention, attended
from rope_jax.models.heads.pixel_decoder import sine_positions
from rope_jax.models.layers import dtypes_of
from rope_jax.tasks import segmentation

SMALL = (
    "mask2former(width=16,heads=2,groups=4,pixel_depth=1,pixel_hidden=16,depth=3,hidden=32,"
    "queries=6,loss_points=64)"
)
VIT = {"width": 16, "heads": 2, "depth": 4, "image_size": 32, "patch_size": 8}
SWIN = {"width": 8, "heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "image_size": 64}


def parameters(module):
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return sum(math.prod(leaf.shape) for _, leaf in flat)


@pytest.mark.parametrize(
    ("channels", "count"), [((96, 192, 384, 768), 5_421_504), ((128, 256, 512, 1024), 5_544_384)]
)
def test_the_decoders_have_the_official_numbers_of_parameters(channels, count):
    make = functools.partial(create_head, "mask2former", num_classes=150, rngs=nnx.Rngs(0))
    head = nnx.eval_shape(lambda: make(channels=channels))
    assert parameters(head.pixel_decoder) == count
    assert parameters(head.decoder) == 14_497_431


def test_positions_are_sines_of_rows_and_columns():
    found = np.asarray(sine_positions((3, 5), 12)).reshape(3, 5, 12)
    for y, x, k in np.ndindex(3, 5, 6):
        period = 10_000 ** (k // 2 / 3)
        wave = (np.sin, np.cos)[k % 2]
        assert found[y, x, k] == pytest.approx(wave(2 * np.pi * (y + 1) / 3 / period), abs=1e-5)
        wanted = wave(2 * np.pi * (x + 1) / 5 / period)
        assert found[y, x, 6 + k] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("x64")
def test_a_query_attends_to_its_mask_or_to_everything_where_that_is_empty():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 3, 2, 4))
    logits[0, :, :, 1] = -np.abs(logits[0, :, :, 1])  # the mask of this query is empty
    mask = np.asarray(attended(jnp.asarray(logits)))
    inside = (logits > 0).reshape(2, 6, 4).swapaxes(1, 2)
    assert mask[0, 1].all()
    assert not inside[0, 1].any()
    others = [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all((mask[at] == inside[at]).all() for at in others)

    attention = Attention(8, 2, rngs=nnx.Rngs(0), dtypes=dtypes_of(jnp.float64))
    for layer in (attention.q, attention.k, attention.v, attention.out):
        layer.bias.set_value(jnp.asarray(rng.standard_normal(8)))
    queries, keys, values = (rng.standard_normal((2, n, 8)) for n in (4, 6, 6))
    graph, state = nnx.split(attention)
    found = jax.jit(lambda *inputs: nnx.merge(graph, state)(*inputs))(queries, keys, values, mask)

    def dense(layer, x):
        return x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])

    projected = ((attention.q, queries), (attention.k, keys), (attention.v, values))
    q, k, v = (dense(layer, x).reshape(2, -1, 2, 4) for layer, x in projected)
    wanted = np.zeros((2, 4, 2, 4))
    for image, query, head in np.ndindex(2, 4, 2):
        kept = np.flatnonzero(mask[image, query])
        shares = np.exp(k[image, kept, head] @ q[image, query, head] / np.sqrt(4))
        wanted[image, query, head] = shares / shares.sum() @ v[image, kept, head]
    wanted = dense(attention.out, wanted.reshape(2, 4, 8))
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_scores_are_sums_over_queries_of_resized_masks():
    """Masks are resized, not scores; the class of no object has none."""
    rng = np.random.default_rng(0)
    head = nnx.eval_shape(
        lambda: create_head("mask2former", channels=(8,) * 4, num_classes=3, rngs=nnx.Rngs(0))
    )
    classes, embeddings = (rng.standard_normal((2, 1, 5, n)).astype("f") for n in (4, 6))
    pixels = rng.standard_normal((1, 3, 4, 6)).astype("f")
    predictions = MaskPredictions(*map(jnp.asarray, (classes, embeddings, pixels)))
    found = head.result(predictions, (6, 8))
    masks = np.einsum("hwc,qc->hwq", pixels[0], embeddings[1, 0])
    rows, columns = (np.kron(np.eye(n), np.ones((2, 1))) for n in (3, 4))
    for matrix in (rows, columns):  # twice the size: 3/4 of the nearest pixel, 1/4 of the next
        for i in range(len(matrix)):
            matrix[i] *= 0.75
            matrix[i, min(max(i // 2 + (1 if i % 2 else -1), 0), matrix.shape[1] - 1)] += 0.25
    masks = np.einsum("yh,xw,hwq->yxq", rows, columns, masks)
    shares = np.exp(classes[1, 0]) / np.exp(classes[1, 0]).sum(-1, keepdims=True)
    wanted = np.einsum("qk,yxq->yxk", shares[:, :3], 1 / (1 + np.exp(-masks)))
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
    assert (head.probabilities(found[0]) == found[0]).all()


@pytest.mark.parametrize(
    ("name", "settings", "size"), [("swin_t", SWIN, (64, 96)), ("deit_ti16", VIT, (32, 48))]
)
def test_a_swin_and_a_vit_predict_pixels_of_any_size(name, settings, size):
    model = nnx.eval_shape(
        lambda: rope_jax.create_model(name, head=SMALL, num_classes=3, **settings)
    )
    graph, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)
    found = jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, images)
    assert found.shape == (2, *size, 3)


@pytest.fixture(scope="module")
def model():
    return rope_jax.create_model("deit_ti16", head=SMALL, num_classes=11, **VIT)


def drawn(count):
    """Scenes of 32 pixels with their labels."""
    found = [scenes.scene(0, "train", i, 32, 32) for i in range(count)]
    return [np.stack(arrays) for arrays in zip(*((one[0], one[1]) for one in found), strict=True)]


def step_of(model, optimizer):
    """A training step: (params, optimizer's state, batch, key) -> the same, and the metrics."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch, key):
        own = nnx.merge(graph, params, rest)
        return segmentation.loss(own, batch, rope_jax.config.resolve({}), key=key)

    @jax.jit
    def step(params, state, batch, key):
        metrics, gradients = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, (metrics, gradients)

    return params, optimizer.init(params), step
