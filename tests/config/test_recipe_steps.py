"""A step of every recipe's models at full size, traced, and steps of small ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax import data
from rope_jax.names.text import image_pair
from rope_jax.system.sharding import make_mesh, put_batch
from rope_jax.training.setup import assemble, create, initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from tests.config.test_recipes import DENSE, RECIPES, resolve_recipe
from tests.images.coco_set import write_coco
from tests.images.test_pairs import write_pairs


def predicts_pixels(config):
    return config.model.head is not None and not config.model.head.startswith(("dino", "mask_rcnn"))


def trace(config, count, classes):
    """The setup and the shapes of state and metrics after one step, without arrays."""
    size = image_pair(config.data.image_size)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_classes=config.model.num_classes or classes),
        data=dataclasses.replace(config.data, image_size=size),
    )
    shape_of_field = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(
        (config.batch_size, *shape), dtype
    )
    batch = {
        "image": shape_of_field(*size, 3, dtype=jnp.uint8),
        **dict.fromkeys(("label", "epoch", "index"), shape_of_field()),
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
        model = create(config)
        for resolution in config.test_sizes:
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
    config, count, classes = resolve_recipe(text), 1_281_167, 1000
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
    images = np.random.default_rng(0).integers(0, 256, (256, 32, 32, 3), np.uint8)
    train = {"train_images": images, "train_labels": np.arange(256) % 10}
    np.savez(folder / "set.npz", **train, test_images=images[:64], test_labels=np.arange(64) % 10)
    return folder / "set.npz"


CLASSES = {
    "data.source": "npz", "batch_size": 32, "epochs": 12.0, "optim.warmup_epochs": 0.0,
    "dtype": "float32", "eval.resolutions": (),
}  # fmt: skip
PIXELS = {"data.source": "masks", "batch_size": 4, "steps": 4, "optim.warmup_steps": 0}
MASKS = "mask2former(width=16,groups=4,heads=2,pixel_depth=2,depth=3,queries=6,loss_points=64)"
BOXES = {
    "batch_size": 4, "steps": 4, "data.canvases": (64,), "data.max_boxes": 4,
    "eval.frame": "fit(short=40,long=64)", "data.augment":
    "detr_crop(low=24,high=40,step=8,long=64,before_low=20,before_high=30,before_step=5,"
    "cut_low=16,cut_high=30)+flip", "model.head":
    "dino(width=16,groups=4,heads=2,encoder_depth=1,decoder_depth=2,hidden=32,queries=12,"
    "denoising=6,detections=8)",
}  # fmt: skip
REGIONS = BOXES | {
    "model.head": "mask_rcnn(width=16,hidden=16,anchor_samples=16,box_samples=16,"
    "train_candidates=8,candidates=8,proposals=16,detections=4)",
    "data.augment": BOXES["data.augment"].replace("cut_low", "window=48,cut_low"),
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
    ("upernet:variant=b,resolution=64", write_pairs,
     "patch_size=8,width=32,depth=4,heads=2,drop_path=0.1", PIXELS),
    ("upernet:variant=adapter_s,position=ape,resolution=64", write_pairs,
     "width=32,depth=4,heads=2,groups=(0,1,2,3),prior_width=8,deform_heads=2", PIXELS),
    ("segmenter:resolution=64", write_pairs, "patch_size=8,width=64,depth=2,heads=2", PIXELS),
    ("mask2former:resolution=64", write_pairs, FOUR, PIXELS | {"model.head": MASKS}),
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
    images = {"data.path": str(write(tmp_path / "set")), "data.workers": 0}
    config = resolve_recipe(text, {"model.options": options} | images | changes)
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
