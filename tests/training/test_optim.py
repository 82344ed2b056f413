import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import ConfigError, OptimConfig
from rope_jax.models.blocks import declare, make_blocks
from rope_jax.training import optim
from rope_jax.training.trees import named_leaves


def schedule(epochs, steps_per_epoch, **options):
    return optim.learning_rate_schedule(
        OptimConfig(**options), epochs=float(epochs), steps_per_epoch=float(steps_per_epoch)
    )


def cosine(time, total, peak, end):
    return end + (peak - end) * (1 + math.cos(math.pi * time / total)) / 2


def test_the_cosine_starts_where_the_warmup_ends():
    rate = schedule(11, 10, learning_rate=1.0, min_learning_rate=0.1, warmup_epochs=1.0)
    assert [float(rate(s)) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert float(rate(60)) == pytest.approx(0.55)
    assert float(rate(110)) == pytest.approx(0.1)
    assert float(schedule(1, 10, learning_rate=1.0, warmup_epochs=0.0)(0)) == 1.0


def test_thesis_schedule_has_run_since_the_start_and_cools_down():
    """310 epochs of 1251.2 steps, 10 of cooldown; the rate drops from the warmup to the cosine."""
    steps = 1281167 / 1024
    rate = schedule(
        310, steps, learning_rate=1e-3, min_learning_rate=5e-6, warmup_epochs=20.0,
        warmup_learning_rate=1e-6, warmup_prefix=False, cooldown_epochs=10.0,
    )  # fmt: skip
    total, warmup = round(300 * steps), round(20 * steps)
    assert float(rate(0)) == np.float32(1e-6)
    assert float(rate(warmup - 1)) == pytest.approx(
        1e-6 + (1e-3 - 1e-6) * (warmup - 1) / warmup, rel=1e-5
    )
    for step in (warmup, 100_000, 300_000, total):
        assert float(rate(step)) == pytest.approx(cosine(step, total, 1e-3, 5e-6), rel=1e-4)
    assert float(rate(total + 5000)) == pytest.approx(5e-6)


def test_deit_schedule_changes_after_each_epoch():
    rate = schedule(
        400, 625.5, learning_rate=4e-3, min_learning_rate=1e-5, warmup_epochs=5.0,
        warmup_learning_rate=1e-6, warmup_prefix=False,
        schedule_step="late_epoch",
    )  # fmt: skip
    first = lambda epoch: math.ceil(epoch * 625.5)  # step of an epoch
    assert [float(rate(s)) for s in (0, first(1), first(2) - 1)] == pytest.approx(
        [1e-6] * 3, abs=1e-7 * 4e-3
    )
    assert float(rate(first(2))) == pytest.approx(1e-6 + (4e-3 - 1e-6) / 5)
    assert float(rate(first(5))) == pytest.approx(1e-6 + (4e-3 - 1e-6) * 4 / 5)
    assert float(rate(first(6) - 1)) == float(rate(first(5)))
    for epoch in (6, 7, 200, 399):
        assert float(rate(first(epoch))) == pytest.approx(
            cosine(epoch - 1, 400, 4e-3, 1e-5), rel=1e-4
        )


def rates_of(epochs, steps_per_epoch, **options):
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
        (4, {"warmup_epochs": 5.0, "schedule_step": "late_epoch"}, (0.0, 0.0)),  # whole epochs
    ],
)
def test_a_warmup_and_a_cooldown_that_do_not_fit_become_a_tenth(curve, epochs, ends, fit, capsys):
    found = rates_of(epochs, 20, **ends, schedule=curve)
    assert f"cooldown do not fit into a run of {epochs}: each" in capsys.readouterr().err
    ends = ends | {"warmup_steps": None, "warmup_epochs": fit[0], "cooldown_epochs": fit[1]}
    np.testing.assert_array_equal(found, rates_of(epochs, 20, **ends, schedule=curve))
    assert not capsys.readouterr().err


def test_a_warmup_and_a_cooldown_that_just_fit_stay_as_they_are(capsys):
    """To the bit, with a single step between them."""
    options = {"warmup_epochs": 4.0, "cooldown_epochs": 2.9, "warmup_learning_rate": 0.01}
    cosine = optax.cosine_decay_schedule(1.0, 1, 0.1)
    wanted = [0.01 + (1 - 0.01) * jnp.float32(step) / 40 for step in range(40)]
    wanted += [cosine(jnp.int32(step)) for step in range(31)]
    rate = schedule(7, 10, learning_rate=1.0, min_learning_rate=0.1, **options)
    assert [float(rate(step)) for step in range(71)] == [float(x) for x in wanted]
    assert not capsys.readouterr().err


