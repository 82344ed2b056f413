"""Detections of a set: scores at the size of the stored images, seeds, pictures."""

import dataclasses
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import evaluate
from rope_jax.commands import evaluate as evaluate_command
from rope_jax.config import Config, ConfigError
from rope_jax.data import Truth, check_canvases, decode_image, load
from rope_jax.data.images.masks import decode_masks, encode_mask
from rope_jax.data.sources import scenes
from rope_jax.evaluate.evaluation import Evaluation
from rope_jax.models.heads.detection import Detections
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks import TASKS
from rope_jax.tasks.average_precision import ImageDetections
from rope_jax.tasks.box_pictures import DetectedImage, draw_detections
from rope_jax.tasks.sheets import class_colours
from rope_jax.weights import Preprocessing
from tests.images.coco_set import write_coco
from tests.models.heads.test_dino import HEAD, VIT
from tests.small_run import save_run

task = TASKS["detection"]
CANVASES = ((80, 136), (136, 80), (136, 136))
AS_THEY_ARE = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def by_colour(weight, images, extent):
    """For each class one box around all pixels of its colour, scored by their fraction."""
    bright = images > 0.5
    ends = []
    for axis in (2, 1):  # in x, in y
        present = bright.any(3 - axis)
        places = jnp.arange(present.shape[1])[:, None]
        ends.append((present.argmax(1), (present * (places + 1)).max(1)))
    (left, right), (top, bottom) = ends
    boxes = jnp.stack([left, top, right, bottom], axis=-1).astype(jnp.float32)
    scores = 0.5 + weight * bright.mean((1, 2))
    return Detections(boxes, scores, jnp.tile(jnp.arange(3), (len(images), 1)))


def settings(seeds=1, **changes):
    images = dataclasses.replace(Config().data, **{"canvases": CANVASES, "max_boxes": 4} | changes)
    return dataclasses.replace(Config(), data=images, seeds=seeds)


def score(images, weight=-0.1, **options):
    options = {"config": settings(), "batch_size": 4, "mesh": make_mesh(), **AS_THEY_ARE} | options
    return evaluate.Evaluator(by_colour, np.float32(weight), task, **options).score(images)


@pytest.fixture
def images(tmp_path):
    folder = write_coco(tmp_path / "set")
    return load("coco", str(folder), "test", (136, 136), crop="fit(short=80,long=133)")


def test_boxes_are_scored_in_stored_images_without_crowds(images):
    """Two cats become one wrong box; crowds of dogs are neither detected nor missed.

    The one detected cat is a third of all: 34 of the 101 recalls.
    """
    (row,) = score(images)
    assert row["count"] == 6
    assert row["ap50"] == pytest.approx((34 / 101 + 1 + 1) / 3, abs=1e-6)
    assert row["class_names"] == ["cat", "dog", "bird"]
    assert row["class_ap"][2] > 0.8
    assert row["ap_large"] is None
    assert row["resolution"] == [136, 136]
    order = ("dataset", "split", "resolution", "class_names", "count", "ap", "ap50", "ap75")
    assert tuple(row)[: len(order)] == order


def test_masks_are_scored_next_to_boxes(images):
    """Masks that fill their boxes are as good as these, for objects that do."""

    def filled(weight, images, extent):
        found = by_colour(weight, images, extent)
        some = (found.boxes[..., 2:] > found.boxes[..., :2]).all(axis=-1)
        found = dataclasses.replace(found, scores=jnp.where(some, found.scores, 0))
        return dataclasses.replace(found, masks=jnp.ones((*found.scores.shape, 28, 28)))

    with_masks = load(
        "coco", str(images.source._root), "test", images.size,
        crop=images.crop, labels_of="masks",
    )  # fmt: skip
    options = {"config": settings(), "batch_size": 4, "mesh": make_mesh(), **AS_THEY_ARE}
    evaluator = evaluate.Evaluator(filled, np.float32(-0.1), TASKS["instances"], **options)
    (row,) = evaluator.score(with_masks)
    (boxes,) = score(images)
    assert row["ap50"] == boxes["ap50"]
    assert row["mask_ap50"] == pytest.approx(boxes["ap50"], abs=1e-6)
    assert row["mask_ap"] > 0.5
    assert len(row["mask_class_ap"]) == 3
    (example,) = evaluator.task.predict(evaluator, with_masks, 1)
    cat, bird = decode_masks(example.found.masks, (48, 64))
    assert cat[8:16, 8:22].all()
    assert bird[22:42, 42:54].all()


