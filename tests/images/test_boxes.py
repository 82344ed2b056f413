"""Batches of images with boxes: canvases, padding, shards, resuming; and the boxes of scenes."""

import numpy as np
import pytest

from rope_jax import data
from rope_jax.data import BadImages, batches, evaluation_batches, load
from rope_jax.data.sources.scenes import draw_scene
from tests.images.coco_set import write_coco
from tests.images.streams import assert_same, join_batches, take
from tests.images.test_fits import SMALL

CROP = "detr_crop({})".format(",".join(f"{name}={value}" for name, value in SMALL.items()))
CANVASES = ((80, 136), (136, 80), (96, 96), (136, 136))
OPTIONS = {"seed": 3, "augment": f"{CROP}+flip", "canvases": CANVASES, "max_boxes": 5}
FIT = "fit(short=80,long=133)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "set")


@pytest.fixture(params=["boxes", "masks"])
def images(folder, request):
    return load("coco", str(folder), "train", (136, 136), crop=FIT, labels_of=request.param)


def unpack(batch):
    return np.unpackbits(batch["masks"], axis=-1, count=batch["image"].shape[2]).astype(bool)


def check_padding(batch, max_boxes):
    assert batch["label"].shape[1] == max_boxes
    for k, (height, width) in enumerate(batch["extent"]):
        image, label, boxes = (batch[name][k] for name in ("image", "label", "boxes"))
        assert (batch["extent"][k] <= image.shape[:2]).all()
        assert not image[height:].any()
        assert not image[:, width:].any()
        assert not boxes[label == -1].any()
        starts, stops = boxes[label != -1, :2], boxes[label != -1, 2:]
        assert ((starts >= 0) & (starts < stops) & (stops <= (width, height))).all()


