"""Mask2Former's decoders and scores: sizes, definitions, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import resolve
from rope_jax.data.sources import scenes
from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.heads.mask2former.head import MaskPredictions
from rope_jax.tasks import TASKS
from tests.models.definition import softmax
from tests.models.small import check_gradients, compile_gradient, create_head

SMALL = (
    "mask2former(width=16,heads=2,groups=4,pixel_depth=1,pixel_hidden=16,depth=3,hidden=32,"
    "queries=6,loss_points=64)"
)
VIT = {"width": 16, "heads": 2, "depth": 4, "image_size": 32, "patch_size": 8}
SWIN = {"width": 8, "heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "image_size": 64}


def test_scores_sum_resized_masks_over_queries():
    """Masks are resized, not scores; the class of no object has none."""
    rng = np.random.default_rng(0)
    head = nnx.eval_shape(lambda: create_head("mask2former", channels=(8,) * 4, num_classes=3))
    classes, embeddings = (rng.standard_normal((2, 1, 5, n)).astype("f") for n in (4, 6))
    pixels = rng.standard_normal((1, 3, 4, 6)).astype("f")
    predictions = MaskPredictions(*map(jnp.asarray, (classes, embeddings, pixels)))
    scores = head.result(predictions, (6, 8))
    masks = np.einsum("bhwc,bqc->bhwq", pixels, embeddings[1])
    masks = np.asarray(resize_maps(jnp.asarray(masks), (6, 8)))[0]
    probabilities = softmax(classes[1, 0])[:, :3]
    expected = np.einsum("qk,yxq->yxk", probabilities, 1 / (1 + np.exp(-masks)))
    np.testing.assert_allclose(scores[0], expected, atol=1e-5)
    assert (head.probabilities(scores[0]) == scores[0]).all()


@pytest.mark.slow
def test_every_parameter_has_a_gradient():
    """Of scenes of 32 pixels, the second without a class."""
    scene_list = [scenes.draw_scene("train", number, (32, 32)) for number in range(4)]
    labels = np.stack([scene.labels for scene in scene_list])
    labels[1] = 255
    images = np.stack([scene.image for scene in scene_list]).astype(np.float32) / 127.5 - 1
    batch = {"image": images, "label": labels}
    model = rope_jax.create_model("deit_ti16", head=SMALL, num_classes=11, **VIT)
    loss = lambda model, batch, key: TASKS["segmentation"].loss(model, batch, resolve({}), key=key)
    run = compile_gradient(model, loss, has_aux=True)
    (value, _), gradients = run(batch, jax.random.key(0))
    assert np.isfinite(value)
    # The softmax does not see what all keys share. And deformable attention does not depend on its
    # queries before the first step.
    levels = ("head", "pixel_decoder", "levels")
    check_gradients(gradients, lambda path: path[-2:] == ("k", "bias") or path == levels)
