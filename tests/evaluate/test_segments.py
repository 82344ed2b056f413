"""Segmentation of sets: scores by definition, views, programs, pictures, and the command."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import data
from rope_jax.commands import evaluate as evaluate_command
from rope_jax.config import ConfigError, resolve
from rope_jax.data.sources import scenes
from rope_jax.data.sources.index import BadImages
from rope_jax.system.sharding import make_mesh
from rope_jax.tasks import TASKS
from rope_jax.tasks.dense import check_classes
from rope_jax.tasks.evaluator import Evaluator
from rope_jax.tasks.segments import Views
from tests.models.small import abstract
from tests.refusals import expect_refusal
from tests.small_run import save_run
from tests.tasks.iou import assert_scores

ZEROS = np.zeros(4, np.float32)


def by_colour(weights, images):
    """Scores of four classes, one of them nowhere, from the red of single pixels."""
    red = images[..., :1]
    return -jnp.square(red - jnp.array([0.0, 0.4, 0.8, 9.0])) * 50 + weights


class Patches(nnx.Module):
    """The interface of a model of four classes and patches of 4 pixels."""

    num_classes, class_names, head = 4, None, types.SimpleNamespace(probabilities=jax.nn.softmax)

    def grids(self, size):
        if size[0] % 4 or size[1] % 4:
            raise ValueError("no multiples of 4")


def split(
    images, views, apply=by_colour, weights=ZEROS, pictures=0, bad_images="error", model=None
):
    config, model = resolve({"data": {"bad_images": bad_images}}), model or Patches()
    task, steps = TASKS["segmentation"], {"batch_size": 2, "mesh": make_mesh(), "config": config}
    evaluator = Evaluator(apply, weights, task, mean=(0.0,) * 3, std=(1.0,) * 3, **steps)
    window = "whole" if views.window is None else "x".join(map(str, views.window))
    request = {"scales": views.scales, "flip": views.flip, "window": window}
    stride = views.stride if views.window else None
    return task.evaluate(evaluator, model, images, pictures, request | {"stride": stride})


@pytest.fixture
def masks(tmp_path):
    """Four images with a short side of 24 pixels, and labels that are wrong in two rows."""
    return write_masks(tmp_path, {"a": (24, 40), "b": (40, 24), "c": (24, 24), "d": (24, 40)})


def write_masks(path, sizes):
    """Images of three classes of grey, to be resized to a short side of 24 pixels."""
    folder = path / "set" / "test"
    folder.mkdir(parents=True)
    (path / "set" / "classes.txt").write_text("low\nmiddle\nhigh\nnone\n")
    rng = np.random.default_rng(0)
    for name, size in sizes.items():
        quarters = np.ones([-(-side // 2) for side in size])
        classes = np.kron(rng.integers(0, 3, (2, 2)), quarters)[: size[0], : size[1]]
        red = np.uint8(np.round(classes * 102))
        Image.fromarray(np.stack([red, red, red], -1)).save(folder / f"{name}.jpg", quality=100)
        labels = classes.astype(np.uint8)
        labels[:3, :5], labels[5:7] = 255, 2
        Image.fromarray(labels).save(folder / f"{name}.png")
    return data.load("masks", str(path / "set"), "test", (24, 24))


@pytest.mark.parametrize("views", [Views(), Views(window=(16, 16), stride=8), Views(flip=True)])
def test_scores_are_computed_at_the_size_of_labels(masks, views):
    row, pictures = split(masks, views, pictures=2)
    stored = [masks.original(number) for number in range(4)]
    red = np.concatenate([image[..., 0].ravel() for image, _ in stored]) / 255
    true = np.concatenate([labels.ravel() for _, labels in stored])
    assert_scores(row, abs(red[:, None] - [0, 0.4, 0.8]).argmin(-1), true, 4)
    assert row["iou"][3] is None  # the class is in no image
    assert row["count"] == 4
    assert str(views) in row["protocol"]
    assert "short side of 24 pixels, at most 96 long" in row["protocol"]
    image, labels, predicted = pictures[1]
    assert image.shape[:2] == labels.shape == predicted.shape == (40, 24)
    assert (predicted == labels)[labels != 255].mean() > 0.8


@pytest.mark.parametrize(
    ("views", "shapes"),
    [
        (Views((1.0, 1.5), flip=True, window=(16, 16), stride=8), [(2, 16, 16)]),
        (Views(flip=True), [(1, 24, 24), (1, 24, 48), (1, 48, 24)]),
        pytest.param(
            Views((0.5, 1.0), flip=True),
            [(1, 12, 12), (1, 12, 24), (1, 24, 12), (1, 24, 24), (1, 24, 48), (1, 48, 24)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_programs_serve_all_images(tmp_path, views, shapes):
    """A ViT is traced once per shape, and has six sizes of images as windows or canvases."""
    sizes = [(24, 40), (40, 24), (24, 24), (24, 33), (30, 47), (47, 30)]
    images = write_masks(tmp_path, dict(zip("abcdef", sizes, strict=True)))
    small = {"patch_size": 4, "depth": 1, "width": 16, "heads": 2, "image_size": 16}
    model = rope_jax.create_model("vit_digits", head="linear", num_classes=4, **small)
    graph, state = nnx.split(model)
    traced = []

    def apply(state, x):
        traced.append(x.shape[:3])
        return nnx.merge(graph, state)(x)

    row, _ = split(images, views, apply=apply, weights=state)
    assert row["count"] == 6
    assert sorted(traced) == shapes


def test_damaged_images_are_errors_or_skipped(masks):
    file = masks.source.label_file(2)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(BadImages, match=r"c\.png"):
        split(masks, Views())
    assert split(masks, Views(), bad_images="skip")[0]["count"] == 3


@pytest.mark.parametrize(
    ("views", "fit", "sizes"),
    [
        (Views((0.5, 1.0), flip=True), (512, 2048), [(256, 341), (512, 683)]),
        (Views((0.5,)), None, [(150, 200)]),
        (Views((0.5,), window=(512, 512), stride=341), (512, 2048), [(512, 683)]),
    ],
)
def test_views_have_mmsegmentations_sizes(views, fit, sizes):
    results = list(views.apply(np.zeros((300, 400, 3), np.float32), fit))
    flips = [False, True] if views.flip else [False]
    expected = [(size, flipped) for size in sizes for flipped in flips]
    assert [(view.shape[:2], flipped) for view, flipped in results] == expected


def test_models_of_square_images_need_a_window(masks):
    """Such as CAT with its own operator."""
    small = {"patch_size": 4, "depth": 1, "width": 16, "heads": 2, "image_size": 16}
    model = abstract("cat_5", head="linear", num_classes=4, **small)
    assert split(masks, Views(window=(16, 16), stride=8), model=model)[0]["count"] == 4
    with pytest.raises(ConfigError, match="name a --window"):
        split(masks, Views(), model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir of a segmentation of scenes with fresh weights."""
    workdir = tmp_path_factory.mktemp("run")
    options = {"name": "vit_digits", "head": "linear", "num_classes": 11}
    sizes = {"source": "scenes", "image_size": 16}
    save_run(workdir, 3, model=options | {"options": "depth=1,width=16,heads=2"}, data=sizes)
    return workdir


