"""DINO: sizes, definitions of its losses and choices, padding, gradients, weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import resolve
from rope_jax.models.heads.boxes import iou, to_corners
from rope_jax.models.heads.detection import Targets, best_detections
from rope_jax.models.heads.dino.denoising import make_slots
from rope_jax.models.heads.dino.head import DinoPredictions
from rope_jax.models.heads.dino.levels import padding_mask
from rope_jax.models.heads.dino.losses import box_losses, match_targets
from rope_jax.models.heads.dino.options import DinoOptions
from rope_jax.models.heads.dino.transformer import Transformer
from rope_jax.models.layers import layer_dtypes
from rope_jax.tasks import TASKS
from tests.models.small import (
    abstract_call,
    check_gradients,
    compile_call,
    compile_gradient,
    fill,
    make_filled_model,
)

HEAD = (
    "dino(width=16,groups=4,heads=2,points=2,encoder_depth=1,decoder_depth=2,hidden=16,queries=8,"
    "denoising=4,detections=5)"
)
VIT = {
    "width": 16,
    "heads": 2,
    "depth": 2,
    "image_size": 32,
    "patch_size": 4,
    "class_token": False,
    "attention": "window",
    "window_size": 3,
    "global_blocks": (1,),
    "window_padding": "tokens",
}
SWIN = {"width": 8, "heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "image_size": 64}
CLASSES = 3


@pytest.mark.parametrize(
    ("name", "small", "shapes"),
    [
        ("deit_ti16", VIT, [(16, 24, 16), (8, 12, 16), (4, 6, 16), (2, 3, 16)]),
        ("swin_t", SWIN, [(4, 6, 16), (2, 3, 32), (1, 2, 64)]),
    ],
)
def test_backbones_give_the_maps_that_the_head_takes(name, small, shapes):
    model = make_filled_model(name, head=HEAD, num_classes=CLASSES, **small)
    maps = abstract_call(model, 32, 48, "head_maps")
    assert [x.shape[1:] for x in maps] == shapes


def test_images_need_at_least_as_many_tokens_as_queries():
    head = HEAD.replace("queries=8", "queries=85")
    model = make_filled_model("deit_ti16", head=head, num_classes=CLASSES, **VIT)
    model.check_size((16, 16))  # 8 x 8 + 4 x 4 + 2 x 2 + 1
    with pytest.raises(ValueError, match=r"queries=85 .* 12x16 .*head=dino\(queries=63\)"):
        model.check_size((12, 16))


@pytest.fixture(scope="module")
def model():
    return make_filled_model("deit_ti16", head=HEAD, num_classes=CLASSES, **VIT)


def some_batch(counts=(3, 0), rows=4):
    """A batch like that of `prepare_batch`; its second image is padded."""
    rng = np.random.default_rng(0)
    size = rng.uniform(0.1, 0.4, (len(counts), rows, 2))
    boxes = np.concatenate([rng.uniform(0.3, 0.7, size.shape), size], axis=-1)
    labels = rng.integers(0, CLASSES, (len(counts), rows))
    labels[np.arange(rows) >= np.array(counts)[:, None]] = -1
    share = len(counts) / max((labels >= 0).sum(), 1)
    return {
        "image": jnp.asarray(rng.standard_normal((len(counts), 32, 48, 3)), jnp.float32),
        "extent": jnp.array([[32, 48], [28, 40]]),
        "boxes": jnp.asarray(boxes, jnp.float32),
        "label": jnp.asarray(labels, jnp.int32),
        "share": jnp.full(len(counts), share, jnp.float32),
    }


@pytest.fixture(scope="module")
def gradient(model):
    loss = lambda model, batch, key: TASKS["detection"].loss(model, batch, resolve({}), key=key)
    return compile_gradient(model, loss, has_aux=True)


@pytest.mark.parametrize("counts", [(3, 0), pytest.param((0, 0), marks=pytest.mark.slow)])
def test_gradients_are_finite_without_boxes(gradient, counts):
    (value, _), grads = gradient(some_batch(counts), jax.random.key(0))
    assert np.isfinite(value)
    check_gradients(grads, silent=lambda path: not any(counts))


def test_only_training_draws_denoising(model, gradient):
    batch = some_batch()
    first, second, again = (gradient(batch, jax.random.key(n))[0][0] for n in (0, 1, 0))
    assert first == again
    assert first != second
    with pytest.raises(ValueError, match=r"needs a key for .*denoising"):
        model.predict(batch["image"], train=True)


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 0)])
def test_the_loss_sums_all_layers_and_denoising(model, counts):
    """A batch without boxes has no loss of denoising, as in detrex.

    tests/parity compares matches and the terms of the losses with detrex.
    """
    rng = np.random.default_rng(0)
    batch, layers, queries = some_batch(counts), 3, 7
    targets = Targets(batch["boxes"], batch["label"])
    slots = jax.jit(make_slots, static_argnums=1)(targets.real, 7)
    many = len(slots.group)

    def draw(*shape):
        logits = 2 * rng.standard_normal((*shape, CLASSES), np.float32)
        return jax.device_put((logits, rng.uniform(0.05, 0.6, (*shape, 4)).astype(np.float32)))

    matching, noisy = draw(layers, 3, queries), draw(layers - 1, 3, many)
    predictions = DinoPredictions(*matching, None, (*noisy, slots))
    loss, hit_rate = jax.jit(model.head.loss)(predictions, batch)
    # Two groups of 2 x 3 slots, of which the first three are positive; two more are not used.
    place, shape = np.arange(many) % 6, noisy[0].shape[:-1]
    labels = np.where(place < 3, np.asarray(targets.labels)[:, place % 3], -1)
    boxes = np.asarray(targets.boxes)[:, place % 3]
    assigned = Targets(
        *jax.device_put((np.broadcast_to(boxes, (*shape, 4)), np.broadcast_to(labels, shape)))
    )

    @jax.jit
    def sum_losses(matching, noisy, targets, assigned, used):
        matched = match_targets(*matching, targets)
        all_terms = box_losses(*matching, matched), box_losses(*noisy, assigned, used)
        sums = [(terms.classes + 5 * terms.l1 + 2 * terms.giou).sum() for terms in all_terms]
        logits, boxes, last = jax.tree.map(lambda x: x[-2], (*matching, matched))
        overlaps = iou(to_corners(boxes), to_corners(last.boxes))
        hits = last.real & (overlaps >= 0.5) & (logits.argmax(-1) == last.labels)
        return *sums, hits.sum()

    total, denoising, hits = sum_losses(matching, noisy, targets, assigned, np.arange(many) < 12)
    expected = total + (denoising / 2 if any(counts) else 0)
    np.testing.assert_allclose(loss, expected / max(sum(counts), 1), rtol=1e-5)
    np.testing.assert_allclose(hit_rate, hits / max(sum(counts), 1), rtol=1e-6)


def test_parts_of_a_batch_average_to_its_loss(model):
    """Accumulated gradients are therefore those of the whole batch, whatever the parts hold."""
    rng = np.random.default_rng(0)
    batch = some_batch((3, 0))
    logits, boxes = rng.standard_normal((2, 2, 8, CLASSES)), rng.uniform(0.1, 0.9, (2, 2, 8, 4))
    run = jax.jit(model.head.loss)

    def loss(images):
        truth = {name: batch[name][images] for name in ("boxes", "label", "share")}
        selected = (jnp.asarray(x[:, images], jnp.float32) for x in (logits, boxes))
        return float(run(DinoPredictions(*selected, None), truth)[0])

    parts = [loss(slice(0, 1)), loss(slice(1, 2))]
    np.testing.assert_allclose(np.mean(parts), loss(slice(0, 2)), rtol=1e-6)


@pytest.fixture(scope="module")
def transformer():
    sizes = {"width": 16, "groups": 1, "levels": 2, "queries": 5, "encoder_depth": 1}
    sizes |= {"decoder_depth": 2, "heads": 2, "points": 2, "hidden": 16}
    options, dtypes = DinoOptions(**sizes), layer_dtypes(jnp.dtype(jnp.float32))
    make = lambda: Transformer(options, CLASSES, rngs=nnx.Rngs(0), dtypes=dtypes)
    return fill(nnx.eval_shape(make))


def test_padding_does_not_change_the_chosen_boxes(transformer):
    """Maps on a larger canvas, with noise in the padding, give the same first boxes.

    (The decoder's positions of queries are those on the first map, padding included, by detrex's
    definition, which the golden has.)
    """
    rng = np.random.default_rng(0)
    run = compile_call(transformer)
    draw = lambda *size: rng.standard_normal((1, *size, 16)).astype(np.float32)
    original_maps, results = [draw(6, 8), draw(3, 4)], []
    for canvas in ((48, 64), (64, 96)):
        sizes = [tuple(side // stride for side in canvas) for stride in (8, 16)]
        maps = [draw(*size) for size in sizes]
        for larger, original in zip(maps, original_maps, strict=True):
            larger[:, : original.shape[1], : original.shape[2]] = original
        padding = [padding_mask(jnp.array([[48, 64]]), canvas, size) for size in sizes]
        results.append(run([jnp.asarray(x) for x in maps], padding))
    for name in ("initial", "chosen", "proposals"):
        first, second = (getattr(result, name) for result in results)
        np.testing.assert_allclose(first, second, atol=2e-5, err_msg=name)


def test_boxes_of_a_layer_train_the_previous_one(transformer):
    """Look forward twice: gradients flow from a layer's reference boxes to the previous layer.

    They do not flow to the selection of queries or to what a layer attends to.
    """
    maps = [
        jax.random.normal(jax.random.key(n), (1, *size, 16))
        for n, size in enumerate(((4, 4), (2, 2)))
    ]
    padding = [jnp.zeros((1, *size), bool) for size in ((4, 4), (2, 2))]

    def second_boxes(model):
        outputs = model(maps, padding)
        states = jax.lax.stop_gradient(outputs.states[1])
        return model.refine(1, states, outputs.references[0]).sum()

    _, grads = compile_gradient(transformer, second_boxes)()
    moved = [bool(np.any(grads["boxes"][n]["layers"][2]["kernel"][...])) for n in range(3)]
    assert moved == [True, True, False]


def test_detections_are_the_highest_scoring_pairs_of_boxes_and_classes():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 6, CLASSES)).astype(np.float32)
    boxes = rng.uniform(0.1, 0.9, (2, 6, 4)).astype(np.float32)
    extent = np.array([[30, 50], [20, 10]])
    run = jax.jit(best_detections, static_argnums=3)
    detections = run(logits, boxes, extent, 7)
    for image in range(2):
        query, kind = np.divmod(np.argsort(-logits[image].ravel())[:7], CLASSES)
        np.testing.assert_array_equal(detections.classes[image], kind)
        scores = 1 / (1 + np.exp(-logits[image, query, kind]))
        np.testing.assert_allclose(detections.scores[image], scores, rtol=1e-5)
        centre, side = np.split(boxes[image, query], 2, axis=1)
        corners = np.concatenate([centre - side / 2, centre + side / 2], axis=1)
        expected = corners.clip(0, 1) * np.tile(extent[image, ::-1], 2)
        np.testing.assert_allclose(detections.boxes[image], expected, rtol=1e-4, atol=1e-4)


def test_images_without_padding_need_no_extent(model):
    run, images = compile_call(model), some_batch()["image"]
    implicit, explicit = run(images), run(images, jnp.array([[32, 48]] * 2))
    assert implicit.boxes.shape == (2, 5, 4)
    for name in ("boxes", "scores", "classes"):
        np.testing.assert_allclose(getattr(implicit, name), getattr(explicit, name), atol=1e-5)
    assert (implicit.scores[:, 1:] <= implicit.scores[:, :-1]).all()


@pytest.mark.slow
def test_an_exported_program_takes_padded_images(model, tmp_path):
    batch = some_batch()
    rope_jax.export(model, tmp_path / "dino.bin", resolution=(32, 48), platforms=("cpu",))
    outputs = rope_jax.load_exported(tmp_path / "dino.bin").call(batch["image"], batch["extent"])
    expected = compile_call(model)(batch["image"], batch["extent"])
    assert set(outputs) == {"boxes", "scores", "classes"}
    for name, values in outputs.items():
        np.testing.assert_allclose(values, getattr(expected, name), atol=1e-4)
