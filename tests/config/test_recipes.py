"""Recipes: their values, names, texts and errors, and the sizes that their models take."""

import dataclasses
import importlib.util
import json
import operator
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import config as cfg
from rope_jax import data
from rope_jax.config import ConfigError, list_recipes, load_recipe, recipe_path, resolve
from rope_jax.data.sources import scenes
from rope_jax.evaluate import resolutions
from rope_jax.names.text import image_pair
from rope_jax.papers.declared import find_artifacts
from rope_jax.papers.lab import Lab
from rope_jax.system.sharding import make_mesh, put_batch
from rope_jax.training.optim import decay_mask
from rope_jax.training.setup import assemble, initial_state, prepare, training_batches
from rope_jax.training.setup import create as create_of_run
from rope_jax.training.step import make_step
from rope_jax.training.trees import named_leaves
from rope_jax.weights import export_state_dict
from tests.images.coco_set import write_coco

ROOT = pathlib.Path(__file__).parents[2]
DENSE = ("dino", "mask2former", "mask_rcnn", "segmenter", "upernet")
RECIPES = ("cat", "cct", "deit3", "lape", "swin", "thesis")


def recipe(name, arguments=""):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arguments), module.__doc__


def resolve_recipe(name, arguments="", **changes):
    raw, _ = recipe(name, arguments)
    for key, value in changes.items():
        section, _, field = key.rpartition("__")
        with (raw[section] if section else raw).ignore_type():
            (raw[section] if section else raw)[field] = value
    return cfg.resolve(raw)


# Settings of the papers and the official code, by recipe and arguments; those that tables of the
# papers print are compared in tests/papers, too.
VALUES = json.loads(pathlib.Path(__file__).with_name("values.json").read_text())


@pytest.mark.parametrize("text", VALUES)
def test_recipes_have_the_recorded_values(text):
    config = resolve_recipe(*text.split(":", 1))
    values = {name: operator.attrgetter(name)(config) for name in VALUES[text]}
    assert json.loads(json.dumps(values)) == VALUES[text]


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [("own_images", "batch"), ("finetune:weights=x", "batch_size"), ("swin", "batch_size")],
)
def test_the_learning_rate_follows_the_batch_size(recipe, argument):
    load = lambda text, changes: cfg.resolve(cfg.load_recipe(text, changes))
    by_argument = load(cfg.with_arguments(recipe, **{argument: 96}), {})
    assert load(recipe, {"batch_size": 96}) == by_argument
    assert load(recipe, {}).optim.learning_rate != by_argument.optim.learning_rate
    explicit = load(recipe, {"optim.learning_rate": 0.01, "batch_size": 96})
    assert (explicit.optim.learning_rate, explicit.batch_size) == (0.01, 96)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("deit3", "variant=s,stage=finetune", "stage=finetune with variant b, l"),
        ("deit3", "variant=b,stage=finetune", "add init_from="),
        ("thesis", "base=none", "base must be one of table, nat"),
        ("thesis", "position=rpb++ape", r"cannot be read .*\[recipe argument position\]"),
        ("cct", "dataset=mnist", "dataset must be one of cifar10, cifar100"),
        ("lape", "variant=nat_mini", "not one of deit, ceit, t2t, swin"),
        ("swin", "positon=rpb", "did you mean 'position'"),
        ("tiny_imagenet", "backbone=resnet", r"backbone must be one of vit, swin.*, not 'resnet'"),
        ("upernet", "variant=h", "variant must be one of b, l, adapter_ti, adapter_s, not 'h'"),
        ("mask2former", "variant=h", "variant must be one of swin_s, swin_b, not 'h'"),
        ("dino", "variant=b", "variant must be one of vit_b, vit_l, swin_t, swin_s, swin_b"),
        ("mask_rcnn", "variant=b", "variant must be one of adapter_ti, adapter_s, not 'b'"),
        ("finetune", "path=y", "weights= is missing"),
        ("digits", "resolutions=8+", r"resolutions=8\+: use sides in pixels joined by \+"),
        ("resformer", "resolutions=224+0", r"resolutions=224\+0: use sides in pixels"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, message):
    with pytest.raises(cfg.ConfigError, match=message):
        recipe(name, arguments)


