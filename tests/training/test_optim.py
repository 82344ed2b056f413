import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import ConfigError, OptimConfig
from rope_jax.training import optim
from rope_jax.training.trees import named_leaves


def schedule(epochs, steps_per_epoch, **options):
    return optim.learning_rate_schedule(
        OptimConfig(**options), epochs=float(epochs), steps_per_epoch=float(steps_per_epoch)
    )


def cosine(time, total, peak, end):
    return end + (peak - end) * (1 + math.cos(math.pi * time / total)) / 2


def warmup(step, steps, low, peak):
    return low + (peak - low) * step / steps


THESIS = {
    "learning_rate": 1e-3,
    "min_learning_rate": 5e-6,
    "warmup_epochs": 20.0,
    "warmup_learning_rate": 1e-6,
    "warmup_prefix": False,
    "cooldown_epochs": 10.0,
}
THESIS_EPOCH = 1281167 / 1024  # steps
DEIT = {
    "learning_rate": 4e-3,
    "min_learning_rate": 1e-5,
    "warmup_epochs": 5.0,
    "warmup_learning_rate": 1e-6,
    "warmup_prefix": False,
    "schedule_step": "late_epoch",
}
FROM_1 = {"learning_rate": 1.0, "min_learning_rate": 0.1}
EACH_EPOCH = {"learning_rate": 1.0, "warmup_epochs": 0.0, "schedule_step": "epoch"}
CONSTANT = {"learning_rate": 0.5, "warmup_epochs": 1.0, "schedule": "constant"}


STEPWISE = {"learning_rate": 1e-4, "schedule": "step", "warmup_epochs": 0.0}
AT_MILESTONES = {0: 1e-4, 196: 1e-4, 197: 1e-5, 240: 1e-5, 241: 1e-6, 262: 1e-6}
POLY = {"schedule": "poly", "learning_rate": 5e-5, "warmup_learning_rate": 5e-5 * 1e-6}


def poly(step, power, end):
    """A power of the remaining fraction of 160k steps."""
    return end + (5e-5 - end) * (1 - step / 160_000) ** power


def in_epoch(epoch):
    """The first step of an epoch of DeiT, whose batches cross the ends of epochs."""
    return math.ceil(epoch * 625.5)


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "options", "expected"),
    [
        pytest.param(
            11,
            10,
            FROM_1 | {"warmup_epochs": 1.0},
            {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1},
            id="a cosine that starts where the warmup ends",
        ),
        pytest.param(1, 10, FROM_1 | {"warmup_epochs": 0.0}, {0: 1.0}, id="no warmup"),
        pytest.param(
            7,
            10,
            FROM_1 | {"warmup_epochs": 4.0, "cooldown_epochs": 2.9, "warmup_learning_rate": 0.01},
            {0: 0.01, 39: warmup(39, 40, 0.01, 1.0), 40: 1.0, 41: 0.1, 70: 0.1},
            id="a single step between warmup and cooldown",
        ),
        pytest.param(
            310,
            THESIS_EPOCH,
            THESIS,
            {
                0: 1e-6,
                round(20 * THESIS_EPOCH) - 1: warmup(25022, 25023, 1e-6, 1e-3),
                **{
                    step: cosine(step, round(300 * THESIS_EPOCH), 1e-3, 5e-6)
                    for step in (round(20 * THESIS_EPOCH), 100_000, 300_000)
                },
                round(300 * THESIS_EPOCH): 5e-6,
                round(300 * THESIS_EPOCH) + 5000: 5e-6,
            },
            id="a cosine that has run since the start, and a cooldown",
        ),
        pytest.param(
            400,
            625.5,
            DEIT,
            {
                **dict.fromkeys((0, in_epoch(1), in_epoch(2) - 1), 1e-6),
                in_epoch(2): warmup(1, 5, 1e-6, 4e-3),
                in_epoch(5): warmup(4, 5, 1e-6, 4e-3),
                in_epoch(6) - 1: warmup(4, 5, 1e-6, 4e-3),
                **{in_epoch(e): cosine(e - 1, 400, 4e-3, 1e-5) for e in (6, 7, 200, 399)},
            },
            id="a rate that changes after each epoch",
        ),
        pytest.param(
            10,
            3.5,
            EACH_EPOCH | {"min_learning_rate": 0.0},
            {step: cosine(epoch, 10, 1, 0) for step, epoch in enumerate((0, 0, 0, 0, 1, 1, 1, 2))},
            id="a rate of each epoch",
        ),
        pytest.param(
            36, 7.3, STEPWISE | {"milestones": (27.0, 33.0)}, AT_MILESTONES, id="milestones"
        ),
        pytest.param(10, 10, CONSTANT, {5: 0.25, 10: 0.5, 99: 0.5}, id="constant"),
        pytest.param(
            160,
            1000,
            POLY | {"min_learning_rate": 1e-5, "power": 0.9, "warmup_steps": 0},
            {step: poly(step, 0.9, 1e-5) for step in (0, 700, 1500, 80_000, 160_000)},
            id="Segmenter",
        ),
        pytest.param(
            160,
            1000,
            POLY | {"min_learning_rate": 0.0, "power": 1.0, "warmup_steps": 1500},
            {step: poly(step, 1.0, 0.0) * warmup(step, 1500, 1e-6, 1) for step in (0, 700, 1499)}
            | {step: poly(step, 1.0, 0.0) for step in (1500, 80_000, 160_000)},
            id="BEiT, whose warmup is a factor",
        ),
    ],
)
def test_schedules_match_their_definitions(epochs, steps_per_epoch, options, expected, capsys):
    rate = jax.jit(jax.vmap(schedule(epochs, steps_per_epoch, **options)))
    result = rate(np.array([*expected], np.int32))
    np.testing.assert_allclose(result, [*expected.values()], rtol=1e-6, atol=1e-10)
    assert not capsys.readouterr().err  # warmup and cooldown fit