def test_epochs_and_constants():
    each = schedule(
        10, 3.5, learning_rate=1.0, min_learning_rate=0.0, warmup_epochs=0.0, schedule_step="epoch"
    )
    assert [float(each(s)) for s in range(8)] == pytest.approx(
        [cosine(e, 10, 1.0, 0.0) for e in (0, 0, 0, 0, 1, 1, 1, 2)], abs=1e-6
    )
    flat = schedule(10, 10, learning_rate=0.5, warmup_epochs=1.0, schedule="constant")
    assert [float(flat(s)) for s in (5, 10, 99)] == [0.25, 0.5, 0.5]


def parameters(model, **options):
    """Those of a model, as shapes."""
    create = lambda: rope_jax.create_model(model, **options)
    return nnx.state(nnx.eval_shape(create), nnx.Param)


@pytest.mark.parametrize("model", ["deit_ti16", "deit3_ti16", "vit_digits"])
@pytest.mark.parametrize("position", ["ape", "rpb", "rope_mixed", "lape(ape)", "rope_mixed+ape"])
def test_only_matrices_are_decayed_and_schemes_are_exempt(model, position):
    params = parameters(model, position=position, depth=1)
    mask = dict(named_leaves(optim.decay_mask(params)))
    decayed = {name for name, decay in mask.items() if decay}
    assert decayed == {name for name in mask if name.endswith(".kernel")}
    assert any(name.startswith("position.") for name in mask)


def test_biases_of_layers_are_decayed_where_norms_are_exempt():
    """detectron2 exempts norms; embeddings and bias tables are declared."""
    head = "mask2former(width=8,heads=2,groups=2,depth=1,pixel_depth=1,queries=3)"
    params = parameters(
        "swin_t", head=head, num_classes=2, image_size=64, depths=(1,) * 4, width=8, heads=(1,) * 4
    )
    mask = dict(named_leaves(optim.decay_mask(params, "norms")))
    decayed = {
        "backbone.stages.0.blocks.0.attn.qkv.bias": True,
        "backbone.stages.0.blocks.0.norm1.bias": False,
        "backbone.stages.0.position.offsets": False,
        "neck.norms.0.scale": False,
        "neck.norms.0.bias": False,
        "head.pixel_decoder.norms.0.bias": False,
        "head.pixel_decoder.layers.0.attn.offset.bias": True,
        "head.pixel_decoder.levels": True,
        "head.decoder.levels": False,
        "head.decoder.queries": False,
        "head.decoder.positions": False,
        "head.decoder.classify.kernel": True,
        "head.decoder.classify.bias": True,
    }
    assert {name: mask[name] for name in decayed} == decayed


@pytest.mark.parametrize(
    ("exempt", "bare"), [("declared", False), ("vectors", True), ("nothing", True)]
)
def test_exemptions_that_models_declare_can_be_ignored(exempt, bare):
    """LaPE's norms are vectors in each layer, though their parameters have an axis of layers."""
    params = parameters("deit_ti16", position="lape(ape)+rope_mixed", depth=2, scan_layers=True)
    mask = dict(named_leaves(optim.decay_mask(params, exempt)))
    assert mask["blocks.attn.qkv.kernel"]
    tables = ("class_token", "position.parts.0.inner.embedding", "position.parts.1.mixed")
    assert [mask[name] for name in tables] == [bare] * 3
    vectors = ("blocks.norm1.scale", "blocks.attn.qkv.bias", "position.parts.0.scale", "norm.bias")
    assert [mask[name] for name in vectors] == [exempt == "nothing"] * 4


def test_lamb_scales_each_layer_of_a_bias_table_that_is_decayed():
    layered = optim.stacked(parameters("deit_ti16", position="rpb(decay=True)", depth=2))
    assert layered["position"]["offsets"]
    assert not layered["class_token"]


def variables(**values):
    """Parameters with their metadata: name=(value, metadata)."""
    return nnx.State(
        {
            name: nnx.Param(jnp.asarray(value, jnp.float32), **says)
            for name, (value, says) in values.items()
        }
    )


def small():
    draw = np.random.default_rng(0).normal
    return variables(
        kernel=(draw(size=(3, 4)), {}),
        stack=(draw(size=(2, 3, 3)), {"layers": True}),
        bias=(draw(size=4), {}),
    )


def train_steps(options, params, gradients, rate=0.1):
    """The parameters after steps with these gradients."""
    optimizer = optim.make_optimizer(OptimConfig(**options), lambda step: rate, params)
    values = nnx.to_pure_dict(params)
    state = optimizer.init(values)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, values)
        values = jax.tree.map(jnp.add, values, updates)
    return values, state