def complete(config, classes):
    """The config with a number of classes, and the size of its images as a pair."""
    model = dataclasses.replace(config.model, num_classes=config.model.num_classes or classes)
    sized = dataclasses.replace(config.data, image_size=image_pair(config.data.image_size))
    return dataclasses.replace(config, model=model, data=sized)


def create(config, classes):
    """The model of a recipe, with its weights as shapes."""
    return nnx.eval_shape(lambda: create_of_run(complete(config, classes)))


def test_swin_trains_with_the_windows_of_its_resolution():
    recipes = [("swin", "", 224, 7), ("swin", "resolution=384", 384, 12)]
    recipes += [("swin", "variant=swinv2_t", 256, 8), ("cat", "variant=swinv2_t", 224, 7)]
    for name, arguments, resolution, side in recipes:
        config = resolve_recipe(name, arguments)
        assert config.data.image_size == resolution
        model = create(config, 1000)
        assert model.window == (side, side)
        assert (
            config.eval.scale_windows or name == "cat"
        )  # which leaves windows of the training resolution alone
        model.scale_windows()
        model.prepare((resolution, resolution))
        assert model.window == (side, side)


@pytest.mark.parametrize(("backbone", "patch"), [("vit", 8), ("swin", 4), ("nat", 4)])
def test_tiny_imagenet_can_be_evaluated_at_all_sizes(backbone, patch):
    config = resolve_recipe("tiny_imagenet", f"backbone={backbone},position=rope_mixed+ape")
    model = create(config, 50)
    for height, width in resolutions(config):
        assert model.grids((height, width))[0] == (height // patch, width // patch)
        assert height % patch == width % patch == 0
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) < 6.1e6


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("dino", f"variant={variant},position=rpb") for variant in ("vit_b", "swin_t", "swin_b")),
        ("mask_rcnn", ""),
    ],
)
def test_detectors_support_all_canvases_and_objects(name, arguments):
    """Canvases hold images of the largest size, portrait, landscape or mixed."""
    config = resolve_recipe(name, arguments)
    canvases, model = config.data.canvas_sizes, create(config, 80)
    assert {(800, 1344), (1344, 800)} < {*canvases}
    assert max(min(canvas) for canvas in canvases) >= 1333
    for canvas in canvases:
        model.grids(canvas)  # refuses sizes that patches and windows do not divide
    assert getattr(model.head.options, "queries", 100) >= config.data.max_boxes


@pytest.mark.parametrize("name", ["scenes_boxes", "scenes_masks"])
def test_scenes_support_all_digits_and_sizes(name):
    config = resolve_recipe(name)
    model = create(config, 10)
    assert getattr(model.head.options, "queries", 6) >= config.data.max_boxes == scenes._NUMBER[1]
    for size in resolutions(config):
        model.grids(size)


def test_names_and_files_of_recipes(tmp_path, monkeypatch):
    assert list_recipes() == sorted(path.stem for path in ROOT.glob("configs/*.py"))
    assert recipe_path("digits") == str(ROOT / "configs" / "digits.py")
    assert recipe_path("deit3:variant=s,path=a/b") == f"{ROOT}/configs/deit3.py:variant=s,path=a/b"
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").touch()
    assert recipe_path("mine.py:epochs=3") == "mine.py:epochs=3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digit:epochs=3", "--config=digit is not a recipe; did you mean 'digits'"),
        ("configs/digit.py", "configs/digit.py is not a recipe; known"),
    ],
)
def test_unknown_recipes_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        recipe_path(text)


