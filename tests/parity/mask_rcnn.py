"""Mask R-CNN's parts in the form of its goldens, in float64: maps [N, C, H, W], torch's weights.

The functions have the names and arguments of the definition that the goldens come with. They need
JAX_ENABLE_X64=1.
"""

import functools
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import rope_jax
from rope_jax.data import Truth
from rope_jax.models.heads.mask_rcnn import choices, regions
from rope_jax.tasks.average_precision import ImageDetections, average_precision
from rope_jax.tasks.pasting import paste as paste_mask
from rope_jax.weights import export_state_dict
from tests.models.small import create_head

DATA = pathlib.Path(__file__).parents[1] / "data" / "mask_rcnn_parity"
CASES = json.loads((DATA / "cases.json").read_text())
STRIDE = 4
_GAINS = {"linear": 1.0, "strong": 4.0, "weak": 0.25}


def noise(shape, seed):
    """Uniform in +-sqrt(3), float64 with float32's values."""
    u = np.random.default_rng(seed).random(tuple(shape), dtype=np.float32)
    return ((np.float32(2) * u - np.float32(1)) * np.float32(3**0.5)).astype(np.float64)


def weights(keys):
    """Torch's arrays by name, from their shapes and kinds."""
    arrays = {}
    for key, (shape, kind) in keys.items():
        z = noise(shape, zlib.crc32(key.encode())).astype(np.float32)
        scale = 0.1 if kind == "bias" else _GAINS[kind] / np.prod(shape[1:]) ** 0.5
        arrays[key] = (z * np.float32(scale)).astype(np.float64)
    return arrays


def golden(name):
    """The settings of a golden, its weights and its arrays."""
    entry = CASES[name]
    with np.load(DATA / f"{name}.npz") as file:
        return entry["case"], weights(entry.get("keys", {})), dict(file)


def make_head(case, state, numbers):
    """The head of a case with these weights, and with fresh ones where there are none."""
    head = create_head(
        "mask_rcnn",
        channels=case["channels"],
        num_classes=case["classes"],
        dtype=jnp.float64,
        width=case["width"],
        hidden=case["hidden"],
        anchor_samples=case["rpn_samples"],
        box_samples=case["roi_samples"],
        train_candidates=numbers["pre"],
        candidates=numbers["pre"],
        proposals=numbers["post"],
    )
    complete = export_state_dict(head, source="vit_adapter") | state
    rope_jax.convert_state_dict(head, complete, source="vit_adapter")
    return head


def nhwc(x):
    return jax.device_put(np.moveaxis(x, 1, -1))


def nchw(x):
    return np.moveaxis(np.asarray(x), -1, 1)


def limits(extent):
    return np.array([extent[1], extent[0]] * 2, np.float64)


def anchors(sizes):
    return np.concatenate(choices.make_anchors([*map(tuple, sizes)], STRIDE))


def valid(sizes, padded):
    return np.asarray(jax.jit(choices.anchors_inside)(anchors(sizes), np.asarray(padded)))


def assign(boxes, objects, pos, low):
    rows = np.zeros((9, 4))
    rows[: len(objects)] = objects
    real, valid = np.arange(9) < len(objects), np.ones(len(boxes), bool)
    run = jax.jit(functools.partial(choices.assign, low=low, high=pos))
    return np.asarray(run(rows, real, np.asarray(boxes, float), valid))


def proposals(scores, deltas, boxes, counts, extent, pre, post):
    parts = [np.split(x, np.cumsum(counts)[:-1]) for x in (scores, deltas, boxes)]
    run = jax.jit(choices.propose, static_argnums=4)
    found, probabilities = map(np.asarray, run(*parts, limits(extent), (pre, post)))
    return found[probabilities >= 0], probabilities[probabilities >= 0]


def levels(boxes):
    return np.asarray(jax.jit(regions.find_levels, static_argnums=1)(boxes, STRIDE))


def roi_features(maps, boxes, image, size):
    everywhere = np.broadcast_to(boxes, (len(maps[0]), *boxes.shape))
    run = jax.jit(regions.align, static_argnums=(2, 3))
    features = np.asarray(run([nhwc(x) for x in maps], everywhere, STRIDE, size))
    return nchw(features[image, np.arange(len(boxes))])


def detect(boxes, cls, reg, extent, most):
    classes = cls.shape[1] - 1
    probabilities = np.asarray(jax.nn.softmax(cls))[:, :-1]
    steps, run = reg.reshape(len(reg), classes, 4), jax.jit(choices.detect, static_argnums=4)
    found = run(boxes, probabilities, steps, limits(extent), most)
    return tuple(np.asarray(x)[np.asarray(found[1]) > 0] for x in found)


def paste(logits, boxes, labels, original, scale):
    boxes = np.asarray(boxes, np.float64) / [scale[1], scale[0], scale[1], scale[0]]
    sigmoid = lambda x: 1 / (1 + np.exp(-x.astype(np.float64)))
    rows = zip(logits, boxes, labels, strict=True)
    masks = [paste_whole(sigmoid(x[label]), box, original) for x, box, label in rows]
    return np.array(masks).reshape(-1, *original)


def paste_whole(mask, box, original):
    """The probabilities of all pixels of an image."""
    whole = np.zeros(original)
    part, place = paste_mask(mask, box, tuple(original))
    whole[place] = part
    return whole


def mask_ap(content, overlap="masks"):
    def column(entries, name, kind):
        return np.array([entry[name] for entry in entries], kind)

    def masks(entries):
        return [{"size": content["size"], "counts": x["counts"].encode()} for x in entries]

    truths, detections = [], []
    for image in range(content["images"]):
        objects, found = (
            [entry for entry in content[kind] if entry["image"] == image]
            for kind in ("objects", "found")
        )
        boxes, others = (column(x, "box", float).reshape(-1, 4) for x in (objects, found))
        kinds = {"class": np.int32, "crowd": bool, "area": float}
        columns = (column(objects, name, kind) for name, kind in kinds.items())
        truths.append(Truth(boxes, *columns, masks(objects)))
        scores, classes = column(found, "score", float), column(found, "class", int)
        detections.append(ImageDetections(others, scores, classes, masks(found)))
    return average_precision(detections, truths, content["classes"], overlap=overlap)