@pytest.mark.parametrize("whole", [lambda shape: True, lambda shape: len(shape) < 2])
def test_clipping_scales_all_gradients_by_one_factor(whole):
    """Joined or not, and more of them than are joined at a time."""
    draw = np.random.default_rng(0).normal
    shapes = [(3, 4), (5,), *[()] * 100, (2, 3, 2)]
    gradients = {f"{i:03}": np.asarray(draw(size=x), np.float32) for i, x in enumerate(shapes)}
    norm = math.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients.values()))
    assert float(jax.jit(optim.global_norm)(gradients)) == pytest.approx(norm, rel=1e-6)

    clip = optim.clip_by_global_norm(norm / 2, whole)
    clipped = jax.jit(lambda gradients: clip.update(gradients, clip.init(gradients))[0])
    for name, found in clipped(gradients).items():
        np.testing.assert_allclose(found, gradients[name] / 2, rtol=1e-6)
    small = {name: gradient / 4 for name, gradient in gradients.items()}
    jax.tree.map(np.testing.assert_array_equal, clipped(small), small)
    # As in checkpoints of runs that were clipped by optax.
    assert clip.init(gradients) == optax.clip_by_global_norm(1.0).init(gradients)


def test_lamb_is_its_definition():
    """In float64 NumPy: clip, Adam with corrected moments, decay, ratio of norms if decayed."""
    params, draw = small(), np.random.default_rng(1).normal
    values = {
        name: np.asarray(value, np.float64) for name, value in nnx.to_pure_dict(params).items()
    }
    gradients = [{name: draw(size=value.shape) for name, value in values.items()} for _ in range(3)]
    mean, square = (
        {name: np.zeros_like(value) for name, value in values.items()} for _ in range(2)
    )
    for count, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert norm > 1
        for name in values:
            g = gradient[name] / norm
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.999 * square[name] + 0.001 * g**2
            update = (
                mean[name] / (1 - 0.9**count) / (np.sqrt(square[name] / (1 - 0.999**count)) + 1e-6)
            )
            if name != "bias":
                update += 0.03 * values[name]
                axes = (
                    (1, 2) if name == "stack" else None
                )  # each layer of a stack is a tensor of its own
                length = lambda x, axes=axes: np.sqrt((x**2).sum(axes, keepdims=True))
                update *= length(values[name]) / length(update)
            values[name] = values[name] - 0.1 * update
    options = {"name": "lamb", "weight_decay": 0.03, "eps": 1e-6, "clip_norm": 1.0}
    after, _ = train_steps(options, params, [jax.tree.map(jnp.float32, g) for g in gradients])
    for name in values:
        np.testing.assert_allclose(after[name], values[name], rtol=2e-5, atol=2e-6)


