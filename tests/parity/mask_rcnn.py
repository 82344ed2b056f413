"""Mask R-CNN's parts in the form of its goldens, in float64: maps [N, C, H, W], torch's weights.

The functions have the names and arguments of the definition that the goldens come with. They need
JAX_ENABLE_X64=1.
"""

import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rope_jax
from rope_jax.data import Truth
from rope_jax.data.images.masks import decode_masks, encode_outline
from rope_jax.models.heads import boxes as corners
from rope_jax.models.heads import create_head
from rope_jax.models.heads.mask_rcnn import choices, losses, regions
from rope_jax.tasks.average_precision import ImageDetections, average_precision
from rope_jax.tasks.pasting import paste as paste_mask
from rope_jax.weights import export_state_dict

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


def make_head(state, *, channels=(8,) * 4, classes=7, **options):
    """The head with these weights, and with fresh ones where there are none."""
    head = create_head(
        "mask_rcnn",
        channels=channels,
        num_classes=classes,
        dtype=jnp.float64,
        rngs=nnx.Rngs(0),
        overrides={"hidden": 64, **options},
    )
    complete = export_state_dict(head, source="vit_adapter") | state
    rope_jax.convert_state_dict(head, complete, source="vit_adapter")
    return head


def nhwc(x):
    return jnp.asarray(np.moveaxis(x, 1, -1))


def nchw(x):
    return np.moveaxis(np.asarray(x), -1, 1)


def _within(prefix, state):
    return {f"{prefix}{name}": np.asarray(x) for name, x in state.items()}


def limits(extent):
    return jnp.asarray([extent[1], extent[0]] * 2, jnp.float64)


def fpn(maps, state):
    width = len(state["fpn_convs.0.conv.bias"])
    channels = [x.shape[1] for x in maps]
    head = make_head(_within("neck.", state), width=width, channels=channels)
    return [nchw(x) for x in head.pyramid([nhwc(x) for x in maps])]


def anchors(sizes):
    return np.concatenate(choices.make_anchors([*map(tuple, sizes)], STRIDE))


def valid(sizes, padded):
    return np.asarray(choices.anchors_inside(jnp.asarray(anchors(sizes)), jnp.asarray(padded)))


def rpn_head(x, state):
    head = make_head(_within("rpn_head.", state), width=x.shape[1])
    ((logits, steps),) = head.anchor_head([nhwc(x)])
    shape = (len(x), *x.shape[2:], -1)
    return nchw(logits.reshape(shape)), nchw(steps.reshape(shape))


def assign(boxes, objects, pos, neg, low):
    assert neg == low
    rows = np.zeros((9, 4))
    rows[: len(objects)] = objects
    padded = choices.Objects(jnp.asarray(rows), jnp.arange(9) < len(objects))
    everywhere = jnp.ones(len(boxes), bool)
    owners = choices.assign(padded, jnp.asarray(boxes, float), everywhere, low=low, high=pos)
    return np.asarray(owners)


def rpn_losses(scores, deltas, boxes, objects, assigned, positives, negatives):
    samples, steps = [], []
    for i, owners in enumerate(assigned):
        draws = np.zeros(len(boxes))
        draws[positives[i]] = draws[negatives[i]] = 1
        drawn = choices.sample(jnp.maximum(jnp.asarray(owners), -1), jnp.asarray(draws), 64, 32)
        for kind, indices in (
            (drawn.owner > 0, positives[i]),
            (drawn.owner == 0, negatives[i]),
        ):
            assert np.sort(np.asarray(drawn.index)[np.asarray(kind)]).tolist() == indices.tolist()
        samples.append(drawn)
        rows = np.concatenate([objects[i], np.zeros((1, 4))])
        real = choices.Objects(jnp.asarray(rows), jnp.arange(len(rows)) < len(objects[i]))
        sampled = jnp.asarray(boxes)[drawn.index]
        steps.append(choices._steps_to_objects(sampled, drawn, real, choices.ANCHOR_SPREAD))
    index, owner = (jnp.stack(x) for x in zip(*samples, strict=True))
    predictions = _predictions(
        anchors=choices.Samples(index, owner),
        anchor_steps=jnp.stack(steps),
        anchor_logits=jnp.take_along_axis(jnp.asarray(scores), index, 1),
        anchor_predictions=jnp.take_along_axis(jnp.asarray(deltas), index[..., None], 1),
    )
    values = losses.region_losses(predictions)
    return float(values["loss_rpn_cls"]), float(values["loss_rpn_bbox"])


