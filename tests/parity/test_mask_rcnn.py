"""Mask R-CNN equals mmdetection's in float64: parts, losses, gradients and detections."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.data.images.masks import decode_masks, encode_outline
from rope_jax.models.heads.detection import Targets, scale_boxes
from rope_jax.models.heads.mask_rcnn.choices import Example, make_anchors
from rope_jax.models.heads.mask_rcnn.losses import region_losses
from rope_jax.models.heads.mask_rcnn.regions import align
from rope_jax.weights import export_state_dict
from tests.parity import mask_rcnn as parts
from tests.parity.mask_rcnn import DATA, golden, nhwc, noise

pytestmark = pytest.mark.usefixtures("x64")


def assert_near(actual, expected, limit=1e-9):
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit * scale)


def unpack(bits, width):
    return np.unpackbits(bits, axis=-1, count=width).astype(bool)


def test_anchors():
    case, _, arrays = golden("anchors")
    expected = np.concatenate([arrays[f"level{i}"] for i in range(5)])
    assert_near(parts.anchors(case["maps"]), expected)
    for i, padded in enumerate(case["padded"]):
        np.testing.assert_array_equal(parts.valid(case["maps"], padded), arrays[f"valid{i}"])


def test_anchors_are_assigned_and_become_proposals():
    case, _, arrays = golden("rpn")
    anchors, counts = parts.anchors(case["maps"]), [3 * h * w for h, w in case["maps"]]
    images = range(len(case["extents"]))
    shape = (len(images), len(anchors))
    order = np.random.default_rng(case["seed"] + 1).permutation(math.prod(shape))
    logits = (8 * order / order.size - 4).reshape(shape).astype(np.float32).astype(float)
    steps = noise((*shape, 4), case["seed"] + 2).astype(np.float32) * np.float32(0.3)
    steps[:, ::97, 2:] *= 12  # some beyond the limit
    steps = steps.astype(float)
    for i in images:
        valid = parts.valid(case["maps"], case["padded"][i])
        assigned = np.full(len(anchors), -2)
        assigned[valid] = parts.assign(anchors[valid], arrays[f"objects{i}"], 0.7, 0.3)
        np.testing.assert_array_equal(assigned, arrays[f"assigned{i}"])
        for kind in ("train", "test"):
            numbers = (case[kind]["pre"], case[kind]["post"])
            proposals = parts.proposals(
                logits[i], steps[i], anchors, counts, case["extents"][i], *numbers
            )
            for actual, name in zip(proposals, ("boxes", "scores"), strict=True):
                assert_near(actual, arrays[f"{kind}_{name}{i}"])


def test_regions_of_any_shape_and_their_gradients():
    case, _, arrays = golden("roi")
    maps = [
        noise((case["images"], case["channels"], *size), case["seed"] + 1 + i)
        for i, size in enumerate(case["maps"])
    ]
    boxes, image = arrays["boxes"], arrays["image"]
    np.testing.assert_array_equal(parts.levels(boxes), arrays["levels"])
    np.testing.assert_array_equal(parts.levels(arrays["edges"]), arrays["edge_levels"])
    assert_near(parts.roi_features(maps, boxes, image, 14)[:, :1], arrays["out14"])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(maps, cotangent):
        everywhere = jnp.broadcast_to(boxes, (case["images"], *boxes.shape))
        out = align(maps, everywhere, parts.STRIDE, 7)[image, np.arange(len(boxes))]
        return (out * cotangent).sum(), out

    cotangent = nhwc(noise(arrays["out7"].shape, case["seed"] + 9))
    (_, out), gradients = total([nhwc(x) for x in maps], cotangent)
    assert_near(parts.nchw(out), arrays["out7"])
    assert_near([np.linalg.norm(x) for x in gradients], arrays["grad_norms"])


@pytest.fixture(scope="module")
def detector():
    """The golden of the whole head: its settings, arrays, and input maps."""
    case, state, arrays = golden("detector")
    shapes = enumerate(zip(case["channels"], case["maps"], strict=True))
    count = len(case["extents"])
    maps = [noise((count, c, *size), case["seed"] + 1 + i) for i, (c, size) in shapes]
    return case, state, arrays, maps


def make_example(case, arrays, anchors, proposals, scores):
    """The objects of both images, and draws that choose the official samples."""
    rows, extents = max(case["objects"]), jnp.asarray(case["extents"])
    boxes, labels = np.zeros((2, rows, 4)), np.full((2, rows), -1, np.int32)
    masks = np.zeros((2, rows, *arrays["masks0"].shape[1:]), np.uint8)
    anchor_draws, draws = np.zeros((2, anchors)), np.zeros((2, rows + proposals.shape[1]))
    for i, count in enumerate(case["objects"]):
        boxes[i, :count], labels[i, :count] = arrays[f"objects{i}"], arrays[f"labels{i}"]
        masks[i, :count] = arrays[f"masks{i}"]
        for kind in ("positives", "negatives"):
            anchor_draws[i, arrays[f"rpn_{kind}{i}"]] = 1
            index = arrays[f"roi_{kind}{i}"]
            draws[i, np.where(index < count, index, index - count + rows)] = 1
    scaled = scale_boxes(jnp.asarray(boxes), extents)
    targets = Targets(scaled, jnp.asarray(labels), jnp.asarray(masks))
    draws = (jnp.asarray(anchor_draws), jnp.asarray(draws))
    return Example(targets, extents, proposals, scores, draws)


def test_losses_and_gradients_for_the_official_samples(detector):
    case, state, arrays, maps = detector
    graph, params = nnx.split(parts.make_head(case, state, case["train"]))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def total(params, maps):
        head = nnx.merge(graph, params)
        pyramid = head.pyramid(maps)
        levels = head.anchor_head(pyramid)
        sizes = [x.shape[1:3] for x in pyramid]
        anchors = [jnp.asarray(x) for x in make_anchors(sizes, parts.STRIDE)]
        extents = jnp.asarray(case["extents"])
        proposals, scores = head.propose(levels, anchors, extents, case["train"]["pre"])
        count = sum(map(len, anchors))
        example = make_example(case, arrays, count, proposals, scores)
        regions = functools.partial(align, pyramid[:-1], stride=parts.STRIDE)
        predictions = head.predict_samples(
            regions, levels, example, jnp.concatenate(anchors), parts.STRIDE
        )
        loss, accuracy = head.loss(predictions, {})
        return loss, (region_losses(predictions), accuracy, proposals, predictions.targets)

    (loss, (values, accuracy, proposals, chosen)), gradients = total(
        params, [nhwc(x) for x in maps]
    )
    for name, value in values.items():
        assert_near(value, arrays[name])
    assert_near(loss, arrays["total"])
    assert_near(100 * accuracy, arrays["acc"])
    for i in range(2):
        assert_near(proposals[i], arrays[f"proposals{i}"])
        positives = (chosen.labels[i] >= 0) & (chosen.labels[i] < case["classes"])
        owners = arrays[f"labels{i}"][arrays[f"roi_owner{i}"]]
        np.testing.assert_array_equal(chosen.labels[i][positives], owners)
    exported = export_state_dict(nnx.merge(graph, gradients[0]), source="vit_adapter")
    norms = [np.linalg.norm(exported[name]) for name in state]
    assert_near(norms, arrays["grad_norms"])
    assert_near([np.linalg.norm(x) for x in gradients[1]], arrays["grad_map_norms"])


def test_detections(detector):
    case, state, arrays, maps = detector
    graph, params = nnx.split(parts.make_head(case, state, case["test"]))
    size = tuple(4 * side for side in case["maps"][0])

    @jax.jit
    def run(params, maps, extent):
        return nnx.merge(graph, params)(maps, image_size=size, extent=extent)

    found = run(params, [nhwc(x) for x in maps], jnp.asarray(case["extents"]))
    for i, (extent, original) in enumerate(zip(case["extents"], case["originals"], strict=True)):
        boxes = np.asarray(found.boxes[i]) * np.tile(np.divide(original, extent)[::-1], 2)
        assert_near(boxes, arrays[f"boxes{i}"])
        assert_near(found.scores[i], arrays[f"scores{i}"])
        np.testing.assert_array_equal(found.classes[i], arrays[f"classes{i}"])
        rows = zip(np.asarray(found.masks[i]), boxes, strict=True)
        pasted = np.array([parts.paste_whole(mask, box, original) for mask, box in rows])
        expected = unpack(arrays[f"detected_masks{i}"], original[1])
        np.testing.assert_array_equal((pasted >= 0.5)[sure(pasted)], expected[sure(pasted)])


def sure(pasted):
    return np.abs(pasted - 0.5) > 1e-5


def test_suppression_within_classes():
    case, _, arrays = golden("inference")
    scores, steps = arrays["cls"].astype(float), arrays["reg"].astype(float)
    for most in case["most"]:
        found = parts.detect(arrays["proposals"], scores, steps, case["extent"], most)
        for name, actual in zip(("boxes", "scores", "classes"), found, strict=True):
            assert_near(actual, arrays[f"{name}{most}"])


def test_pasting():
    case, _, arrays = golden("paste")
    logits = noise((len(arrays["boxes"]), case["classes"], 28, 28), case["seed"] + 1)
    pasted = parts.paste(logits, arrays["boxes"], arrays["labels"], case["original"], case["scale"])
    width = case["original"][1]
    compared = sure(pasted) & ~unpack(arrays["near_half"], width)
    expected = unpack(arrays["masks"], width)
    np.testing.assert_array_equal((pasted >= 0.5)[compared], expected[compared])


def test_average_precision_of_masks_and_boxes():
    content = json.loads((DATA / "mask_ap.json").read_text())
    for overlap in ("masks", "boxes"):
        scores = parts.mask_ap(content, overlap)
        for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium"):
            assert scores[name] == pytest.approx(content[overlap]["stats"][name], abs=1e-12)
        assert scores["ap_large"] is None
        assert scores["class_ap"] == pytest.approx(content[overlap]["class_ap"], abs=1e-12)


def test_polygons():
    content = json.loads((DATA / "polygons.json").read_text())
    height, width = content["size"]
    for entry in content["objects"]:
        runs = entry["runs"]
        expected = np.repeat(np.arange(len(runs)) % 2, runs).reshape(width, height).T
        for outline in (
            entry["segmentation"],
            {"size": [height, width], "counts": entry["counts"]},
            {"size": [height, width], "counts": runs},
        ):
            mask = {"size": content["size"], "counts": encode_outline(outline, (height, width))}
            np.testing.assert_array_equal(decode_masks([mask], (height, width))[0], expected)