def rates_per_step(epochs, steps_per_epoch, **options):
    rate = schedule(epochs, steps_per_epoch, learning_rate=1.0, min_learning_rate=0.1, **options)
    return np.asarray(jax.jit(jax.vmap(rate))(np.arange(epochs * steps_per_epoch + 1)))


@pytest.mark.parametrize("curve", ["cosine", "poly"])
@pytest.mark.parametrize(
    ("epochs", "ends", "fit"),
    [
        (5, {"warmup_epochs": 20.0, "cooldown_epochs": 10.0}, (0.5, 0.5)),
        (5, {"warmup_epochs": 5.0}, (0.5, 0.0)),
        (5, {"warmup_steps": 200}, (0.5, 0.0)),
        (5, {"warmup_epochs": 0.0, "cooldown_epochs": 5.0}, (0.0, 0.5)),
        (10, {"warmup_epochs": 8.0, "cooldown_epochs": 2.0, "schedule_step": "epoch"}, (1.0, 1.0)),
        (4, {"warmup_epochs": 5.0, "schedule_step": "late_epoch"}, (1.0, 0.0)),  # whole epochs
    ],
)
def test_too_long_warmups_and_cooldowns_become_a_tenth(curve, epochs, ends, fit, capsys):
    shortened = rates_per_step(epochs, 20, **ends, schedule=curve)
    assert f"cooldown do not fit into a run of {epochs}: they" in capsys.readouterr().err
    ends = ends | {"warmup_steps": None, "warmup_epochs": fit[0], "cooldown_epochs": fit[1]}
    np.testing.assert_array_equal(shortened, rates_per_step(epochs, 20, **ends, schedule=curve))
    assert not capsys.readouterr().err


def test_options_without_effect_are_named(capsys):
    rates_per_step(10, 20, milestones=(3.0,), schedule="cosine")
    assert "milestones=(3.0,) have no effect with schedule=cosine" in capsys.readouterr().err
    model = rope_jax.create_model("vit_digits", depth=1, width=16, heads=1)
    params = nnx.state(model, nnx.Param)
    optim.make_optimizer(OptimConfig(backbone_rate=0.1), lambda step: 0.1, params)
    assert "backbone_rate=0.1 has no effect without a head" in capsys.readouterr().err


def parameters(model, **options):
    """The parameters of a model, as shapes."""
    create = lambda: rope_jax.create_model(model, **options)
    return nnx.state(nnx.eval_shape(create), nnx.Param)


SCANNED = ("deit_ti16", {"position": "lape(ape)+rope_mixed", "depth": 2, "scan_layers": True})
MASK2FORMER = (
    "swin_t",
    {
        "head": "mask2former(width=8,heads=2,groups=2,depth=1,pixel_depth=1,queries=3)",
        "num_classes": 2,
        "image_size": 64,
        "depths": (1,) * 4,
        "width": 8,
        "heads": (1,) * 4,
    },
)
DECLARED = ("class_token", "position.parts.0.inner.embedding", "position.parts.1.mixed")
# LaPE's norms are vectors in each layer, though their parameters have an axis of layers.
VECTORS = ("blocks.norm1.scale", "blocks.attn.qkv.bias", "position.parts.0.scale", "norm.bias")


