"""Every recipe builds, is traced at full size, and trains at toy size on real images."""

import dataclasses
import importlib.util
import io
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import rope_jax
from rope_jax import config as cfg
from rope_jax import data, restore
from rope_jax.evaluate import resolutions
from rope_jax.sharding import make_mesh, put_batch
from rope_jax.training.setup import assemble, initial_state, prepare, training_batches
from rope_jax.training.step import make_step

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
SMALL = (
    "digits",
    "fashion_mnist",
    "finetune",
    "own_images",
    "scenes",
    "scenes_boxes",
    "tiny_imagenet",
)
# See test_dense_recipes.py and test_detection_recipe.py.
DENSE = ("dino", "mask2former", "segmenter", "upernet")
OTHERS = {*SMALL, *DENSE}
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in OTHERS)


def recipe(name, arguments=""):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arguments), module.__doc__


def resolved(name, arguments="", **changes):
    raw, _ = recipe(name, arguments)
    for key, value in changes.items():
        section, _, field = key.rpartition("__")
        with (raw[section] if section else raw).ignore_type():
            (raw[section] if section else raw)[field] = value
    return cfg.resolve(raw)


def test_the_list_of_recipes():
    assert RECIPES == ["cat", "cct", "deit3", "lape", "swin", "thesis"]


def traced(config, images_in_set=1_281_167, classes=1000):
    """The shapes of state and metrics after one step at full size, without an array of it."""
    size = (
        config.data.image_size
        if isinstance(config.data.image_size, tuple)
        else (config.data.image_size,) * 2
    )
    images = data.Images(
        np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (images_in_set, *size, 3)),
        np.zeros(images_in_set, np.int32),
        "x",
        "train",
        classes,
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_classes=config.model.num_classes or classes),
        data=dataclasses.replace(config.data, image_size=size),
    )
    plan = {}

    def whole(batch):
        model = restore.create(config)
        for resolution in resolutions(config):
            model.grids(resolution)  # refuses those that cannot be evaluated
        run = assemble(config, make_mesh(), images, images, model)
        plan["run"] = run
        return make_step(run)(initial_state(run, model), batch)

    of = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype)
    state, metrics = jax.eval_shape(
        whole, {"image": of(*size, 3, dtype=jnp.uint8), "label": of(), "epoch": of(), "index": of()}
    )
    return plan["run"], state, metrics


# Of each recipe the smallest model here, the others among the slow ones.
FULL = [
    ("cat", "", 32_691_256, 10),
    ("cct", "position=ape", 3_760_139, 310),
]
SLOW = [
    ("swin", "variant=swin_t,position=rpb", 28_288_354, 300),
    ("thesis", "variant=nat_mini,position=rpb", 19_984_174, 310),
    ("lape", "variant=deit_ti16", 5_722_024, 300),
    ("deit3", "variant=s,position=rope_mixed", 21_988_840, 400),
    (
        "deit3",
        "variant=l,position=rope_mixed+ape",
        304_399_336 - (196 - 144) * 1024,
        400,
    ),  # its table is of 192 pixels
    ("deit3", "variant=b,position=ape,stage=finetune,init_from=x", 86_585_320, 20),
    ("lape", "variant=t2t_vit_7,position=sincos1d", 4_255_694, 310),
    ("lape", "variant=ceit_t,position=ape", 6_356_904, 300),
    ("lape", "variant=swin_s,position=rpb", 49_606_258, 300),
    ("swin", "variant=swin_b,position=rope_mixed", 87_716_712, 300),
    ("thesis", "variant=nat_base,position=rpb", 89_769_652, 310),
    ("thesis", "variant=vit_b16,position=none", 86_417_128, 310),
    ("cct", "variant=vit_lite_7_4,dataset=cifar100,position=ape", None, 310),
    ("cat", "variant=cat_vit_5", None, 10),
]


