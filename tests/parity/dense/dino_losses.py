"""DINO's matching and losses for fixed predictions, against detrex."""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.models.heads.detection import Targets
from rope_jax.models.heads.dino.losses import box_losses, costs, match_targets
from rope_jax.models.heads.matching import match
from tests.parity.dense import noise

NAMES = {"classes": "loss_class", "l1": "loss_bbox", "giou": "loss_giou"}


def make_targets(case, dtype):
    """The targets of the images, padded to the largest number."""
    counts = case["objects"]
    boxes = np.zeros((len(counts), max(counts), 4), dtype)
    labels = np.full(boxes.shape[:2], -1, np.int32)
    for i, count in enumerate(counts):
        labels[i, :count] = np.random.default_rng(20 + i).integers(0, case["classes"], count)
        boxes[i, :count] = jax.nn.sigmoid(noise(count, 4, seed=30 + i).astype(dtype))
    return Targets(jnp.asarray(boxes), jnp.asarray(labels))


@jax.jit
def run(logits, boxes, targets):
    assigned = jax.tree.map(lambda x: x[0], match_targets(logits[None], boxes[None], targets))
    losses = box_losses(logits, boxes, assigned)
    cost = jax.vmap(costs)(logits, boxes, targets)
    queries = jax.vmap(match)(cost, targets.real)
    return {name: getattr(losses, name).sum() for name in NAMES}, queries


def outputs(golden, dtype):
    case = golden.case
    targets = make_targets(case, dtype)
    real = np.asarray(targets.real)
    shape = (len(case["objects"]), case["queries"])
    results = {}
    for layer, seed in case["seeds"].items():
        logits = noise(*shape, case["classes"], seed=seed).astype(dtype)
        boxes = jax.nn.sigmoid(noise(*shape, 4, seed=seed + 1).astype(dtype))
        losses, queries = run(logits, boxes, targets)
        for name, loss in losses.items():
            suffix = "" if layer == "last" else layer
            results[f"{NAMES[name]}{suffix}"] = loss / max(real.sum(), 1)
        if layer == "last":
            pairs = np.full(shape, -1)
            for image, target in np.argwhere(real):
                pairs[image, queries[image, target]] = target
            results["target_of_query"] = pairs
    return results
