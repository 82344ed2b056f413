"""Recipes of dense prediction: their values, a step at full size and one at toy size."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from rope_jax import config as cfg
from rope_jax import data, restore
from rope_jax.analysis import expected
from rope_jax.sharding import make_mesh, put_batch
from rope_jax.training.setup import assemble, initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from tests.config.test_recipe_texts import paragraphs
from tests.config.test_recipes import recipe, resolved

BEIT = {
    "steps": 160_000, "batch_size": 16, "image_size": 512, "name": "adamw", "least": 0,
    "schedule": "poly", "power": 1, "warmup": 1500, "decay": 0.05, "clip": None, "pixels": "all",
    "head": "upernet", "loss": "softmax", "source": "ade20k", "exempt": "declared", "augment":
    "scaled_crop(low=0.5,high=2.0,short=512,long=2048,share=0.75)+flip+photometric",
}  # fmt: skip
ADAPTER = BEIT | {
    "batch_size": 8, "rate": 2e-5, "start": 2e-11, "layer_decay": 0.95, "head": "upernet(width=512)"
}  # fmt: skip
VALUES = {
    ("upernet", ""): BEIT | {
        "rate": 5e-5, "start": 5e-11, "layer_decay": 0.75, "options": "drop_path=0.15",
        "model": "deit3_b16",
    },
    ("upernet", "variant=l"): BEIT | {
        "rate": 4e-5, "start": 4e-11, "layer_decay": 0.9, "options": "drop_path=0.2",
        "model": "deit3_l16",
    },
    ("upernet", "variant=adapter_ti"): ADAPTER | {"model": "vit_adapter_ti16"},
    ("upernet", "variant=adapter_s"): ADAPTER | {"model": "vit_adapter_s16"},
    ("upernet", "resolution=640"): {
        "image_size": 640, "augment":
        "scaled_crop(low=0.5,high=2.0,short=640,long=2560,share=0.75)+flip+photometric",
    },
    ("segmenter", ""): BEIT | {
        "batch_size": 8, "name": "sgd", "rate": 1e-3, "least": 1e-5, "power": 0.9, "warmup": 0,
        "start": 0, "decay": 0, "momentum": 0.9, "nesterov": True, "pixels": "valid",
        "head": "segmenter", "model": "deit_ti16", "layer_decay": 1,
        "position": "ape(resize=bilinear)", "options": "norm_epsilon=1e-5,drop_path=0.1",
    },
    ("mask2former", ""): BEIT | {
        "rate": 1e-4, "backbone_rate": 0.1, "start": 0, "warmup": 0, "power": 0.9, "clip": 0.01,
        "exempt": "norms", "layer_decay": 1, "head": "mask2former", "model": "swin_s",
        "options": "drop_path=0.3,window_padding=tokens", "augment":
        "scaled_crop(low=0.5,high=2.0,short=512,long=2048,share=1.0)+flip+photometric",
    },
    ("mask2former", "variant=swin_b,position=rpb"): {"model": "swin_b", "position": "rpb"},
    ("segmenter", "position=lape(ape)"): {"position": "lape(ape(resize=bilinear))"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), VALUES)
def test_values_of_the_recipes(name, arguments):
    config = resolved(name, arguments)
    optim, model = config.optim, config.model
    found = {
        "steps": config.steps, "batch_size": config.batch_size, "loss": config.loss,
        "pixels": config.loss_pixels, "image_size": config.data.image_size,
        "augment": config.data.augment, "source": config.data.source, "name": optim.name,
        "rate": optim.learning_rate, "least": optim.min_learning_rate,
        "start": optim.warmup_learning_rate, "schedule": optim.schedule, "power": optim.power,
        "warmup": optim.warmup_steps, "decay": optim.weight_decay, "clip": optim.clip_norm,
        "exempt": optim.exempt, "layer_decay": optim.layer_decay, "momentum": optim.momentum,
        "nesterov": optim.nesterov, "backbone_rate": optim.backbone_rate, "model": model.name,
        "head": model.head, "position": model.position, "options": model.options,
    }  # fmt: skip
    wanted = VALUES[name, arguments]
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    assert config.dtype == "bfloat16"
    assert (config.data.mean, config.data.std) == (cfg.IMAGENET_MEAN, cfg.IMAGENET_STD)


def traced(config, classes=150):
    """The run, and the shapes of state and metrics after one step at full size."""
    side = config.data.image_size
    images = data.LabelMaps(
        np.zeros((2, side, side, 3), np.uint8), np.zeros((2, side, side), np.uint8), "x", "train",
        classes,
    )  # fmt: skip
    with_classes = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_classes=classes)
    )
    plan = {}

    def whole(batch):
        model = restore.create(with_classes)
        plan["run"] = run = assemble(with_classes, make_mesh(), images, images, model)
        return make_step(run)(initial_state(run, model), batch)

    of = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype)
    byte = jnp.uint8
    batch = {"image": of(side, side, 3, dtype=byte), "label": of(side, side, dtype=byte)}
    return plan, jax.eval_shape(whole, batch | {"extent": of(2), "epoch": of(), "index": of()})


# Parameters: backbone without classifier, and for UperNet without the last norm; neck; heads.
FULL = [
    ("segmenter", "variant=deit_ti16", 5_524_416 + (1024 - 196) * 192 + 1_029_996),
]
SLOW = [
    ("segmenter", "variant=deit_s16,position=lape(ape)", None),
    (
        "upernet",
        "variant=b,position=rope_mixed",
        86_585_320 - 768 * 1001 - 232 - 196 * 768 + 12 * 12 * 64 - 2 * 768
        + 7_081_728 + 67_963_542 + 1_808_534,
    ),
    ("upernet", "variant=l,position=rope_mixed+ape", None),
    (  # Swin-S without classifier and last norm, the norms of its stages, both decoders
        "mask2former",
        "variant=swin_s,position=rpb",
        49_606_258 - 768 * 1001 - 232 - 2 * 768 + 2 * 1440 + 5_421_504 + 14_497_431,
    ),
    ("mask2former", "variant=swin_b,position=rope_mixed", None),
    ("upernet", "variant=adapter_ti,position=ape", None),
    ("upernet", "variant=adapter_s,position=lape(ape)", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [*FULL, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_recipes_are_traced_at_full_size(name, arguments, parameters):
    config = resolved(name, arguments)
    plan, (state, metrics) = traced(config)
    run = plan["run"]
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "learning_rate"}
    assert run.total_steps == 160_000
    if parameters is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == parameters
    assert ("stats" in state) == (name == "upernet")
    rate = config.optim.learning_rate
    warm = config.optim.warmup_steps
    assert float(run.schedule(warm)) == pytest.approx(
        rate * (1 - warm / 160_000) ** config.optim.power, rel=0.02
    )
    assert float(run.schedule(0)) <= max(rate * 1e-5, 0 if warm else rate)
    assert float(run.schedule(159_999)) < 0.02 * rate


@pytest.fixture
def masks(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(4):
            classes = rng.integers(0, 3, (3, 4)).repeat(24, 0).repeat(24, 1).astype(np.uint8)
            pixels = np.repeat(80 * classes[..., None], 3, -1)
            (tmp_path / split).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / split / f"{number}.jpg")
            Image.fromarray(classes).save(tmp_path / split / f"{number}.png")
    (tmp_path / "classes.txt").write_text("sky\nsea\nsand\n")
    return tmp_path


PLAIN = "patch_size=8,width=32,depth=4,heads=2"
MASKS = "mask2former(width=16,groups=4,heads=2,pixel_depth=2,depth=3,queries=6,loss_points=64)"
TOYS = [
    ("upernet", "variant=b", f"{PLAIN},drop_path=0.1"),
    ("mask2former", "", "width=8,heads=(1,2,2,4),depths=(1,1,2,1),drop_path=0.1"),
    ("upernet", "variant=adapter_s,position=ape",
     "width=32,depth=4,heads=2,groups=(0,1,2,3),prior_width=8,deform_heads=2"),
    ("segmenter", "", "patch_size=8,width=64,depth=2,heads=2"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "options"), TOYS)
def test_steps_in_bfloat16(name, arguments, options, masks):
    """Of a folder of masks: every number is finite, and every kernel moves.

    The first step leaves ViT-Adapter's injectors as they are, whose gates are 0 before it.
    """
    small = {"model__head": MASKS} if name == "mask2former" else {}
    config = resolved(
        name, f"{arguments},resolution=64,source=masks,path={masks}", data__workers=0, steps=4,
        batch_size=4, model__options=options, optim__warmup_steps=0, **small,
    )  # fmt: skip
    run, model = prepare(config)
    state = initial_state(run, model)
    before = jax.tree.map(np.asarray, state["params"])
    batches, _ = training_batches(run, 0)
    step = make_step(run)
    for _ in range(3):
        state, metrics = step(state, put_batch(next(batches), run.mesh))
        assert all(np.isfinite(float(value)) for value in metrics.values())
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), state["params"], before)
    still = [
        jax.tree_util.keystr(path)
        for path, value in jax.tree_util.tree_leaves_with_path(moved)
        if "kernel" in str(path[-1]) and not value > 0
    ]
    assert still == []
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.parametrize(
    ("name", "variants"),
    [("upernet", "b, l, adapter_ti, adapter_s"), ("mask2former", "swin_s, swin_b")],
)
def test_unknown_variants_are_refused(name, variants):
    with pytest.raises(cfg.ConfigError, match=f"variant=h is not one of {variants}"):
        recipe(name, "variant=h")


@pytest.mark.parametrize(
    ("name", "head", "before", "count"),
    [("upernet", "UperNet", "LaPE's", 20), ("mask2former", "Mask2Former", "Mask2Former's own", 10)],
)
def test_expected_values_are_those_of_the_papers_tables(name, head, before, count):
    """Every number of a docstring, against `analysis.expected`, which has no others."""
    _, text = recipe(name)
    shown = {}
    for (kind, *positions), *rows in paragraphs(text, after="Expected mIoU", before=before):
        task = f"mIoU, {head}" if kind == "mIoU" else f"mIoU, {head}, {kind}"
        for model, *cells in rows:
            shown |= {
                (task, model, position): float(cell)
                for position, cell in zip(positions, cells, strict=True)
            }
    source = " ".join(re.search(r"in percent \((.+?)\)", text, re.S)[1].split())
    published = {
        (entry["task"], entry["model"], entry["position"]): entry["value"]
        for entry in expected.entries()
        if entry["source"] == source and head in entry.get("task", "")
    }
    assert shown == published
    assert len(shown) == count