def test_training_batches(images):
    """Fields, padding and the smallest canvas; what is in the boxes is checked with the masks."""
    canvases = set()
    for batch in take(30, batches(images, batch_size=3, **OPTIONS)):
        canvas = batch["image"].shape[1:3]
        masks = {"masks": (np.uint8, (5, canvas[0], -(-canvas[1] // 8)))}
        assert {name: (array.dtype, array.shape[1:]) for name, array in batch.items()} == {
            **(masks if images.labels_of == "masks" else {}),
            "image": (np.uint8, (*canvas, 3)),
            "boxes": (np.float32, (5, 4)),
            "label": (np.int32, (5,)),
            "extent": (np.int32, (2,)),
            "original": (np.int32, (2,)),
            "epoch": (np.int32, ()),
            "index": (np.int32, ()),
        }
        check_padding(batch, 5)
        fitting = [c for c in CANVASES if (batch["extent"] <= c).all()]
        assert canvas == min(fitting, key=np.prod)
        canvases.add(canvas)
        np.testing.assert_array_equal(
            batch["original"], images.annotations.sizes[batch["index"] % 4]
        )
    assert len(canvases) >= 3


def test_shards_share_a_canvas_and_streams_resume(images):
    options = OPTIONS | {"batch_size": 4}
    stream = take(6, batches(images, **options))
    for step in (0, 3, 5):
        halves = [next(batches(images, start_step=step, shard=(k, 2), **options)) for k in (0, 1)]
        assert_same([join_batches(halves)], [stream[step]])
    with batches(images, start_step=2, ahead=True, **options) as resumed:
        assert_same(take(4, resumed), stream[2:])
    assert len({batch["image"].shape for batch in stream}) > 1


def test_images_of_a_batch_are_portrait_or_landscape(tmp_path):
    """In all but one batch of an epoch, 15 batches; two thirds of the images are landscape."""
    sizes = {100 + k: (12, 16) if k % 3 else (16, 12) for k in range(60)}
    folder = write_coco(tmp_path / "many", sizes, {k: [(3, 1, 1, 9, 9)] for k in sizes})
    many = load("coco", str(folder), "train", (20, 20), crop="fit(short=12,long=16)")
    crop = "detr_crop(low=12,high=16,step=4,long=20,before_low=12,before_high=12,before_step=1,"
    options = {"batch_size": 4, "seed": 1, "augment": f"{crop}cut_low=8,cut_high=12)"}
    canvases = {"canvases": ((16, 20), (20, 16), (20, 20)), "max_boxes": 1}
    stream = take(30, batches(many, **options, **canvases))
    portrait = np.array([batch["extent"][:, 0] > batch["extent"][:, 1] for batch in stream])
    mixed = portrait.any(axis=1) & ~portrait.all(axis=1)
    assert mixed.reshape(2, 15).sum(axis=1).max() <= 1
    assert 5 < portrait.all(axis=1).sum() < 20
    assert {batch["image"].shape[1:3] for batch in stream[:15]} >= {(16, 20), (20, 16)}
    assert np.diff(portrait.all(axis=1)[:15]).sum() > 3  # kinds of the batches in turn
    for step, batch in enumerate(stream):
        assert data.batch_ids(many, step, **options) == batch["index"].tolist()
    for epoch in range(2):  # each has every image once
        batches_of_epoch = stream[15 * epoch : 15 * epoch + 15]
        assert {number for batch in batches_of_epoch for number in batch["epoch"]} == {epoch}
        assert sorted(np.concatenate([x["index"] for x in batches_of_epoch])) == list(range(60))


def test_evaluation_has_every_image_once_without_crowds_and_masks(folder, monkeypatch):
    monkeypatch.setattr("rope_jax.data.sources.boxes.decode_masks", None)
    images = load("coco", str(folder), "test", (136, 136), crop=FIT, labels_of="masks")
    options = {"batch_size": 4, "canvases": CANVASES, "max_boxes": 4}
    stream = list(evaluation_batches(images, **options))
    assert [batch["mask"].tolist() for batch in stream] == [[True] * 4, [True] * 2 + [False] * 2]
    assert [batch["index"].tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for k in (0, 1):  # all shards have one canvas
        half = evaluation_batches(images, shard=(k, 2), **options)
        assert [batch["image"].shape[1:3] for batch in half] == [(136, 136), (136, 80)]
    for batch in stream:
        assert "masks" not in batch
        check_padding(batch, 4)
        for k in np.flatnonzero(batch["mask"]):
            size = images.annotations.sizes[batch["index"][k]]
            np.testing.assert_array_equal(batch["original"][k], size)
            truth = images.truth(int(batch["index"][k]))
            scale = (batch["extent"][k] / size)[[1, 0, 1, 0]]
            real = batch["label"][k] >= 0
            np.testing.assert_array_equal(batch["label"][k][real], truth.labels[~truth.crowd])
            expected = truth.boxes[~truth.crowd] * scale
            np.testing.assert_allclose(batch["boxes"][k][real], expected, rtol=1e-6)


def test_bad_images_are_replaced_by_ones_that_fit_the_canvas(tmp_path):
    folder = write_coco(tmp_path / "set")
    intact = load("coco", str(folder), "train", (136, 136), crop=FIT)
    options = OPTIONS | {"bad_images": "skip", "batch_size": 1}
    before = take(24, batches(intact, **options))
    (folder / "train2017" / "000000000002.jpg").write_bytes(b"no picture")
    images = load("coco", str(folder), "train", (136, 136), crop=FIT)
    stream = batches(images, **options)
    replaced = 0
    for expected, got in zip(before, stream, strict=False):
        assert got["image"].shape == expected["image"].shape  # as in the other processes
        if expected["index"][0] == 0:
            assert got["original"].tolist() != expected["original"].tolist()
            replaced += 1
        else:
            assert_same([got], [expected])
    assert replaced == 6
    assert stream.skipped == {0}


def test_a_bad_image_that_none_replaces_is_reported(tmp_path):
    folder = write_coco(tmp_path / "set")
    (folder / "train2017" / "000000000011.jpg").write_bytes(b"no picture")
    images = load("coco", str(folder), "train", (136, 136), crop=FIT)
    canvases = ((67, 136), (136, 136))  # only image 1 has 67 rows
    stream = batches(
        images, batch_size=1, seed=3, canvases=canvases, max_boxes=5, bad_images="skip"
    )
    with pytest.raises(BadImages, match=r"image 1 of .*000000000011\.jpg"):
        take(24, stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_boxes": 1}, r"has 2 objects .* max_boxes=1: set it to 2"),
        ({"canvases": [(80, 136)]}, "133x133 pixels, but the canvases are 80x136"),
        ({"canvases": [(80, 136)], "augment": CROP}, "133x133 pixels, but the canvases are 80x136"),
        ({"augment": "resized_crop"}, "not the labels of their (boxes|masks)"),
        ({"augment": "crop(pad=2)"}, "not the labels of their (boxes|masks)"),
    ],
)
def test_batches_refuse_oversized_images_and_counts(images, options, message):
    with pytest.raises(ValueError, match=message):
        batches(images, batch_size=2, seed=0, **options)


@pytest.mark.usefixtures("few_scenes")
def test_scenes_have_the_visible_masks_and_their_boxes():
    images = load("scenes", image_size=(48, 60), labels_of="masks")
    boxes = load("scenes", image_size=(48, 60), labels_of="boxes")
    assert (boxes.labels_of, boxes.classes, boxes.class_names[3]) == ("boxes", 10, "3")
    assert boxes.fingerprint() != images.fingerprint()
    np.testing.assert_array_equal(boxes.annotations.boxes, images.annotations.boxes)
    options = {"batch_size": 12, "seed": 0, "max_boxes": 12, "canvases": CANVASES}
    batch = next(batches(images, **options))
    check_padding(batch, 12)
    assert batch["extent"].tolist() == batch["original"].tolist() == [[48, 60]] * 12  # no padding
    for k, index in enumerate(batch["index"].tolist()):
        scene, real = draw_scene("train", index, (48, 60)), batch["label"][k] >= 0
        np.testing.assert_array_equal(batch["image"][k], scene.image)
        np.testing.assert_array_equal(batch["label"][k][real], scene.digits)
        np.testing.assert_array_equal(unpack(batch)[k][real], scene.masks)
        np.testing.assert_array_equal(images.truth(index).area, scene.masks.sum((1, 2)))
        for mask, box in zip(scene.masks, batch["boxes"][k][real], strict=True):
            rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
            assert box.tolist() == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    flipped = next(batches(images, augment="flip(p=1.0)", **options))
    np.testing.assert_array_equal(unpack(flipped), unpack(batch)[..., ::-1])
    np.testing.assert_array_equal(flipped["boxes"][..., 1::2], batch["boxes"][..., 1::2])


@pytest.mark.usefixtures("few_scenes")
@pytest.mark.parametrize("labels_of", [None, "pixels", "images"])
def test_the_kind_of_labels_can_be_chosen(labels_of):
    assert load("scenes", image_size=16, labels_of=labels_of).labels_of == "pixels"
    assert load("digits", labels_of="boxes").labels_of == "images"