def test_scores_do_not_depend_on_batch_or_image_sizes(images):
    """Nor on the number of objects in training: one image has two boxes."""
    (row,) = score(images)
    for options in ({"batch_size": 1}, {"config": settings(max_boxes=1)}):
        assert score(images, **options) == [row]
    large = dataclasses.replace(images, crop="fit(short=320,long=532)", size=(544, 544))
    (resized,) = score(large, config=settings(canvases=((544, 544),)))
    assert resized["ap50"] == pytest.approx(row["ap50"], abs=1e-6)


def test_every_seed_has_a_row(images):
    """The second seed scores the wrong box higher: the second of its two boxes of cats is right."""
    rows = score(images, [-0.1, 0.1], config=settings(seeds=2))
    assert rows == [*score(images, -0.1), *score(images, 0.1)]
    assert rows[1]["ap50"] == pytest.approx((34 / 101 / 2 + 1 + 1) / 3, abs=1e-6)


def test_objects_of_skipped_images_are_not_missed(images, tmp_path):
    (tmp_path / "set" / "val2017" / "000000000030.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"000000000030\.jpg"):
        score(images)
    (row,) = score(images, config=settings(bad_images="skip"))
    assert row["count"] == 5
    assert row["ap50"] == pytest.approx((34 / 101 + 1 + 1) / 3, abs=1e-6)


def test_boxes_are_clipped_and_empty_ones_skipped(images):
    batch = {"extent": jnp.array([[50, 100]]), "original": jnp.array([[100, 400]])}
    batch |= {"index": jnp.array([3]), "mask": jnp.array([True])}
    boxes = jnp.array([[[10.0, 5, 60, 70], [100, 0, 120, 50], [20, 20, 20, 30]]])
    outputs = Detections(boxes, jnp.array([[0.9, 0.8, 0.7]]), jnp.array([[2, 0, 1]]))
    part = {name: np.asarray(x) for name, x in task.count(outputs, batch, images).items()}
    detections = task.collect(part)
    assert list(detections) == [3]
    np.testing.assert_array_equal(detections[3].boxes, [[40, 10, 240, 100]])
    assert detections[3].classes.tolist() == [2]
    assert task.collect(part | {"mask": np.array([False])}) == {}


class Cells(nnx.Module):
    """Takes images whose sides are multiples of 16."""

    class_names, head_notation, blocks, task = None, "dino", (2,), "detection"

    def __init__(self, num_classes):
        self.num_classes = num_classes

    def grids(self, size):
        if size[0] % 16 or size[1] % 16:
            raise ValueError("no multiples of 16")


def coco_evaluation(folder, *, config=None, resolutions=None, size=(224, 224), classes=3):
    """The evaluation of --dataset=coco by a model without class names."""
    arguments = {"dataset": "coco", "images": str(folder), "resolutions": resolutions}
    arguments |= {"batch_size": None, "pictures": 0, "extend": None, "log_scale": False}
    arguments |= {"scale_windows": False, "rpb_shrink": None, "limit": None}
    context = (Cells(classes), config, size, Preprocessing(), make_mesh(), folder)
    return Evaluation(arguments, *context)


def test_the_frame_follows_run_requested_size_or_set(tmp_path, monkeypatch):
    used = []

    def count(evaluator, images):
        used.append(evaluator.config.data.canvases)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate.Evaluator, "count", count)
    folder = write_coco(tmp_path / "set")
    eval_config = dataclasses.replace(Config().eval, frame="fit(short=80,long=133)")
    run = dataclasses.replace(settings(), eval=eval_config)
    on_scenes = dataclasses.replace(run, eval=Config().eval)  # images of one size
    requested = {"config": run, "resolutions": "48x72", "size": (48, 72)}
    for options, frame, size, canvases in (
        ({"config": run}, (80, 133), (224, 224), CANVASES),
        (requested, (48, 72), (48, 72), ((48, 80), (80, 48), (80, 80))),
        ({}, (800, 1333), (800, 1333), ((800, 1344), (1344, 800), (1344, 1344))),
        ({"config": on_scenes}, (800, 1333), (800, 1333), ((800, 1344), (1344, 800), (1344, 1344))),
    ):
        evaluation = coco_evaluation(folder, **options)
        assert evaluation.images.crop == "fit(short={},long={})".format(*frame)
        assert evaluation.images.size == size
        with pytest.raises(KeyboardInterrupt):
            evaluation.row()
        assert used.pop() == canvases
        check_canvases(evaluation.images, "none", canvases)
        identity = {"head": "dino", "blocks": [2], "images": str(folder)}
        assert evaluation.identity() == identity | {
            "frame": evaluation.images.protocol
        }  # rows of others differ