def _predictions(
    *, anchors=None, anchor_steps=None, anchor_logits=None, anchor_predictions=None, labels=None,
    targets=None, logits=None, steps=None, masks=None, mask_targets=None,
):  # fmt: skip
    """Predictions and targets of some parts; nothing was sampled of the others."""
    images = 1 if anchors is None else len(anchors.index)
    none = jnp.full((images, 1), -1)
    zeros = lambda *shape: jnp.zeros((images, *shape))
    fill = lambda x, *shape: zeros(*shape) if x is None else jnp.asarray(x)
    labels = none if labels is None else jnp.asarray(labels)
    rows = labels.shape[1]
    sampled = choices.SampleTargets(
        choices.Samples(none, none) if anchors is None else anchors,
        fill(anchor_steps, 1, 4),
        zeros(rows, 4),
        labels,
        fill(targets, rows, 4),
        fill(mask_targets, rows, 28, 28) > 0,
    )
    return losses.TrainPredictions(
        sampled,
        fill(anchor_logits, 1),
        fill(anchor_predictions, 1, 4),
        fill(logits, rows, 8),
        fill(steps, rows, 4),
        fill(masks, rows, 28, 28),
    )


def proposals(scores, deltas, boxes, counts, extent, pre, post):
    split = lambda x: [jnp.asarray(y) for y in np.split(x, np.cumsum(counts)[:-1])]
    parts = (split(scores), split(deltas), split(boxes))
    found, probabilities = map(np.asarray, choices.propose(*parts, limits(extent), (pre, post)))
    return found[probabilities >= 0], probabilities[probabilities >= 0]


def levels(boxes):
    return np.asarray(regions.find_levels(jnp.asarray(boxes), STRIDE))


def roi_features(maps, boxes, image, size):
    count, images = len(boxes), len(maps[0])
    if not count:
        return np.zeros((0, maps[0].shape[1], size, size))
    everywhere = jnp.broadcast_to(jnp.asarray(boxes), (images, count, 4))
    features = np.asarray(regions.align([nhwc(x) for x in maps], everywhere, STRIDE, size))
    return nchw(features[np.asarray(image), np.arange(count)])


def roi_align(x, boxes, stride, size):
    rows, columns = regions._region_weights(jnp.asarray(boxes) / stride, size, x.shape[1:])
    return np.einsum("rph,chw,rqw->rcpq", rows, x, columns)


def box_head(x, state):
    classes, hidden = len(state["fc_cls.bias"]) - 1, len(state["shared_fcs.0.bias"])
    settings = {"width": x.shape[1], "classes": classes, "hidden": hidden}
    head = make_head(_within("roi_head.bbox_head.", state), **settings)
    logits, steps = head.box_head(nhwc(x)[None])
    return np.asarray(logits[0]), np.asarray(steps[0]).reshape(len(x), -1)


def encode(boxes, targets, std):
    return np.asarray(corners.encode(jnp.asarray(boxes), jnp.asarray(targets), (*std.tolist(),)))


def box_losses(cls, reg, labels, targets):
    count, classes = len(cls), cls.shape[1] - 1
    steps = reg.reshape(count, classes, 4)[np.arange(count), np.minimum(labels, classes - 1)]
    pad = lambda x, value=0: np.pad(x, [(0, 3)] + [(0, 0)] * (x.ndim - 1), constant_values=value)
    parts = {"labels": pad(labels, -1), "targets": pad(targets), "logits": pad(cls)}
    parts["steps"] = pad(steps)
    values = losses.region_losses(_predictions(**{name: x[None] for name, x in parts.items()}))
    return float(values["loss_cls"]), float(values["loss_bbox"])


def mask_head(x, state):
    classes = len(state["conv_logits.bias"])
    head = make_head(_within("roi_head.mask_head.", state), width=x.shape[1], classes=classes)
    logits = [head.mask_head(nhwc(x)[None], jnp.full((1, len(x)), k)) for k in range(classes)]
    return np.stack([np.asarray(y[0]) for y in logits], axis=1)


def mask_loss(logits, targets, labels):
    if not len(labels):
        return 0.0
    own = logits[np.arange(len(labels)), labels][None]
    parts = _predictions(labels=labels[None], masks=own, mask_targets=targets[None])
    return float(losses.region_losses(parts)["loss_mask"])


def detect(boxes, cls, reg, extent, most):
    classes = cls.shape[1] - 1
    probabilities = jax.nn.softmax(jnp.asarray(cls))[:, :-1]
    steps = jnp.asarray(reg).reshape(len(reg), classes, 4)
    found = choices.detect(jnp.asarray(boxes), probabilities, steps, limits(extent), most)
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


def polygon_mask(parts, h, w):
    mask = {"size": [h, w], "counts": encode_outline(parts, (h, w))}
    return decode_masks([mask], (h, w))[0].astype(bool)


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
