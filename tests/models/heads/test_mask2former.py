"""Mask2Former's decoders and scores: sizes, definitions, gradients, and what it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import resolve
from rope_jax.data.sources import scenes
from rope_jax.models.heads import create_head
from rope_jax.models.heads.mask2former.decoder import attention_mask
from rope_jax.models.heads.mask2former.head import MaskPredictions
from rope_jax.tasks import TASKS
from tests.models.small import check_gradients

SMALL = (
    "mask2former(width=16,heads=2,groups=4,pixel_depth=1,pixel_hidden=16,depth=3,hidden=32,"
    "queries=6,loss_points=64)"
)
VIT = {"width": 16, "heads": 2, "depth": 4, "image_size": 32, "patch_size": 8}
SWIN = {"width": 8, "heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "image_size": 64}


def test_a_query_attends_to_its_mask_or_everywhere_if_empty():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    logits[0, :, :, 1] = -np.abs(logits[0, :, :, 1])  # the mask of this query is empty
    mask = np.asarray(attention_mask(jnp.asarray(logits)))
    inside = (logits > 0).reshape(2, 6, 4).swapaxes(1, 2)
    assert mask[0, 1].all()
    assert not inside[0, 1].any()
    others = [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all((mask[at] == inside[at]).all() for at in others)


def test_scores_sum_resized_masks_over_queries():
    """Masks are resized, not scores; the class of no object has none."""
    rng = np.random.default_rng(0)
    head = nnx.eval_shape(
        lambda: create_head("mask2former", channels=(8,) * 4, num_classes=3, rngs=nnx.Rngs(0))
    )
    classes, embeddings = (rng.standard_normal((2, 1, 5, n)).astype("f") for n in (4, 6))
    pixels = rng.standard_normal((1, 3, 4, 6)).astype("f")
    predictions = MaskPredictions(*map(jnp.asarray, (classes, embeddings, pixels)))
    scores = head.result(predictions, (6, 8))
    masks = np.einsum("hwc,qc->hwq", pixels[0], embeddings[1, 0])
    rows, columns = (np.kron(np.eye(n), np.ones((2, 1))) for n in (3, 4))
    for matrix in (rows, columns):  # twice the size: 3/4 of the nearest pixel, 1/4 of the next
        for i in range(len(matrix)):
            matrix[i] *= 0.75
            matrix[i, min(max(i // 2 + (1 if i % 2 else -1), 0), matrix.shape[1] - 1)] += 0.25
    masks = np.einsum("yh,xw,hwq->yxq", rows, columns, masks)
    probabilities = np.exp(classes[1, 0]) / np.exp(classes[1, 0]).sum(-1, keepdims=True)
    expected = np.einsum("qk,yxq->yxk", probabilities[:, :3], 1 / (1 + np.exp(-masks)))
    np.testing.assert_allclose(scores[0], expected, atol=1e-5)
    assert (head.probabilities(scores[0]) == scores[0]).all()


def draw_batch(count):
    """A batch of scenes of 32 pixels."""
    scene_list = [scenes.draw_scene("train", number, (32, 32)) for number in range(count)]
    labels = np.stack([scene.labels for scene in scene_list])
    images = np.stack([scene.image for scene in scene_list]).astype(np.float32) / 127.5 - 1
    return {"image": images, "label": labels}


@pytest.fixture(scope="module")
def step():
    """Parameters, optimizer's state, and a training step of a small model."""
    model = rope_jax.create_model("deit_ti16", head=SMALL, num_classes=11, **VIT)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    optimizer, config = optax.adam(4e-3), resolve({})

    def loss(params, batch, key):
        return TASKS["segmentation"].loss(nnx.merge(graph, params, others), batch, config, key=key)

    @jax.jit
    def step(params, state, batch, key):
        metrics, gradients = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, metrics, gradients

    return params, optimizer.init(params), step


@pytest.mark.slow
def test_every_parameter_has_a_gradient(step):
    params, state, train = step
    batch = draw_batch(4)
    batch["label"][1] = 255
    _, _, (value, _), gradients = train(params, state, batch, jax.random.key(0))
    assert np.isfinite(value)
    # The softmax does not see what all keys share. And deformable attention does not depend on its
    # queries before the first step.
    levels = ("head", "pixel_decoder", "levels")
    check_gradients(gradients, lambda path: path[-2:] == ("k", "bias") or path == levels)


@pytest.mark.slow
def test_a_small_model_learns_scenes(step):
    """Sixty steps on four scenes: digits are found, where all but a tenth is background."""
    params, state, train = step
    batch, history = draw_batch(4), []
    for number in range(60):
        params, state, metrics, _ = train(params, state, batch, jax.random.key(number))
        history.append([float(x) for x in metrics])
    losses, accuracies = np.array(history).T
    background = (batch["label"] == 0).mean()
    assert losses[-5:].mean() < 0.4 * losses[:5].mean()
    assert accuracies[-5:].mean() > background + 0.05
