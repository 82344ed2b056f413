"""The values of every recipe, and the sizes that its models take."""

import json
import operator
import pathlib

import jax
import pytest
from flax import nnx

import rope_jax
from rope_jax import config as cfg
from rope_jax.data.sources import scenes

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
DENSE = ("dino", "mask2former", "mask_rcnn", "segmenter", "upernet")
RECIPES = ("cat", "cct", "deit3", "lape", "swin", "thesis")


def resolve_recipe(*recipe):
    return cfg.resolve(cfg.load_recipe(*recipe))


# Settings of the papers and the official code, by recipe and arguments; those that tables of the
# papers print are compared in tests/papers, too.
VALUES = json.loads(pathlib.Path(__file__).with_name("values.json").read_text())


@pytest.mark.parametrize("text", VALUES)
def test_recipes_have_the_recorded_values(text):
    config = resolve_recipe(text)
    values = {name: operator.attrgetter(name)(config) for name in VALUES[text]}
    assert json.loads(json.dumps(values)) == VALUES[text]


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [("own_images", "batch"), ("finetune:weights=x", "batch_size"), ("swin", "batch_size")],
)
def test_the_learning_rate_follows_the_batch_size(recipe, argument):
    by_argument = resolve_recipe(cfg.with_arguments(recipe, **{argument: 96}))
    assert resolve_recipe(recipe, {"batch_size": 96}) == by_argument
    assert resolve_recipe(recipe).optim.learning_rate != by_argument.optim.learning_rate
    explicit = resolve_recipe(recipe, {"optim.learning_rate": 0.01, "batch_size": 96})
    assert (explicit.optim.learning_rate, explicit.batch_size) == (0.01, 96)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("deit3", "variant=s,stage=finetune", "stage=finetune with variant b, l"),
        ("deit3", "variant=b,stage=finetune", "add init_from="),
        ("deit3", "variant=b,stage=finetune,init_from=None", "add init_from="),
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
        ("finetune", "weights=None", "weights= is missing"),
        ("digits", "resolutions=8+", r"resolutions=8\+: use sides in pixels joined by \+"),
        ("resformer", "resolutions=224+0", r"resolutions=224\+0: use sides in pixels"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.load_recipe(f"{name}:{arguments}")


def create(config, classes):
    """The model of a recipe, with its weights as shapes."""
    options = cfg.model_overrides(config.model.options)
    return nnx.eval_shape(
        lambda: rope_jax.create_model(
            config.model.name,
            position=config.model.position,
            head=config.model.head,
            image_size=config.data.image_size,
            num_classes=classes,
            **options,
        )
    )


@pytest.mark.parametrize(
    ("text", "resolution", "side"),
    [
        *(("swin", 224, 7), ("swin:resolution=384", 384, 12)),
        *(("swin:variant=swinv2_t", 256, 8), ("cat:variant=swinv2_t", 224, 7)),
    ],
)
def test_swin_trains_with_the_windows_of_its_resolution(text, resolution, side):
    config = resolve_recipe(text)
    assert config.data.image_size == resolution
    model = create(config, 1000)
    assert model.window == (side, side)
    assert config.eval.scale_windows or "cat" in text
    model.scale_windows()  # which leaves windows of the training resolution alone
    model.prepare((resolution, resolution))
    assert model.window == (side, side)


@pytest.mark.parametrize(("backbone", "patch"), [("vit", 8), ("swin", 4), ("nat", 4)])
def test_tiny_imagenet_can_be_evaluated_at_all_sizes(backbone, patch):
    config = resolve_recipe(f"tiny_imagenet:backbone={backbone},position=rope_mixed+ape")
    model = create(config, 50)
    for height, width in config.test_sizes:
        assert model.grids((height, width))[0] == (height // patch, width // patch)
        assert height % patch == width % patch == 0
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) < 6.1e6


@pytest.mark.parametrize(
    "text",
    [
        *(f"dino:variant={variant},position=rpb" for variant in ("vit_b", "swin_t", "swin_b")),
        "mask_rcnn",
    ],
)
def test_detectors_support_all_canvases_and_objects(text):
    """Canvases hold images of the largest size, portrait, landscape or mixed."""
    config = resolve_recipe(text)
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
    for size in config.test_sizes:
        model.grids(size)