START = "from rope_jax import config as cfg\n\ndef get_config():\n    config = cfg.default()\n    "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (START + "config.batch_sise = 3", "batch_sise.*the nearest are 'batch_size'"),
        (START + "config.optim.lr = 3", "use --config.optim.learning_rate"),
        (START + "config.batch_size = 'many'", "type"),
        (START + "raise ValueError('which images?')", r"which images\? \(/.*/mine.py, line 5\)$"),
        (START + "return half(config)\n\ndef half(x):\n    return x / 2", r"mine.py, line 8\)$"),
        (START + "raise SystemExit(0)", r"mine.py: SystemExit: 0 \(/.*/mine.py, line 5\)$"),
        ("x = 1", "has no attribute 'get_config'"),
        ("x = (", r"never closed \(mine.py, line 1\)$"),
        ("import no_such_module", r"No module named 'no_such_module' \(/.*/mine.py, line 1\)$"),
        ("import sys\nsys.exit(0)", r"mine.py: SystemExit: 0 \(/.*/mine.py, line 2\)$"),
        ("x = 1\nx /= 0", r"ZeroDivisionError: division by zero \(/.*/mine.py, line 2\)$"),
    ],
)
def test_errors_in_recipes_are_reported_with_their_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{tmp_path}/mine.py")


def test_derived_settings_follow_changes(tmp_path):
    derived = "config.eval.batch_size = config.get_ref('batch_size') * 2\n    return config"
    (tmp_path / "mine.py").write_text(START + derived)
    config = resolve(load_recipe(f"{tmp_path}/mine.py", {"batch_size": 32}))
    assert (config.batch_size, config.eval.batch_size) == (32, 64)


DATACLASS = """
from __future__ import annotations
import dataclasses
from rope_jax.config import default

@dataclasses.dataclass
class Size:
    side: int

def get_config():
    config = default()
    config.data.image_size = Size(12).side
    return config
"""


def test_recipes_may_define_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(DATACLASS)
    assert load_recipe(f"{tmp_path}/mine.py").data.image_size == 12
    (tmp_path / "mine.txt").write_text(DATACLASS)
    with pytest.raises(ConfigError, match=r"mine.txt is no Python file: its name must end in .py"):
        load_recipe(f"{tmp_path}/mine.txt")


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_recipes_accept_scheme_and_resolution_and_show_commands(name):
    raw, text = recipe(name, "position=rope2d,resolution=64")
    assert (raw.model.position, raw.data.image_size) == ("rope2d", 64)
    assert f"--config={name}:" in text


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_recipes_name_the_tables_that_train_them(name):
    text = " ".join(recipe(name)[1].split())
    ids = re.findall(r"`(?:rope_jax reproduce )?([a-z]+/(?:table|figure)_[\w.]+)`", text)
    assert f"rope_jax reproduce {ids[0]}" in text
    lab = Lab("full", pathlib.Path("runs"))
    for artifact in find_artifacts(ids):
        runs = [stage for run in artifact.runs(lab) for stage in run.stages]
        assert name in {run.recipe.partition(":")[0] for run in runs}, artifact.id


# Parameters decayed besides kernels by the official optimizers, and a small form of the model.
ONE, TWO = {"depth": 1}, {"depths": (1, 1), "heads": (2, 4)}
DECAYED = [
    ("thesis", "variant=nat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=dinat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=vit_s16,position=rpb", ONE, {"offsets"}),
    ("thesis", "variant=swin_t,position=rpb+rope_mixed", TWO, {"offsets"}),
    ("swin", "position=rpb", TWO, set()),
    ("swin", "position=rope_mixed", TWO, set()),
    ("swin", "variant=swinv2_t", TWO, set()),
    ("deit3", "position=rope_mixed+ape", ONE, set()),
    ("lape", "variant=deit_ti16", ONE, set()),
    ("cct", "variant=vit_lite_7_4", ONE, {"class_token", "embedding"}),
    ("cct", "variant=cct_7_3x1,position=lape(ape)", ONE, {"embedding"}),
    ("cat", "variant=cat_vit_5", ONE, {"class_token", "scale", "bias"}),
    ("upernet", "position=rope_mixed+ape", ONE, {"class_token", "embedding", "mixed"}),
]