V2 = {"width": 8, "depths": (1,), "heads": (1,), "image_size": 64}


@pytest.mark.parametrize(
    ("model", "exempt", "decayed", "not_decayed"),
    [
        (("swinv2_t", V2), "norms", ("head.bias",), ("stages.0.blocks.0.attn.logit_scale",)),
        (SCANNED, "declared", ("blocks.attn.qkv.kernel",), (*DECLARED, *VECTORS)),
        (SCANNED, "vectors", ("blocks.attn.qkv.kernel", *DECLARED), VECTORS),
        (SCANNED, "nothing", ("blocks.attn.qkv.kernel", *DECLARED, *VECTORS), ()),
        (
            MASK2FORMER,
            "norms",  # as detectron2 does; embeddings and bias tables are declared
            (
                "backbone.stages.0.blocks.0.attn.qkv.bias",
                "head.pixel_decoder.layers.0.attn.offset.bias",
                "head.pixel_decoder.levels",
                "head.decoder.classify.kernel",
                "head.decoder.classify.bias",
            ),
            (
                "backbone.stages.0.blocks.0.norm1.bias",
                "backbone.stages.0.position.offsets",
                "neck.norms.0.scale",
                "neck.norms.0.bias",
                "head.pixel_decoder.norms.0.bias",
                "head.decoder.levels",
                "head.decoder.queries",
                "head.decoder.positions",
            ),
        ),
    ],
    ids=["swinv2", "declared", "vectors", "nothing", "norms"],
)
def test_exemptions_from_decay(model, exempt, decayed, not_decayed):
    name, options = model
    mask = dict(named_leaves(optim.decay_mask(parameters(name, **options), exempt)))
    assert all(mask[name] for name in decayed)
    assert not any(mask[name] for name in not_decayed)


def variables(**values):
    """Parameters with their metadata: name=(value, metadata)."""
    return nnx.State(
        {
            name: nnx.Param(jax.device_put(np.float32(value)), **metadata)
            for name, (value, metadata) in values.items()
        }
    )


def small():
    draw = np.random.default_rng(0).normal
    return variables(
        kernel=(draw(size=(3, 4)), {}),
        stack=(draw(size=(2, 3, 3)), {"layers": True}),
        bias=(draw(size=4), {}),
        zeros=(np.zeros((2, 2)), {}),
    )


def random_gradients():
    """Gradients of three steps of the small parameters."""
    draw, shapes = np.random.default_rng(1).normal, nnx.to_pure_dict(small())
    return [{name: draw(size=leaf.shape) for name, leaf in shapes.items()} for _ in range(3)]


def train_steps(options, params, gradients, rate=0.1):
    """The parameters after steps with these gradients."""
    optimizer = optim.make_optimizer(OptimConfig(**options), lambda step: rate, params)
    values = nnx.to_pure_dict(params)
    state, update = optimizer.init(values), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(jax.tree.map(np.float32, gradient), state, values)
        values = jax.tree.map(np.add, values, updates)
    return values


@pytest.mark.parametrize("joined", [lambda shape: True, lambda shape: len(shape) < 2])
def test_clipping_scales_all_gradients_equally(joined):
    """Gradients are joined or not, and more than are joined at a time."""
    draw = np.random.default_rng(0).normal
    shapes = [(3, 4), (5,), *[()] * 100, (2, 3, 2)]
    gradients = {f"{i:03}": np.asarray(draw(size=x), np.float32) for i, x in enumerate(shapes)}
    norm = math.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients.values()))
    assert float(jax.jit(optim.global_norm)(gradients)) == pytest.approx(norm, rel=1e-6)

    clip = optim.clip_by_global_norm(norm / 2, joined)
    clipped = jax.jit(lambda gradients: clip.update(gradients, clip.init(gradients))[0])
    for name, gradient in clipped(gradients).items():
        np.testing.assert_allclose(gradient, gradients[name] / 2, rtol=1e-6)
    small = {name: original / 4 for name, original in gradients.items()}
    jax.tree.map(np.testing.assert_array_equal, clipped(small), small)
    # As in checkpoints of runs that were clipped by optax.
    assert clip.init(gradients) == optax.clip_by_global_norm(1.0).init(gradients)