def test_unscorable_sets_are_refused_before_reading(tmp_path, monkeypatch):
    folder = write_coco(tmp_path / "set")
    for classes in (2, 4):
        with pytest.raises(ConfigError, match=f"model has {classes} classes, and set has 3: use"):
            coco_evaluation(folder, classes=classes).row()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rope_jax\[coco\]'"):
        coco_evaluation(folder).row()


@pytest.mark.slow
def test_the_command_writes_rows_a_class_table_and_a_picture(tmp_path, capsys, monkeypatch):
    """A run with fresh weights, whose boxes are arbitrary."""
    monkeypatch.setitem(scenes.COUNTS, "test", 5)
    options = ",".join(f"{name}={value}" for name, value in VIT.items() if name != "image_size")
    model = {"name": "deit_ti16", "options": options, "head": HEAD, "num_classes": 10}
    save_run(tmp_path, 3, model=model, data={"source": "scenes", "image_size": 32})
    flags = [str(tmp_path), "--pictures=2", "--batch_size=2"]
    evaluate_command.main(flags)
    assert "\n    9  0." in capsys.readouterr().out  # the last class
    evaluate_command.main([*flags, "--pycocotools"])  # no further evaluation
    (first,) = json.loads((tmp_path / "evaluations.json").read_text())["rows"]
    assert (first["resolution"], first["count"], len(first["class_ap"])) == ([32, 32], 5, 10)
    assert 0 <= first["ap"] < 0.5
    picture = decode_image((tmp_path / "predictions_32x32.png").read_bytes())
    assert picture.shape == (22 + 2 * (480 + 22) + 12, 12 + 2 * (480 + 12), 3)


def test_boxes_and_masks_have_the_colours_of_their_classes(tmp_path):
    """Panels of 480 pixels for an image of 48, 12 apart, below a line of 22 pixels.

    A mask has half of the colour and half of the image.
    """
    boxes = np.array([[10.0, 20, 30, 40], [1, 1, 9, 9]])
    truth = Truth(boxes, np.int32([1, 0]), np.array([False, True]), np.array([400.0, 64]))
    detections = ImageDetections(boxes, np.array([0.5, 0.29]), np.array([2, 0]))
    mask = np.zeros((48, 48), bool)
    mask[25:35, 15:25] = True
    masks = [[encode_mask(x), encode_mask(np.zeros_like(x))] for x in (mask, ~mask)]
    pixels = np.full((48, 48, 3), 9, np.uint8)
    plain = DetectedImage(pixels, truth, detections)
    filled = DetectedImage(
        pixels, truth._replace(masks=masks[0]), detections._replace(masks=masks[1])
    )
    draw_detections([plain, filled], ["a", "b", "c"], 3, tmp_path / "p.png")
    sheet = decode_image((tmp_path / "p.png").read_bytes())
    assert sheet.shape == (22 + 2 * (480 + 22) + 12, 12 + 2 * (480 + 12), 3)
    colours = class_colours(4)[1:]
    (left, right), masked = (
        [sheet[top : top + 480, start : start + 480] for start in (12, 504)] for top in (22, 524)
    )
    for panel, colour in ((left, colours[1]), (right, colours[2])):
        edge = panel[200:400, 100:300]
        assert (edge[[0, -1]] == colour).all()
        assert (edge[:, [0, -1]] == colour).all()
        assert (edge[5:-5, 5:-5] == 9).all()
    assert (left[89, 10:90] == colours[0]).all()
    assert (right[89, 10:90] == 9).all()  # its score is too low
    mixed = (colours.astype(int) + 9) // 2
    for panel, inside, outside in ((masked[0], mixed[1], 9), (masked[1], 9, mixed[2])):
        assert (panel[255:345, 155:245] == inside).all()
        assert (panel[450:, :] == outside).all()
