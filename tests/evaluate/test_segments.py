"""Segmentation of sets: scores by definition, views, programs, pictures, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import data, evaluate
from rope_jax.config import ConfigError, resolve
from rope_jax.data.sources import scenes
from rope_jax.data.sources.index import BadImages
from rope_jax.evaluate import kinds
from rope_jax.evaluate.segments import Scored, Views, segment_split, side_multiple
from rope_jax.sharding import make_mesh
from rope_jax.tasks import segmentation
from tests.small_run import save_run

SCORES = {"count": 2, "miou": 0.5, "accuracy": 0.5, "iou": [0.5] * 11, "protocol": "none"}
ZEROS = np.zeros(3, np.float32)


def by_colour(weights, images):
    """Scores of three classes from the red of single pixels: windows must not show."""
    red = images[..., :1]
    return -jnp.square(red - jnp.array([0.0, 0.4, 0.8])) * 50 + weights


def split(images, views, apply=by_colour, weights=ZEROS, **changes):
    settings = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 2, "multiple": 4}
    settings |= {"probabilities": jax.nn.softmax}
    return segment_split(apply, weights, images, views, mesh=make_mesh(), **settings | changes)


@pytest.fixture
def masks(tmp_path):
    """Four images with a short side of 24 pixels, and labels that are wrong in two rows."""
    return write_masks(tmp_path, {"a": (24, 40), "b": (40, 24), "c": (24, 24), "d": (24, 40)})


def write_masks(path, sizes):
    """Images of three classes of grey, to be resized to a short side of 24 pixels."""
    folder = path / "set" / "test"
    folder.mkdir(parents=True)
    (path / "set" / "classes.txt").write_text("low\nmiddle\nhigh\n")
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


def definition(masks):
    """Mean IoU and accuracy of the nearest colour at every pixel, at the size of the labels."""
    found, there = [], []
    for number in range(4):
        image, labels = masks.original(number)
        valid = labels != 255
        found.append(np.abs(image[..., :1] / 255 - [0, 0.4, 0.8]).argmin(-1)[valid])
        there.append(labels[valid])
    found, there = np.concatenate(found), np.concatenate(there)
    iou = [
        ((found == k) & (there == k)).sum() / ((found == k) | (there == k)).sum() for k in range(3)
    ]
    return iou, (found == there).mean()


@pytest.mark.parametrize("views", [Views(), Views(window=(16, 16), stride=8), Views(flip=True)])
def test_scores_are_those_at_the_size_of_the_labels(masks, views):
    found = split(masks, views, pictures=2)
    iou, accuracy = definition(masks)
    assert found.row["count"] == 4
    np.testing.assert_allclose(found.row["iou"], iou, atol=1e-12)
    assert found.row["miou"] == pytest.approx(np.mean(iou), abs=1e-12)
    assert found.row["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert str(views) in found.row["protocol"]
    assert "short side of 24 pixels, at most 96 long" in found.row["protocol"]
    image, labels, predicted = found.pictures[1]
    assert image.shape[:2] == labels.shape == predicted.shape == (40, 24)
    assert (predicted == labels)[labels != 255].mean() > 0.8


@pytest.mark.parametrize(
    ("views", "shapes", "canvases"),
    [
        (Views((1.0, 1.5), flip=True, window=(16, 16), stride=8), [(2, 16, 16)], 6),
        (Views(flip=True), [(1, 24, 24), (1, 24, 48), (1, 48, 24)], 3),
        pytest.param(
            Views((0.5, 1.0), flip=True),
            [(1, 12, 12), (1, 12, 24), (1, 24, 12), (1, 24, 24), (1, 24, 48), (1, 48, 24)],
            6,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_programs_serve_all_images_of_a_set(tmp_path, views, shapes, canvases):
    """A ViT is traced once for each shape, and sees six sizes of images as windows or canvases."""
    sizes = [(24, 40), (40, 24), (24, 24), (24, 33), (30, 47), (47, 30)]
    images = write_masks(tmp_path, dict(zip("abcdef", sizes, strict=True)))
    small = {"patch_size": 4, "depth": 1, "width": 16, "heads": 2, "image_size": 16}
    model = rope_jax.create_model("vit_digits", head="linear", num_classes=3, **small)
    graph, state = nnx.split(model)
    traced = []

    def apply(state, x):
        traced.append(x.shape[:3])
        return nnx.merge(graph, state)(x)

    found = split(images, views, apply=apply, weights=state)
    assert found.row["count"] == 6
    assert sorted(traced) == shapes
    assert found.programs["model"] == len(shapes)
    assert found.programs["windows"] == canvases


def test_a_damaged_image_ends_the_evaluation_or_is_left_out(masks):
    file = masks.source.label_file(2)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(BadImages, match=r"c\.png"):
        split(masks, Views())
    assert split(masks, Views(), bad_images="skip").row["count"] == 3
    options = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 2, "mesh": make_mesh()}
    options |= {"task": segmentation, "config": resolve({"data": {"bad_images": "skip"}})}
    (row,) = evaluate.accuracies(by_colour, ZEROS, masks, **options)
    assert row["count"] == 3


def test_views_have_the_sizes_of_mmsegmentation():
    image = np.zeros((300, 400, 3), np.float32)
    views = Views(scales=(0.5, 1.0), flip=True)
    assert [(view.shape[:2], flipped) for view, flipped in views.of(image, (512, 2048))] == [
        ((256, 341), False),
        ((256, 341), True),
        ((512, 683), False),
        ((512, 683), True),
    ]
    assert [view.shape[:2] for view, _ in Views(scales=(0.5,)).of(image, None)] == [(150, 200)]
    least = Views(scales=(0.5,), window=(512, 512), stride=341)
    assert [view.shape[:2] for view, _ in least.of(image, (512, 2048))] == [(512, 683)]


def test_sides_that_a_model_takes():
    model = nnx.eval_shape(lambda: rope_jax.create_model("deit_ti16", depth=1))
    assert side_multiple(model.grids) == 16

    def none(size):
        raise ValueError

    with pytest.raises(ConfigError, match="name a --window that it takes"):
        side_multiple(none)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir of a segmentation of scenes with fresh weights."""
    workdir = tmp_path_factory.mktemp("run")
    options = {"name": "vit_digits", "head": "linear", "num_classes": 11}
    sizes = {"source": "scenes", "image_size": 16}
    save_run(workdir, 3, model=options | {"options": "depth=1,width=16,heads=2"}, data=sizes)
    return workdir