def test_lamb_matches_its_definition():
    """In float64: clip, Adam with corrected moments, decay, norm ratio if decayed and not zero."""
    params, gradients = small(), random_gradients()
    values = {name: np.float64(value) for name, value in nnx.to_pure_dict(params).items()}
    mean, square = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for count, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert norm > 1
        for name in values:
            g = gradient[name] / norm
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.999 * square[name] + 0.001 * g**2
            deviation = np.sqrt(square[name] / (1 - 0.999**count)) + 1e-6
            update = mean[name] / (1 - 0.9**count) / deviation
            if name != "bias":
                update += 0.03 * values[name]
                # Each layer of a stack is a tensor of its own.
                axes = (1, 2) if name == "stack" else None
                length = lambda x, axes=axes: np.sqrt((x**2).sum(axes, keepdims=True))
                before = length(values[name])
                update *= np.where(before > 0, before / length(update), 1)
            values[name] = values[name] - 0.1 * update
    options = {"name": "lamb", "weight_decay": 0.03, "eps": 1e-6, "clip_norm": 1.0}
    after = train_steps(options, params, gradients)
    for name in values:
        np.testing.assert_allclose(after[name], values[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_matches_its_definition(nesterov):
    params, gradients = small(), random_gradients()
    value = np.float64(params["kernel"][...])
    momentum = np.zeros_like(value)
    for gradient in gradients:
        g = gradient["kernel"] + 0.01 * value  # decay is part of the gradient
        momentum = 0.8 * momentum + g
        value = value - 0.1 * (g + 0.8 * momentum if nesterov else momentum)
    options = {
        "name": "sgd",
        "momentum": 0.8,
        "nesterov": nesterov,
        "weight_decay": 0.01,
        "clip_norm": None,
    }
    after = train_steps(options, params, gradients)
    np.testing.assert_allclose(after["kernel"], value, rtol=1e-5, atol=1e-6)


def rates(model, position, last_norm="head", **options):
    """The factors of a model's parameters, checked to broadcast to them."""
    params = parameters(model, position=position, **options)
    factors = optim.layer_rates(params, 0.5, last_norm)
    jax.tree.map(lambda rate, x: np.broadcast_to(rate, x.shape), factors, nnx.to_pure_dict(params))
    return dict(named_leaves(factors))


PLAIN = ("deit_ti16", "rope_mixed+ape", {"depth": 3})
STAGES = ("swin_t", "rpb", {"depths": (1, 1, 2, 1)})
# Tables of layers that differ in shape are separate parameters.
WINDOWS = (
    "vit_s16",
    "decomposed",
    {"attention": "window", "window_size": 4, "global_blocks": (1,), "depth": 3, "width": 24}
    | {"heads": 3},
)
DENSE = ("deit_ti16", "none", {"head": "segmenter(head_dim=8)", "num_classes": 3, "depth": 2})
OF_PLAIN = {
    r"head\.kernel|^norm\.scale": [1.0],
    r"blocks.*qkv\.kernel|position\.parts\.0\.mixed": [0.125, 0.25, 0.5],
    r"patch_embed\.proj\.kernel|class_token|position\.parts\.1\.embedding": [0.0625],
}
OF_STAGES = {
    r"stages\.0\.blocks.*qkv\.kernel": [2.0**-5],
    r"stages\.1\.blocks.*qkv\.kernel": [2.0**-4],
    r"stages\.2\.blocks.*qkv\.kernel|stages\.2\.position\.offsets": [0.125, 0.25],
    r"stages\.3\.blocks.*qkv\.kernel": [0.5],
    r"stages\.2\.downsample\.reduction\.kernel": [0.25],
    r"patch_embed\.proj\.kernel": [2.0**-6],
    r"head\.kernel": [1.0],
}


def tiny_digits(position, **options):
    return "vit_digits", position, {"heads": 1} | options


@pytest.mark.parametrize(
    ("model", "scan", "expected"),
    [
        (PLAIN, False, OF_PLAIN),
        (PLAIN, True, OF_PLAIN),
        (STAGES, False, OF_STAGES),
        (STAGES, True, OF_STAGES),
        (WINDOWS, False, {r"position\.rows|position\.columns": [0.125, 0.25, 0.5]}),
        # A kernel of three rows, or a table of three positions, in a model of three layers.
        *(
            (
                tiny_digits(name, depth=3, width=16, image_size=(2, 6)),
                False,
                {"^position": [1 / 16]},
            )
            for name in ("peg", "gpe", "ape")
        ),
        # Its scale has only an axis of channels, as many as there are layers.
        (
            tiny_digits("lape(ape,join=shared_norm)", depth=4, width=4),
            False,
            {"^position": [1 / 32]},
        ),
        (
            tiny_digits("lape(ape)", depth=3, width=4),
            False,
            {r"position\.scale": [0.125, 0.25, 0.5]},
        ),
        (
            DENSE,
            False,
            {
                r"^head\.blocks\.0\.mlp\.fc1\.kernel|backbone\.norm\.scale": [1.0],
                r"backbone\.blocks.*fc1\.kernel": [0.25, 0.5],
                r"backbone\.patch_embed\.proj\.kernel": [0.125],
            },
        ),
    ],
)
def test_layer_decay_follows_the_depth(model, scan, expected):
    """Patterns match parameters; their unique rates are compared in the order of the layers."""
    name, position, options = model
    factors = rates(name, position, **options, scan_layers=scan)
    for pattern, values in expected.items():
        matching = [np.ravel(rate) for name, rate in factors.items() if re.search(pattern, name)]
        assert [*dict.fromkeys(np.concatenate(matching).tolist())] == values, pattern


def test_the_last_norm_has_the_rate_of_head_or_last_block():
    """No other parameter changes; timm counts the norm with the last block."""
    for model, options in (("deit_ti16", {"depth": 3}), ("swin_t", {"depths": (1, 1, 1, 1)})):
        head, block = (rates(model, "none", last_norm=x, **options) for x in ("head", "block"))
        changed = {name: (head[name], block[name]) for name in head if head[name] != block[name]}
        assert changed == dict.fromkeys(("norm.scale", "norm.bias"), (1.0, 0.5))


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        ("cat_5", {"imprint_token": True}, {"imprint_token"}),
        ("ceit_t", {}, {"lca", "layer_embedding"}),
        ("cct_7_3x1", {}, {"attention_pool"}),
        (
            "vit_adapter_ti16",
            {"depth": 4, "groups": (0, 1, 2, 3), "deform_heads": 3},
            {"prior", "levels", "interactions", "up", "map_norms"},
        ),
    ],
)
def test_parameters_outside_of_blocks_have_the_rate_of_the_head(model, options, names):
    factors = rates(model, "none", **{"depth": 2, "width": 24, "heads": 3} | options)
    with_head = {name.split(".")[0] for name, rate in factors.items() if np.all(rate == 1)}
    assert with_head - {"norm", "head"} == names