@pytest.mark.parametrize(
    ("name", "arguments", "parameters", "epochs"),
    [*FULL, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_recipes_are_traced_at_full_size(name, arguments, parameters, epochs):
    config = resolved(name, arguments)
    cifar = name == "cct"
    run, state, metrics = traced(
        config,
        **(
            {"images_in_set": 50_000, "classes": 100 if "cifar100" in arguments else 10}
            if cifar
            else {}
        ),
    )
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "learning_rate"}
    assert metrics["loss"].shape == ()
    assert ("ema" in state) == (config.ema_decay is not None)
    if parameters is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == parameters
    images = data.epoch_length(len(run.images.labels), config.data.repeats)
    assert run.total_steps == round(epochs * images / config.batch_size)
    peak = max(
        float(run.schedule(round(epoch * images / config.batch_size) + 1))
        for epoch in range(int(config.optim.warmup_epochs) + 3)
    )
    assert peak == pytest.approx(
        config.optim.learning_rate, rel=0.1
    )  # where the cosine has run since the start, it is lower already
    least = float(run.schedule(run.total_steps - 1))
    assert least == pytest.approx(config.optim.min_learning_rate, rel=0.01, abs=1e-6)


VALUES = {
    ("deit3", ""): {
        "batch_size": 2048, "epochs": 400, "loss": "binary", "smoothing": 0, "image_size": 224,
        "drop_path": 0, "name": "lamb", "rate": 4e-3, "least": 1e-5, "start": 1e-6, "warmup": 5,
        "decay": 0.03, "clip": 1, "repeats": 3, "step": "late_epoch", "prefix": False, "frame":
        "centre(crop=1.0,interpolation=bicubic)", "augment":
        "resized_crop(interpolation=bicubic)+flip+three_augment+color_jitter", "groups": 8,
    },
    ("deit3", "variant=b"): {"image_size": 192, "drop_path": 0.1, "rate": 3e-3},
    ("deit3", "variant=l"): {"image_size": 192, "drop_path": 0.4, "rate": 3e-3, "groups": 64},
    ("deit3", "variant=b,stage=finetune,init_from=x"): {
        "image_size": 224, "drop_path": 0.2, "epochs": 20,
    },
    ("deit3", "variant=l,stage=finetune,init_from=x"): {
        "batch_size": 512, "loss": "softmax", "smoothing": 0.1, "drop_path": 0.45, "name": "adamw",
        "rate": 1e-5, "decay": 0.1, "clip": None, "repeats": 1, "mixup": 0.8, "cutmix": 1,
        "groups": 64,
    },
    ("thesis", ""): {
        "batch_size": 1024, "epochs": 310, "cooldown": 10, "warmup": 20, "ema": None, "rate": 1e-3,
        "least": 5e-6, "start": 1e-6, "decay": 0.05, "clip": 5, "smoothing": 0.1, "mixup": 0.8,
        "cutmix": 1, "groups": 8, "step": "iteration", "prefix": False, "before_erasing": True,
        "frame": "centre(crop=0.875,interpolation=bicubic)",
    },
    ("thesis", "position=rpb+ape"): {"position": "rpb(decay=True)+ape"},
    ("thesis", "position= rpb + ape"): {"position": "rpb(decay=True)+ape"},
    ("thesis", "position=rpb(std=0)"): {"position": "rpb(std=0,decay=True)"},
    ("thesis", "position=ape+rpb(shrink=crop)"): {"position": "ape+rpb(shrink=crop,decay=True)"},
    ("thesis", "position=rpb(decay=False)"): {"position": "rpb(decay=False)"},
    ("thesis", "position=lape(sincos2d(order=lape))"): {"position": "lape(sincos2d(order=lape))"},
    ("thesis", "variant=nat_base"): {"batch_size": 1024, "warmup": 50, "ema": 0.9998, "rate": 1e-3},
    ("thesis", "variant=nat_base,base=nat"): {"warmup": 20, "ema": None},
    ("swin", ""): {
        "rate": 1e-3, "least": 1e-5, "start": 1e-6, "warmup": 20, "prefix": True, "clip": 5,
        "decay": 0.05, "before_erasing": False, "groups": 8, "scaled": True,
    },
    ("swin", "resolution=224"): {"options": ""},
    ("swin", "resolution=384"): {"options": "window_size=None"},
    ("swin", "batch_size=2048"): {"rate": 2e-3, "least": 2e-5, "start": 2e-6, "batch_size": 2048},
    ("lape", ""): {
        "rate": 1e-3, "least": 1e-5, "decay": 0.05, "batch_size": 1024, "epochs": 300, "warmup": 5,
        "repeats": 3, "groups": 8, "ema": None, "position": "lape(ape)",
        "frame": "centre(crop=1.0,interpolation=bicubic)",
        "frames": "centre(crop=0.875,interpolation=bicubic)",
    },
    ("lape", "variant=ceit_t"): {
        "rate": 1e-3, "least": 1e-5, "decay": 0.05, "batch_size": 1024, "epochs": 300, "warmup": 5,
        "step": "late_epoch", "prefix": False, "start": 1e-6, "clip": None, "repeats": 3,
    },
    ("lape", "variant=swin_t"): {
        "rate": 5e-4, "least": 5e-6, "decay": 0.05, "batch_size": 512, "epochs": 300, "warmup": 20,
    },
    ("lape", "variant=t2t_vit_7"): {
        "rate": 1e-3, "least": 1e-5, "decay": 0.03, "batch_size": 1024, "epochs": 310, "warmup": 10,
        "ema": 0.99996, "position": "lape(sincos1d)", "step": "epoch", "cooldown": 10, "augment":
        "resized_crop(interpolation=random)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True,interpolation=random)+erase(p=0.25)",
    },
    ("cct", "erasing=0.0"): {
        "augment": "resized_crop(scale_min=0.8,interpolation=random)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True)",
    },
    ("cct", "position=lape(ape)+rpb"): {"position": "lape(ape(std=0.2,resize=bilinear))+rpb"},
    ("cct", "position=ape(std=0.02)"): {"position": "ape(std=0.02,resize=bilinear)"},
    ("cct", "dataset=cifar100"): {"rate": 6e-4, "start": 1e-6, "off": None, "decay": 0.06},
    ("cct", ""): {
        "rate": 5.5e-4, "least": 1e-5, "start": 1e-5, "off": 175, "batch_size": 128, "decay": 0.06,
        "epochs": 310, "warmup": 10, "cooldown": 10, "step": "epoch", "groups": 1,
        "exempt": "vectors",
        "augment": "resized_crop(scale_min=0.8,interpolation=random)+flip"
        "+rand_augment(m=9,mstd=0.5,inc=True)+erase(p=0.25)", "position": None,
    },
    ("cat", ""): {
        "rate": 3e-4, "least": 0, "warmup": 0, "decay": 0.01, "exempt": "nothing",
        "batch_size": 128, "epochs": 10,
        "mixup": 0, "cutmix": 0, "smoothing": 0, "augment": "stretch(interpolation=bilinear)",
        "frame": "stretch(interpolation=bilinear)",
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), VALUES)
def test_values_of_the_recipes(name, arguments):
    config = resolved(name, arguments)
    found = {
        "batch_size": config.batch_size,
        "loss": config.loss,
        "image_size": config.data.image_size,
        "drop_path": cfg.model_overrides(config.model.options).get("drop_path"),
        "name": config.optim.name,
        "rate": config.optim.learning_rate,
        "least": config.optim.min_learning_rate,
        "start": config.optim.warmup_learning_rate,
        "warmup": config.optim.warmup_epochs,
        "decay": config.optim.weight_decay,
        "ema": config.ema_decay,
        "off": config.mix.off_epoch,
        "mixup": config.mix.mixup,
        "groups": config.mix.groups,
        "cutmix": config.mix.cutmix,
        "before_erasing": config.mix.before_erasing,
        "epochs": config.epochs,
        "cooldown": config.optim.cooldown_epochs,
        "clip": config.optim.clip_norm,
        "step": config.optim.schedule_step,
        "prefix": config.optim.warmup_prefix,
        "smoothing": config.label_smoothing,
        "repeats": config.data.repeats,
        "augment": config.data.augment,
        "frame": config.eval.frame,
        "frames": "+".join(config.eval.frames),
        "position": config.model.position,
        "options": config.model.options,
        "exempt": config.optim.exempt,
        "scaled": config.eval.scale_windows,
    }
    wanted = VALUES[name, arguments]
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)


