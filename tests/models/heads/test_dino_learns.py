"""A small DINO finds the digits of a few scenes that it is trained on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import resolve
from rope_jax.data.sources import scenes
from rope_jax.tasks import TASKS

HEAD = (
    "dino(width=64,groups=8,heads=4,encoder_depth=1,decoder_depth=2,hidden=128,queries=24,"
    "denoising=24,detections=50)"
)
SIDE, SCENES, ROWS, STEPS = 64, 16, 8, 600


def make_batch(images):
    """All images as a batch of the loader."""
    boxes = np.zeros((SCENES, ROWS, 4), np.float32)
    labels = np.full((SCENES, ROWS), -1, np.int32)
    for index in range(SCENES):
        truth = images.truth(index)
        boxes[index, : len(truth.boxes)] = truth.boxes
        labels[index, : len(truth.labels)] = truth.labels
    return {
        "image": jnp.asarray(images.images),
        "extent": jnp.full((SCENES, 2), SIDE, jnp.int32),
        "boxes": jnp.asarray(boxes),
        "label": jnp.asarray(labels),
        "epoch": jnp.zeros(SCENES, jnp.int32),
        "index": jnp.arange(SCENES, dtype=jnp.int32),
    }


def precision(model, images, batch, config):
    """The scores of a model on the images that it was trained on."""
    prepared = TASKS["detection"].prepare_batch(batch, config, seed=0, key=jax.random.key(0))
    graph, state = nnx.split(model)
    detections = jax.jit(lambda state, *x: nnx.merge(graph, state)(*x))(
        state, prepared["image"], prepared["extent"]
    )
    truth = batch | {"original": batch["extent"], "mask": jnp.ones(SCENES, bool)}
    task = TASKS["detection"]
    part = jax.tree.map(np.asarray, task.count(detections, truth, images))
    return task.scores([task.collect(part)], images)


@pytest.mark.slow
def test_it_finds_the_digits_of_sixteen_scenes(monkeypatch):
    monkeypatch.setitem(scenes.COUNTS, "train", SCENES)
    images = scenes.load_scenes("train", (SIDE, SIDE), "boxes")
    config, batch = resolve({}), make_batch(images)
    model = rope_jax.create_model(
        "vit_digits",
        head=HEAD,
        num_classes=images.classes,
        image_size=SIDE,
        patch_size=8,
        width=64,
        depth=2,
        heads=2,
        position="rope_mixed",
    )
    graph, params, others = nnx.split(model, nnx.Param, ...)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 50, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0))

    @jax.jit
    def step(params, state, key):
        prepared = TASKS["detection"].prepare_batch(batch, config, seed=0, key=key)

        def loss(params):
            return TASKS["detection"].loss(
                nnx.merge(graph, params, others), prepared, config, key=key
            )

        (value, hit_rate), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, hit_rate)

    state = optimizer.init(params)
    for number in range(STEPS):
        params, state, (_, hit_rate) = step(params, state, jax.random.key(number))
    assert hit_rate > 0.95  # of the boxes, in the last step
    model = nnx.merge(graph, params, others)
    assert precision(model, images, batch, config)["ap50"] > 0.95