@pytest.mark.parametrize(("name", "arguments", "small", "decayed"), DECAYED)
def test_decayed_parameters_match_the_official_optimizers(name, arguments, small, decayed):
    config = resolve_recipe(name, arguments)
    options = {"position": config.model.position, **small}
    params = nnx.eval_shape(
        lambda: nnx.state(rope_jax.create_model(config.model.name, **options), nnx.Param)
    )
    mask = dict(named_leaves(decay_mask(params, config.optim.exempt)))
    names = {x: {path.split(".")[-1] for path in mask if mask[path] == x} for x in (True, False)}
    assert names[True] == {"kernel"} | decayed
    assert "kernel" not in names[False]
    assert not names[False] if name == "cat" else "bias" in names[False]


def predicts_pixels(config):
    return config.model.head is not None and not config.model.head.startswith(("dino", "mask_rcnn"))


def trace(config, count, classes):
    """The setup and the shapes of state and metrics after one step, without arrays."""
    config = complete(config, classes)
    size = config.data.image_size
    shape_of_field = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(
        (config.batch_size, *shape), dtype
    )
    batch = {
        "image": shape_of_field(*size, 3, dtype=jnp.uint8),
        "label": shape_of_field(),
        "epoch": shape_of_field(),
        "index": shape_of_field(),
    }
    pixels, labels = np.zeros((1, 1, 1, 3), np.uint8), np.zeros(count, np.int32)
    kind = data.Images
    if predicts_pixels(config):
        kind, labels = data.LabelMaps, np.zeros((count, *size), np.uint8)
        batch |= {"label": shape_of_field(*size, dtype=jnp.uint8), "extent": shape_of_field(2)}
    elif config.model.head is not None:
        boxes = config.data.max_boxes
        batch |= {
            "label": shape_of_field(boxes),
            "boxes": shape_of_field(boxes, 4, dtype=jnp.float32),
            "extent": shape_of_field(2),
        }
        if config.model.head.startswith("mask_rcnn"):
            batch["masks"] = shape_of_field(boxes, size[0], size[1] // 8, dtype=jnp.uint8)
    images = kind(np.broadcast_to(pixels, (count, *size, 3)), labels, "x", "train", classes)
    setups = []

    def step(batch):
        model = create_of_run(config)
        for resolution in resolutions(config):
            model.grids(resolution)  # refuses those that cannot be evaluated
        setups.append(assemble(config, make_mesh(), images, images, model))
        return make_step(setups[0])(initial_state(setups[0], model), batch)

    state, metrics = jax.eval_shape(step, batch)
    return setups[0], state, metrics


# Counts of official models, whose parts are named in comments; None without a count.
DINO, PYRAMID = 18_556_236, 3_444_096
VIT_B = 86_585_320 - 768 * 1001 - 232 - 196 * 768 + 12 * 12 * 64  # without classifier and table
PARAMETERS = {
    # Two small ones; others are slow.
    "cat": 32_691_256,
    "cct:position=ape": 3_760_139,
}
SLOW = {
    # Backbone without classifier, with the table of 512 pixels; decoder
    "segmenter:variant=deit_ti16": 5_524_416 + (1024 - 196) * 192 + 1_029_996,
    # Without classifier and last norm, with norms of stages; maps; head
    "dino:variant=swin_t,position=rpb": (
        28_288_354 - 769_000 - 2 * 768 + 2 * (192 + 384 + 768) + 2_116_608 + DINO
    ),
    "swin:variant=swin_t,position=rpb": 28_288_354,
    "swin:variant=swinv2_t": 28_347_154,
    "cat:variant=swinv2_t": 28_347_154,
    "thesis:variant=nat_mini,position=rpb": 19_984_174,
    "lape:variant=deit_ti16": 5_722_024,
    "deit3:variant=s,position=rope_mixed": 21_988_840,
    # Its table is for 192 pixels.
    "deit3:variant=l,position=rope_mixed+ape": 304_399_336 - (196 - 144) * 1024,
    "deit3:variant=b,position=ape,stage=finetune,init_from=x": 86_585_320,
    "lape:variant=t2t_vit_7,position=sincos1d": 4_255_694,
    "lape:variant=ceit_t,position=ape": 6_356_904,
    "lape:variant=swin_s,position=rpb": 49_606_258,
    "swin:variant=swin_b,position=rope_mixed": 87_716_712,
    "thesis:variant=nat_base,position=rpb": 89_769_652,
    "thesis:variant=vit_b16,position=none": 86_417_128,
    "cct:variant=vit_lite_7_4,dataset=cifar100,position=ape,optimizer=sgd": None,
    "cat:variant=cat_vit_5": None,
    "segmenter:variant=deit_s16,position=lape(ape)": None,
    # Without the last norm; neck; both heads
    "upernet:variant=b,position=rope_mixed": (VIT_B - 2 * 768 + 7_081_728 + 67_963_542 + 1_808_534),
    "upernet:variant=l,position=rope_mixed+ape": None,
    "upernet:variant=adapter_ti,position=ape": None,
    "upernet:variant=adapter_s": None,
    # Without classifier and last norm, with norms of stages; both decoders
    "mask2former:variant=swin_s,position=rpb": (
        49_606_258 - 768 * 1001 - 232 - 2 * 768 + 2 * 1440 + 5_421_504 + 14_497_431
    ),
    "mask2former:variant=swin_b,position=rope_mixed": None,
    # Without class token and last norm; maps of one; maps of the neck; head
    "dino:variant=vit_b,position=rope_mixed": (VIT_B - 2 * 768 - 768 + PYRAMID + 265_216 + DINO),
    "dino:variant=vit_l,position=rope2d+ape": None,
    "dino:variant=swin_s,position=rope_mixed+rpb,window_size=12": None,
    "dino:variant=swin_b,position=rope2d(base=50)": None,
    "dino:variant=swin_b,position=rpb": (
        87_768_224 - 1_025_000 - 2 * 1024 + 2 * (256 + 512 + 1024) + 2_821_120 + DINO
    ),
    "scenes_boxes:epochs=4": None,
    "scenes_masks:epochs=2": None,
    "mask_rcnn:variant=adapter_ti": None,
    "mask_rcnn:variant=adapter_s,position=lape(ape)": None,
}


@pytest.mark.parametrize(
    ("text", "parameters"),
    [*PARAMETERS.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())],
)
def test_recipes_trace_at_full_size(text, parameters):
    config, count, classes = resolve_recipe(*text.split(":", 1)), 1_281_167, 1000
    if predicts_pixels(config):
        count, classes = 2, 150
    elif config.model.head is not None:
        count, classes = (2000, 10) if config.data.source == "scenes" else (2, 80)
    elif "cct" in text:
        count, classes = 50_000, 100 if "cifar100" in text else 10
    setup, state, metrics = trace(config, count, classes)
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "learning_rate"}
    assert metrics["loss"].shape == ()
    assert ("ema" in state) == (config.ema_decay is not None)
    assert sum(x.size for x in jax.tree.leaves(state["params"])) == parameters or not parameters
    images = data.epoch_length(count, config.data.repeats)
    steps = config.steps or round(config.epochs * images / config.batch_size)
    assert setup.total_steps == steps
    rates = [float(setup.schedule(step)) for step in range(0, steps, max(1, steps // 200))]
    assert max(rates) == pytest.approx(config.optim.learning_rate, rel=0.1)
    last = float(setup.schedule(steps - 1))
    least = max(config.optim.min_learning_rate, 0.02 * config.optim.learning_rate)
    assert last <= least or config.optim.schedule == "step"


def photographs(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 256), ("test", 64)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % 10
    np.savez(folder / "set.npz", **arrays)
    return folder / "set.npz"


def masks(folder):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(4):
            classes = rng.integers(0, 3, (3, 4)).repeat(24, 0).repeat(24, 1).astype(np.uint8)
            pixels = np.repeat(80 * classes[..., None], 3, -1)
            Image.fromarray(pixels).save(folder / split / f"{number}.jpg")
            Image.fromarray(classes).save(folder / split / f"{number}.png")
    (folder / "classes.txt").write_text("sky\nsea\nsand\n")
    return folder


CLASSES = {
    "data__source": "npz", "batch_size": 32, "epochs": 12.0, "optim__warmup_epochs": 0.0,
    "dtype": "float32", "eval__resolutions": (),
}  # fmt: skip
PIXELS = {"data__source": "masks", "batch_size": 4, "steps": 4, "optim__warmup_steps": 0}
MASKS = "mask2former(width=16,groups=4,heads=2,pixel_depth=2,depth=3,queries=6,loss_points=64)"
BOXES = {
    "batch_size": 4, "steps": 4, "data__canvases": (64,), "data__max_boxes": 4,
    "eval__frame": "fit(short=40,long=64)", "data__augment":
    "detr_crop(low=24,high=40,step=8,long=64,before_low=20,before_high=30,before_step=5,"
    "cut_low=16,cut_high=30)+flip", "model__head":
    "dino(width=16,groups=4,heads=2,encoder_depth=1,decoder_depth=2,hidden=32,queries=12,"
    "denoising=6,detections=8)",
}  # fmt: skip
REGIONS = BOXES | {
    "model__head": "mask_rcnn(width=16,hidden=16,anchor_samples=16,box_samples=16,"
    "train_candidates=8,candidates=8,proposals=16,detections=4)",
    "data__augment": BOXES["data__augment"].replace("cut_low", "window=48,cut_low"),
}
PLAIN, STAGES = "patch_size=8,width=32,depth=1,heads=2", "width=16,depths=(1,1),heads=(1,2)"
FOUR = "width=8,heads=(1,2,2,4),depths=(1,1,2,1),drop_path=0.1"
SMALL = [
    ("deit3:resolution=32", photographs, PLAIN, CLASSES),
    ("cat:resolution=32", photographs, PLAIN, CLASSES),
    ("cct:resolution=32", photographs, "width=32,depth=1,heads=2,conv_width=16", CLASSES),
    ("lape:resolution=32", photographs, PLAIN, CLASSES),
    ("swin:resolution=32", photographs, f"{STAGES},window_size=4", CLASSES),
    ("thesis:resolution=32", photographs, f"{STAGES},kernel_size=3", CLASSES),
    ("upernet:variant=b,resolution=64", masks,
     "patch_size=8,width=32,depth=4,heads=2,drop_path=0.1", PIXELS),
    ("upernet:variant=adapter_s,position=ape,resolution=64", masks,
     "width=32,depth=4,heads=2,groups=(0,1,2,3),prior_width=8,deform_heads=2", PIXELS),
    ("segmenter:resolution=64", masks, "patch_size=8,width=64,depth=2,heads=2", PIXELS),
    ("mask2former:resolution=64", masks, FOUR, PIXELS | {"model__head": MASKS}),
    ("dino:variant=vit_b,resolution=64", write_coco,
     "patch_size=8,width=32,depth=2,heads=2,class_token=False,attention=window,window_size=4,"
     "global_blocks=(1,),window_padding=tokens,drop_path=0.1", BOXES),
    ("dino:variant=swin_t,resolution=64", write_coco, f"{FOUR},window_padding=tokens", BOXES),
    ("mask_rcnn:variant=adapter_ti,resolution=64", write_coco,
     "width=32,depth=4,heads=2,groups=(1,3),added=last,prior_width=8,deform_heads=2,"
     "attention=window,window_size=2,window_padding=qkv,global_blocks=(1,3)", REGIONS),
]  # fmt: skip


def test_all_recipes_of_papers_are_covered():
    for cases in ({**PARAMETERS, **SLOW}, [case[0] for case in SMALL]):
        assert {text.split(":")[0] for text in cases} >= {*RECIPES, *DENSE}


@pytest.mark.parametrize(
    ("text", "write", "options", "changes"),
    [SMALL[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SMALL[1:])],
    ids=[case[0] for case in SMALL],
)
def test_small_models_train(text, write, options, changes, tmp_path):
    """In three steps every number is finite and every kernel moves.

    The first step leaves ViT-Adapter's injectors as they are, whose gates are 0 before it.
    """
    data_settings = {"data__path": str(write(tmp_path / "set")), "data__workers": 0}
    config = resolve_recipe(*text.split(":", 1), model__options=options, **data_settings, **changes)
    setup, model = prepare(config)
    state = initial_state(setup, model)
    before = jax.tree.map(np.asarray, state["params"])
    batches, _ = training_batches(setup, 0)
    step = make_step(setup)
    for _ in range(3):
        state, metrics = step(state, put_batch(next(batches), setup.mesh))
        assert all(np.isfinite(float(value)) for value in metrics.values())
    batches.close()
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), state["params"], before)
    still = [
        jax.tree_util.keystr(path)
        for path, value in jax.tree_util.tree_leaves_with_path(moved)
        if "kernel" in str(path[-1]) and not value > 0
    ]
    assert still == []
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["params"]))