def test_swin_is_trained_with_the_windows_of_its_first_row():
    for resolution, side in ((224, 7), (384, 12)):
        config = resolved("swin", f"resolution={resolution}")
        options = cfg.model_overrides(config.model.options)
        model = nnx.eval_shape(
            lambda size=resolution, options=options: rope_jax.create_model(
                "swin_t", image_size=size, **options
            )
        )
        assert model.window == (side, side)
        assert config.eval.scale_windows  # which leaves windows of the training resolution alone
        model.scale_windows()
        model.prepare((resolution, resolution))
        assert model.window == (side, side)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("deit3", "variant=s,stage=finetune", "stage=finetune with variant b, l"),
        ("deit3", "variant=b,stage=finetune", "add init_from="),
        ("thesis", "base=none", "not one of table, nat"),
        ("thesis", "position=rpb++ape", r"cannot be read .*\[recipe argument position\]"),
        ("cct", "dataset=mnist", "not one of cifar10, cifar100"),
        ("lape", "variant=nat_mini", "not one of deit, ceit, t2t, swin"),
        ("swin", "positon=rpb", "did you mean 'position'"),
        ("tiny_imagenet", "backbone=resnet", "backbone='resnet' is unknown; known are vit, swin"),
    ],
)
def test_mistakes_are_refused(name, arguments, message):
    with pytest.raises(cfg.ConfigError, match=message):
        recipe(name, arguments)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """320 real images of ten classes, 32 pixels a side; 256 of them for training."""
    archive = np.load(pathlib.Path(os.environ["ROPE_JAX_TEST_IMAGES"], "cifar10_jpeg75.npz"))
    header, body, offsets = archive["header"].tobytes(), archive["body"], archive["offsets"]
    decode = lambda k: np.asarray(
        Image.open(io.BytesIO(header + body[offsets[k] : offsets[k + 1]].tobytes())).convert("RGB")
    )
    images, labels = (
        np.stack([decode(k) for k in range(320)]),
        archive["labels"][:320].astype(np.int64),
    )
    path = tmp_path_factory.mktemp("photos") / "photos.npz"
    np.savez(
        path,
        train_images=images[:256],
        train_labels=labels[:256],
        test_images=images[256:],
        test_labels=labels[256:],
    )
    return path