def test_lamb_moves_a_tensor_of_zeros():
    params = variables(kernel=(np.zeros((2, 2)), {}))
    after, _ = train_steps({"name": "lamb"}, params, [{"kernel": jnp.ones((2, 2))}])
    np.testing.assert_allclose(after["kernel"], -0.1, rtol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_definition(nesterov):
    params, draw = small(), np.random.default_rng(1).normal
    value = np.asarray(params["kernel"][...], np.float64)
    gradients = [
        {name: draw(size=leaf.shape) for name, leaf in nnx.to_pure_dict(params).items()}
        for _ in range(3)
    ]
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
    after, _ = train_steps(options, params, [jax.tree.map(jnp.float32, g) for g in gradients])
    np.testing.assert_allclose(after["kernel"], value, rtol=1e-5, atol=1e-6)


def rates(model, position, last_norm="head", **options):
    params = parameters(model, position=position, **options)
    return dict(named_leaves(optim.layer_rates(params, 0.5, last_norm)))


def test_layer_decay_follows_the_depth():
    found = rates("deit_ti16", "rope_mixed+ape", depth=3)
    assert found["head.kernel"] == found["norm.scale"] == 1.0
    assert [found[f"blocks.{i}.attn.qkv.kernel"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert (
        found["patch_embed.proj.kernel"]
        == found["class_token"]
        == found["position.parts.1.embedding"]
        == 0.0625
    )
    np.testing.assert_array_equal(np.ravel(found["position.parts.0.mixed"]), [0.125, 0.25, 0.5])
    scanned = rates("deit_ti16", "rope_mixed+ape", depth=3, scan_layers=True)
    np.testing.assert_array_equal(np.ravel(scanned["blocks.attn.qkv.kernel"]), [0.125, 0.25, 0.5])
    assert scanned["blocks.attn.qkv.kernel"].shape == (3, 1, 1)


def test_the_last_norm_has_the_rate_of_the_head_or_of_the_last_block():
    """Of all parameters, nothing else changes; timm counts the norm with the last block."""
    for model, options in (("deit_ti16", {"depth": 3}), ("swin_t", {"depths": (1, 1, 1, 1)})):
        with_head = rates(model, "none", **options)
        with_block = rates(model, "none", last_norm="block", **options)
        differ = {name for name in with_head if with_head[name] != with_block[name]}
        assert differ == {"norm.scale", "norm.bias"}
        assert {with_head[name] for name in differ} == {1.0}
        assert {with_block[name] for name in differ} == {0.5}


@pytest.mark.parametrize("scan", [False, True])
def test_layer_decay_counts_through_stages(scan):
    found = rates("swin_t", "rpb", depths=(1, 1, 2, 1), scan_layers=scan)
    for stage, wanted in enumerate(([2.0**-5], [2.0**-4], [0.125, 0.25], [0.5])):
        kernels = [
            x for n, x in found.items() if re.match(rf"stages.{stage}.blocks.*qkv.kernel", n)
        ]
        assert np.concatenate([np.ravel(x) for x in kernels]).tolist() == wanted
    assert found["stages.2.downsample.reduction.kernel"] == 0.25
    assert np.ravel(found["stages.2.position.offsets"]).tolist() == [0.125, 0.25]
    assert found["patch_embed.proj.kernel"] == 2.0**-6
    assert found["head.kernel"] == 1.0


def test_the_table_of_a_layer_has_the_rate_of_the_layer():
    """Where tables of layers differ in shape, each is a parameter of its own."""
    options = {"attention": "window", "window_size": 4, "global_blocks": (1,), "depth": 3}
    found = rates("vit_s16", "decomposed", width=24, heads=3, **options)
    tables = [found[f"position.{axis}.{i}"] for axis in ("rows", "columns") for i in range(3)]
    assert tables == [0.125, 0.25, 0.5] * 2


@pytest.mark.parametrize("position", ["peg", "gpe", "ape"])
def test_layer_decay_tells_kernels_from_layers(position):
    """A kernel of three rows, or a table of three positions, in a model of three layers."""
    found = rates("vit_digits", position, depth=3, width=16, heads=1, image_size=(2, 6))
    assert {value for name, value in found.items() if name.startswith("position.")} == {0.0625}


def test_a_norm_shared_by_all_layers_is_below_the_first():
    """Its scale has an axis of channels alone, as many as there are layers here."""
    position = "lape(ape,join=shared_norm)"
    found = rates("vit_digits", position, depth=4, width=4, heads=1)
    assert {value for name, value in found.items() if name.startswith("position.")} == {0.03125}
    found = rates("vit_digits", "lape(ape)", depth=3, width=4, heads=1)
    np.testing.assert_array_equal(np.ravel(found["position.scale"]), [0.125, 0.25, 0.5])


class Pyramid(nnx.Module):
    """A backbone of your own: its modules have other names than those here."""

    def __init__(self, depths, *, scan):
        self.rngs = rngs = nnx.Rngs(0)
        self.tokenizer = declare(self.layer(), depth=0)
        self.levels, last = nnx.List([]), 0
        for depth in depths:
            level, first, last = nnx.Module(), last + 1, last + depth
            level.layers = make_blocks(self.layer, depth, scan=scan, first=first)
            level.merge = declare(self.layer(), depth=last)
            self.levels.append(level)
        self.final = declare(nnx.LayerNorm(8, rngs=rngs), depth=last, last_norm=True)
        self.classify = self.layer()

    def layer(self):
        return nnx.Linear(8, 8, rngs=self.rngs)


@pytest.mark.parametrize("scan", [False, True])
def test_layer_decay_follows_what_a_backbone_of_your_own_declares(scan):
    params = nnx.state(Pyramid((1, 2), scan=scan), nnx.Param)
    found = dict(named_leaves(optim.layer_rates(params, 0.5)))
    layers = [x for name, x in found.items() if re.match(r"levels.1.layers.*kernel", name)]
    assert np.concatenate([np.ravel(x) for x in layers]).tolist() == [0.25, 0.5]
    assert np.ravel(found["levels.0.merge.kernel"]).tolist() == [0.125]
    assert (found["tokenizer.kernel"], found["levels.1.merge.kernel"]) == (0.0625, 0.5)
    assert found["classify.kernel"] == found["final.scale"] == 1.0
    assert dict(named_leaves(optim.layer_rates(params, 0.5, "block")))["final.scale"] == 0.5


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
def test_what_is_beside_the_blocks_has_the_rate_of_the_head(model, options, names):
    found = rates(model, "none", **{"depth": 2, "width": 24, "heads": 3} | options)
    with_head = {name.split(".")[0] for name, rate in found.items() if np.all(rate == 1)}
    assert with_head - {"norm", "head"} == names


def test_layer_decay_needs_declared_depths():
    params = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    with pytest.raises(ConfigError, match=r"layer_decay=0\.5 .*make_blocks"):
        optim.layer_rates(params, 0.5)


def test_layer_decay_scales_steps_and_weight_decay():
    block = lambda **declared: {"fc1": {"kernel": nnx.Param(jnp.ones((2, 2)), **declared)}}
    blocks = {0: block(depth=1), 1: block(depth=2)}
    params = nnx.State({"patch_embed": block(depth=0), "blocks": blocks, "head": block()})
    values = nnx.to_pure_dict(params)
    options = {"weight_decay": 0.5, "clip_norm": None}
    moved = lambda decay: train_steps(
        options | {"layer_decay": decay}, params, [jax.tree.map(jnp.ones_like, values)]
    )[0]
    plain, decayed = (
        dict(named_leaves(jax.tree.map(lambda x: 1 - x, moved(decay)))) for decay in (1.0, 0.5)
    )
    for name, factor in (("head", 1), ("blocks.1", 2), ("blocks.0", 4), ("patch_embed", 8)):
        np.testing.assert_allclose(plain[f"{name}.fc1.kernel"], 0.1 * (1 + 0.5), rtol=1e-5)
        np.testing.assert_allclose(
            decayed[f"{name}.fc1.kernel"] * factor, plain[f"{name}.fc1.kernel"], rtol=1e-5
        )


@pytest.mark.parametrize(
    ("power", "end", "warmup"), [(0.9, 1e-5, 0), (1.0, 0.0, 1500)], ids=["Segmenter", "BEiT"]
)
def test_poly_is_a_power_of_the_rest_of_the_run_whose_warmup_is_a_factor(power, end, warmup):
    """160k steps; the factor of the warmup starts at 1e-6."""
    rate = schedule(
        160, 1000, learning_rate=5e-5, min_learning_rate=end, warmup_steps=warmup, power=power,
        warmup_learning_rate=5e-5 * 1e-6, schedule="poly",
    )  # fmt: skip
    for step in (0, 700, 1499, 1500, 80_000, 160_000):
        factor = 1 - (1 - step / warmup) * (1 - 1e-6) if step < warmup else 1
        wanted = factor * (end + (5e-5 - end) * (1 - step / 160_000) ** power)
        assert float(rate(step)) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("in_steps", [False, True])
def test_the_rate_of_detection_falls_by_ten_at_its_milestones(in_steps):
    steps_per_epoch = 7.3
    milestones = (197.0, 241.0) if in_steps else (27.0, 33.0)
    options = OptimConfig(
        learning_rate=1e-4, schedule="step", milestones=milestones, warmup_epochs=0.0
    )
    options = optim.in_epochs(options, steps_per_epoch if in_steps else None)
    rate = optim.learning_rate_schedule(options, epochs=36.0, steps_per_epoch=steps_per_epoch)
    found = [float(rate(step)) for step in (0, 196, 197, 240, 241, 262)]
    np.testing.assert_allclose(found, [1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6], rtol=1e-5)
    with pytest.raises(ValueError, match="needs milestones"):
        schedule(36, 10, schedule="step")


def test_the_backbone_of_a_dense_model_has_a_rate_of_its_own():
    params = parameters(
        "deit_ti16", head="segmenter(head_dim=8)", num_classes=3, width=16, heads=2, depth=2
    )
    factors = dict(named_leaves(optim.backbone_rates(params, 0.1)))
    wanted = {"backbone": 0.1, "head": 1.0}
    assert {name.split(".")[0]: factor for name, factor in factors.items()} == wanted
    rates = dict(named_leaves(optim.layer_rates(params, 0.5)))
    assert rates["head.blocks.0.mlp.fc1.kernel"] == 1.0
    assert rates["backbone.blocks.1.mlp.fc1.kernel"] == 0.5
    assert rates["backbone.blocks.0.mlp.fc1.kernel"] == 0.25
    assert rates["backbone.patch_embed.proj.kernel"] == 0.125
    assert rates["backbone.norm.scale"] == 1.0