FINETUNED = {"width": 48, "heads": 3, "depth": 2}
COLOURS = ("blue", "green", "red")


def coloured_photographs(folder, count):
    """Noisy pictures of 50 x 70 pixels in which one channel is the brightest."""
    rng = np.random.default_rng(0)
    for split, name in [(split, name) for split in ("train", "val") for name in COLOURS]:
        (folder / split / name).mkdir(parents=True)
        for k in range(count):
            pixels = rng.integers(0, 120, (50, 70, 3), dtype=np.uint8)
            pixels[..., 2 - COLOURS.index(name)] += 100
            Image.fromarray(pixels).save(folder / split / name / f"{k}.png")
    return folder


@pytest.mark.process
def test_one_command_fine_tunes_official_weights(tmp_path):
    trained = rope_jax.create_model(
        "deit3_ti16", position="rope_mixed+ape", num_classes=7, image_size=64, seed=3, **FINETUNED
    )
    weights = export_state_dict(trained, source="timm")  # without a description of the model
    safetensors.numpy.save_file(weights, tmp_path / "official.safetensors")
    images, workdir = coloured_photographs(tmp_path / "photographs", 12), tmp_path / "run"
    arguments = (
        f"model=deit3_ti16,position=rope_mixed+ape,weights={tmp_path}/official.safetensors,"
        f"path={images},resolution=96,batch_size=12,epochs=30,rate=0.08,layer_decay=0.1"
    )
    command = [
        *(sys.executable, "-m", "rope_jax.main", f"--config=configs/finetune.py:{arguments}"),
        *(f"--workdir={workdir}", "--config.model.options=width=48,heads=3,depth=2"),
        "--config.dtype=float32",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "head: new, 3 classes\n" in done.stdout
    assert json.loads((workdir / "results.json").read_text())["eval"][0]["top1"] > 0.9

    model, config = rope_jax.load_checkpoint(str(workdir))
    assert (model.class_names, model.num_classes) == (COLOURS, 3)
    assert (config.optim.layer_decay, model.preprocessing.crop) == (0.1, 0.9)