def test_the_command_writes_rows_a_class_table_and_a_picture(run, capsys, monkeypatch):
    monkeypatch.setitem(scenes.COUNTS, "test", 6)
    evaluate_command.main([str(run), "--resolutions=12x20", "--scales=0.5,1", "--flip"])
    out = capsys.readouterr().out
    assert "mIoU" in out
    assert "background  0." in out
    evaluate_command.main([str(run), "--resolutions=12x20"])  # other views make another row
    # With windows of whole patches, images may have any size.
    evaluate_command.main([str(run), "--resolutions=13", "--window=12", "--batch_size=3"])
    rows = json.loads((run / "evaluations.json").read_text())["rows"]
    sizes = [(row["resolution"], row["count"]) for row in rows]
    assert sizes == [([12, 20], 6), ([12, 20], 6), ([13, 13], 6)]
    assert "scales 0.5, 1, each also flipped, whole images" in rows[0]["protocol"]
    assert "windows of 12x12" in rows[2]["protocol"]
    assert len(rows[0]["iou"]) == 11
    picture = data.decode_image((run / "predictions_12x20.png").read_bytes())
    assert picture.shape[1] == 816


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stride=4"], "--stride is from window to window: name a --window"),
        (
            ["--window=12x8", "--stride=9"],
            "--stride=9 leaves out pixels between windows of 12x8: use at most 8",
        ),
        (["--window=15"], r"15x15 is not divisible by the patch size 2: .* \[--window\]"),
        (["--dataset=real", "--images=x"], "--dataset=real belongs to a different task"),
        (["--crop=0.9"], "--crop is for models that classify images, and this one does not"),
    ],
)
def test_incompatible_flags_are_refused(run, flags, message, monkeypatch, capsys):
    monkeypatch.setitem(scenes.COUNTS, "test", 6)
    with expect_refusal(capsys, message):
        evaluate_command.main([str(run), *flags])


def test_images_of_other_classes_are_refused(masks):
    model = nnx.Module()
    model.num_classes, model.class_names = 4, ("low", "high", "middle", "none")
    with pytest.raises(ConfigError, match="other classes than set: label 1"):
        check_classes(model, masks)