def test_layer_decay_needs_declared_depths():
    params = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    with pytest.raises(ConfigError, match=r"layer_decay=0\.5 .*make_blocks"):
        optim.layer_rates(params, 0.5)


def test_layer_decay_scales_steps_and_weight_decay():
    block = lambda **declared: {
        "fc1": {"kernel": nnx.Param(jax.device_put(np.ones((2, 2), np.float32)), **declared)}
    }
    blocks = {0: block(depth=1), 1: block(depth=2)}
    params = nnx.State({"patch_embed": block(depth=0), "blocks": blocks, "head": block()})
    values = nnx.to_pure_dict(params)
    options = {"weight_decay": 0.5, "clip_norm": None}
    moved = lambda decay: train_steps(
        options | {"layer_decay": decay}, params, [jax.tree.map(np.ones_like, values)]
    )
    plain, decayed = (
        dict(named_leaves(jax.tree.map(lambda x: 1 - x, moved(decay)))) for decay in (1.0, 0.5)
    )
    for name, factor in (("head", 1), ("blocks.1", 2), ("blocks.0", 4), ("patch_embed", 8)):
        np.testing.assert_allclose(plain[f"{name}.fc1.kernel"], 0.1 * (1 + 0.5), rtol=1e-5)
        np.testing.assert_allclose(
            decayed[f"{name}.fc1.kernel"] * factor, plain[f"{name}.fc1.kernel"], rtol=1e-5
        )


def test_milestones_may_be_steps():
    options = OptimConfig(**STEPWISE | {"milestones": (197.0, 241.0)})
    rate = optim.learning_rate_schedule(
        optim.in_epochs(options, 7.3), epochs=36.0, steps_per_epoch=7.3
    )
    values = jax.jit(jax.vmap(rate))(np.array([*AT_MILESTONES]))
    np.testing.assert_allclose(values, [*AT_MILESTONES.values()], rtol=1e-5)
    with pytest.raises(ValueError, match="needs milestones"):
        schedule(36, 10, schedule="step")


def test_backbones_of_dense_models_have_a_separate_rate():
    name, position, options = DENSE
    params = parameters(name, position=position, **options)
    factors = named_leaves(optim.backbone_rates(params, 0.1))
    by_part = {(name.partition(".")[0], factor) for name, factor in factors}
    assert by_part == {("backbone", 0.1), ("head", 1.0)}