TOYS = {
    "cat": "patch_size=8,width=32,depth=1,heads=2",
    "cct": "width=32,depth=1,heads=2,conv_width=16",
    "deit3": "patch_size=8,width=32,depth=1,heads=2",
    "lape": "patch_size=8,width=32,depth=1,heads=2",
    "swin": "width=16,depths=(1,1),heads=(1,2),window_size=4",
    "thesis": "width=16,depths=(1,1),heads=(1,2),kernel_size=3",
}


@pytest.mark.images("cifar10_jpeg75.npz")
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "deit3"), "deit3"]
)
def test_recipes_train_at_toy_size(name, photos):
    """Three steps on real images: every number is finite, and every kernel moves."""
    config = resolved(
        name, "resolution=32", data__source="npz", data__path=str(photos), data__workers=0,
        batch_size=32, dtype="float32",
        model__options=TOYS[name], epochs=12.0, eval__resolutions=(), optim__warmup_epochs=0.0,
    )  # fmt: skip
    run, model = prepare(config)
    state = initial_state(run, model)
    before = jax.tree.map(np.asarray, state["params"])
    step = make_step(run)
    batches, _ = training_batches(run, 0)
    for _ in range(3):
        state, metrics = step(state, put_batch(next(batches), run.mesh))
        assert all(np.isfinite(float(value)) for value in metrics.values())
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - b).max()), state["params"], before
    )
    kernels = [
        value
        for path, value in jax.tree_util.tree_leaves_with_path(moved)
        if "kernel" in str(path[-1])
    ]
    assert min(kernels) > 0
    assert run.total_steps == 12 * 256 // 32
