"""The recipes of detection: their values, a step at full size and steps at toy size."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax import config as cfg
from rope_jax import data, restore
from rope_jax.analysis import expected
from rope_jax.data.sources import scenes
from rope_jax.evaluate import resolutions
from rope_jax.sharding import make_mesh, put_batch
from rope_jax.training.setup import assemble, batch_shapes, initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from tests.config.test_recipe_texts import paragraphs
from tests.config.test_recipes import recipe, resolved
from tests.images.coco_set import write_coco

WINDOWS = "class_token=False,attention=window,window_size=14,drop_path_schedule=linear"
MODELS = {
    "vit_b": (
        "deit3_b16",
        f"{WINDOWS},global_blocks=(2,5,8,11),window_padding=tokens,drop_path=0.1",
    ),
    "vit_l": (
        "deit3_l16",
        f"{WINDOWS},global_blocks=(5,11,17,23),window_padding=tokens,drop_path=0.4",
    ),
    "swin_t": ("swin_t", "window_padding=tokens,drop_path=0.1"),
    "swin_s": ("swin_s", "window_padding=tokens,drop_path=0.2"),
    "swin_b": ("swin_b", "window_padding=tokens,drop_path=0.2"),
}


@pytest.mark.parametrize("variant", MODELS)
def test_values_of_the_recipe(variant):
    config = resolved("dino", f"variant={variant},path=COCO,resolution=224")
    data, optim, model = config.data, config.optim, config.model
    assert (model.name, model.options) == MODELS[variant]
    assert (model.head, model.position, config.dtype) == ("dino", "rope_mixed", "bfloat16")
    assert (config.steps, config.batch_size, config.accumulate) == (90_000, 16, 1)
    assert (optim.name, optim.learning_rate, optim.backbone_rate) == ("adamw", 1e-4, 0.1)
    assert (optim.schedule, optim.milestones, optim.warmup_steps) == ("step", (82_500,), 0)
    assert (optim.weight_decay, optim.exempt, optim.clip_norm) == (1e-4, "norms", 0.1)
    assert (optim.b1, optim.b2, optim.layer_decay) == (0.9, 0.999, 1)
    assert (data.source, data.path, data.max_boxes) == ("coco", "COCO", 100)
    assert (data.image_size, data.augment) == (224, "detr_crop+flip")
    assert (data.mean, data.std) == (cfg.IMAGENET_MEAN, cfg.IMAGENET_STD)
    assert (config.eval.frame, config.eval.frames) == ("fit(short=800,long=1333)", ())


def test_a_shorter_run_lowers_its_rate_in_the_same_proportion():
    assert resolved("dino", "steps=24").optim.milestones == (22,)


def create(config, classes=80):
    """The model of a recipe, its weights as shapes."""
    model = dataclasses.replace(config.model, num_classes=classes)
    whole = dataclasses.replace(config, model=model)
    return whole, nnx.eval_shape(lambda: restore.create(whole))


HEAD, PYRAMID = 18_556_236, 3_444_096
# Official counts: the classifier without its last layer and norm; maps; the head and its neck.
PARAMETERS = {
    "variant=vit_b,position=rope_mixed": (  # without class token and table, with frequencies
        86_585_320 - 769_000 - 2 * 768 - 768 - 196 * 768 + 12 * 12 * 64
        + PYRAMID + 265_216 + HEAD
    ),
    "variant=swin_t,position=rpb": (
        28_288_354 - 769_000 - 2 * 768 + 2 * (192 + 384 + 768) + 2_116_608 + HEAD
    ),
    "variant=swin_b,position=rpb": (
        87_768_224 - 1_025_000 - 2 * 1024 + 2 * (256 + 512 + 1024) + 2_821_120 + HEAD
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(text, marks=[] if "swin_t" in text else pytest.mark.slow) for text in PARAMETERS],
)
def test_models_have_the_official_number_of_parameters(arguments):
    config, model = create(resolved("dino", arguments))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == PARAMETERS[arguments]
    assert model.head.options.queries >= config.data.max_boxes
    for canvas in batch_shapes(config)["canvases"]:
        model.grids(canvas)  # refuses those that patches and windows do not divide


def test_every_batch_fits_a_canvas():
    """Images of the largest size, upright and lying together or not."""
    config = resolved("dino")
    canvases = batch_shapes(config)["canvases"]
    assert {(800, 1344), (1344, 800)} < {*canvases}
    assert max(min(canvas) for canvas in canvases) >= 1333


def traced(config, side, count=2, classes=80):
    """The setup and the shapes of metrics of one step at full size, without an array of it."""
    config, _ = create(config, classes)
    most, labels = config.data.max_boxes, np.zeros(count, np.int32)
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (count, *side, 3))
    images = data.Images(pixels, labels, "x", "train", classes)
    plan = {}

    def whole(batch):
        model = restore.create(config)
        plan["run"] = run = assemble(config, make_mesh(), images, images, model)
        return make_step(run)(initial_state(run, model), batch)

    of = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype)
    batch = {"image": of(*side, 3, dtype=jnp.uint8), "boxes": of(most, 4, dtype=jnp.float32)}
    batch |= {"label": of(most), "extent": of(2), "epoch": of(), "index": of()}
    _, metrics = jax.eval_shape(whole, batch)
    return plan["run"], metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "variant=vit_b,position=rope_mixed",
        "variant=vit_l,position=rope2d+ape",
        "variant=swin_t,position=rpb",
        "variant=swin_s,position=rope_mixed+rpb",
        "variant=swin_b,position=rope2d(base=50)",
    ],
)
def test_the_recipe_is_traced_at_full_size(arguments):
    run, metrics = traced(resolved("dino", arguments), (800, 1344))
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "learning_rate"}
    assert run.total_steps == 90_000
    rates = [float(run.schedule(step)) for step in (0, 82_499, 82_500, 89_999)]
    assert rates == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5])


@pytest.mark.slow
def test_the_recipe_of_scenes_is_traced_at_full_size():
    config = resolved("scenes_boxes", "epochs=4")
    run, metrics = traced(config, (64, 64), count=scenes.COUNTS["train"], classes=10)
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "learning_rate"}
    assert run.total_steps == 4 * 2000 // config.batch_size
    assert float(run.schedule(run.total_steps - 1)) < 0.05 * config.optim.learning_rate


def test_the_model_of_scenes_has_room_for_every_digit_and_takes_every_size():
    config, model = create(resolved("scenes_boxes"), 10)
    assert model.head.options.queries >= config.data.max_boxes == scenes._NUMBER[1]
    for size in resolutions(config):
        model.grids(size)


CROP = "detr_crop(low=24,high=40,step=8,long=64,before_low=20,before_high=30,before_step=5,"
CROP += "cut_low=16,cut_high=30)+flip"
TOY = "dino(width=16,groups=4,heads=2,encoder_depth=1,decoder_depth=2,hidden=32,queries=12,"
TOY += "denoising=6,detections=8)"
TOYS = {
    "vit_b": "patch_size=8,width=32,depth=2,heads=2,class_token=False,attention=window,"
    "window_size=4,global_blocks=(1,),window_padding=tokens,drop_path=0.1",
    "swin_t": "width=8,heads=(1,2,2,4),depths=(1,1,2,1),window_padding=tokens,drop_path=0.1",
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", TOYS)
def test_steps_in_bfloat16(variant, tmp_path):
    """Of a folder in COCO's form: every number is finite, and every kernel moves."""
    folder = write_coco(tmp_path / "set")
    config = resolved(
        "dino", f"variant={variant},path={folder},resolution=64,steps=4", batch_size=4,
        model__options=TOYS[variant], model__head=TOY, data__workers=0, data__augment=CROP,
        data__canvases=(64,), data__max_boxes=4, eval__frame="fit(short=40,long=64)",
    )  # fmt: skip
    run, model = prepare(config)
    state = initial_state(run, model)
    before = jax.tree.map(np.asarray, state["params"])
    batches, _ = training_batches(run, 0)
    step = make_step(run)
    for _ in range(3):
        state, metrics = step(state, put_batch(next(batches), run.mesh))
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


def test_unknown_variants_are_refused():
    with pytest.raises(cfg.ConfigError, match="variant=b is not one of vit_b, vit_l, swin_t, swin"):
        recipe("dino", "variant=b")


def test_expected_values_are_those_of_the_papers_tables():
    """Every number of the docstring, against `analysis.expected`, which has no others."""
    _, text = recipe("dino")
    shown = {}
    found = paragraphs(text, after="Expected box AP", before="With `rpb`")
    for (kind, *positions), *rows in found:
        for model, *cells in rows:
            for position, cell in zip(positions, cells, strict=True):
                shown[f"box AP, {kind}, 12 epochs", model, position] = float(cell)
    source = " ".join(re.search(r"12 epochs \((.+?)\), not", text, re.S)[1].split())
    assert source == "Heo et al., arXiv 2403.13298, tables 1 and 2"
    published = {
        (entry["task"], entry["model"], entry["position"]): entry["value"]
        for entry in expected.entries()
        if entry["source"] in [source.replace("s 1 and 2", f" {table}") for table in (1, 2)]
        and entry.get("task", "").startswith("box AP")
    }
    assert shown == published
    assert len(shown) == 25