def test_the_command_writes_rows_a_table_of_classes_and_a_picture(run, capsys, monkeypatch):
    monkeypatch.setitem(scenes.COUNTS, "test", 6)
    evaluate.main([str(run), "--resolutions=12x20", "--scales=0.5,1", "--flip"])
    out = capsys.readouterr().out
    assert "mIoU" in out
    assert "background  0." in out
    evaluate.main([str(run), "--resolutions=12x20"])  # other views are another row
    rows = json.loads((run / "evaluations.json").read_text())["rows"]
    assert [(row["resolution"], row["count"]) for row in rows] == [([12, 20], 6)] * 2
    assert "scales 0.5, 1, each also flipped, whole images" in rows[0]["protocol"]
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
        (["--dataset=real", "--images=x"], "--dataset=real is of another task than the model"),
        (["--crop=0.9"], "--crop is for models that classify images, and this one does not"),
    ],
)
def test_what_does_not_go_together_is_refused(run, flags, message, monkeypatch):
    monkeypatch.setitem(scenes.COUNTS, "test", 6)
    with pytest.raises(SystemExit, match=message):
        evaluate.main([str(run), *flags])


def test_rows_of_other_heads_are_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setitem(scenes.COUNTS, "test", 2)
    measured = []

    def segment(evaluation):
        measured.append(evaluation.about.model.head_notation)
        return evaluate.accuracy.description(evaluation.images) | SCORES

    monkeypatch.setattr(kinds.OfPixels, "row", segment)
    monkeypatch.setattr(kinds.OfPixels, "images", data.load("scenes", split="test"))
    small = ["--model=vit_digits", "--num_classes=11", "--options=depth=2,width=16,heads=2"]
    rest = ["--dataset=masks", "--images=x", f"--out={tmp_path / 'rows.json'}"]
    heads = ["linear", "segmenter(head_dim=8,depth=1)"]
    for head in heads * 2:
        evaluate.main([*small, *rest, f"--head={head}"])
    assert measured == heads


def test_images_of_other_classes_are_refused(masks):
    model = nnx.Module()
    model.num_classes = 3
    for names in (None, ("low", "middle", "high")):
        model.class_names = names
        kinds.check_classes(model, masks)
    model.class_names = ("low", "high", "middle")
    with pytest.raises(ConfigError, match="other classes than set: label 1 is "):
        kinds.check_classes(model, masks)
    model.num_classes = 2
    with pytest.raises(ConfigError, match="the model has 2 classes, and set has 3"):
        kinds.check_classes(model, masks)


@pytest.mark.parametrize(("flags", "windows"), [([], 16), (["--batch_size=64"], 64)])
def test_sizes_between_patches_and_steps_are_as_asked(run, tmp_path, monkeypatch, flags, windows):
    """With windows of whole patches, images may have any size."""
    monkeypatch.setitem(scenes.COUNTS, "test", 2)
    found = []

    def scored(apply, weights, images, views, *, batch_size, probabilities, **rest):
        found.append((images.size, views.window, batch_size))
        assert probabilities(jnp.zeros((1, 1, 4))).tolist() == [[[0.25] * 4]]  # of logits
        row = evaluate.accuracy.description(images) | SCORES
        return Scored(row, [], {})

    monkeypatch.setattr(kinds, "segment_split", scored)
    out = f"--out={tmp_path / 'rows.json'}"
    evaluate.main([str(run), "--resolutions=13", "--window=12", out, *flags])
    assert found == [((13, 13), (12, 12), windows)]
