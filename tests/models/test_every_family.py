"""Properties of every family: maps of any blocks, training, precision, and randomness."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.pyramid import FeaturePyramid, PyramidBackbone
from rope_jax.training.optim import decay_mask
from tests.models import test_vit_adapter
from tests.models.heads import test_dino
from tests.models.small import (
    abstract,
    abstract_call,
    check_gradients,
    compile_gradient,
    compile_read,
    fill,
    make_filled_model,
    pictures,
    run,
)
from tests.slow import some_slow

SMALL = {"width": 24, "heads": 3, "depth": 3, "mlp_ratio": 2.0, "drop_path": 0.4}
PATCH = SMALL | {"patch_size": 4}
STAGES = {"width": 24, "heads": (3, 3), "depths": (3, 2), "drop_path": 0.4}
# Options, and the last block of each stage.
FAMILIES = {
    "deit3_s16": (PATCH, [2]),
    "dinov3_s16": (PATCH, [2]),
    "beit_b16": (PATCH, [2]),
    "cat_5": (PATCH | {"operator": "released"}, [2]),
    "cct_7_3x1": (SMALL, [2]),
    "ceit_t": (PATCH, [2]),
    "t2t_vit_7": (SMALL, [2]),
    "swin_t": (STAGES | {"window_size": 3}, [2, 4]),
    "swinv2_t": (STAGES | {"window_size": 3}, [2, 4]),
    "dinat_small": (STAGES | {"kernel_size": 3, "dilations": (2, 1)}, [2, 4]),
}
SIZE = (16, 24)


def small(name, **changes):
    return make_filled_model(name, **{"image_size": SIZE} | FAMILIES[name][0] | changes)


@pytest.mark.parametrize("name", some_slow(FAMILIES, ["beit_b16", "ceit_t", "swin_t"]))
def test_maps_of_all_blocks_match_the_stages(name):
    model, ends = small(name), FAMILIES[name][1]
    every = range(ends[-1] + 1)

    def read(model, images, _):
        last = model.features(images, blocks=ends[-1:])
        raw = model.features(images, blocks=every, norm=False)
        # All maps of one stage can be normalised.
        both = model.features(images, blocks=every[-2:], norm=True)
        return model.features(images), last, raw, both, [model.norm(x) for x in raw[-2:]]

    usual, last, raw, both, normed = compile_read(model, read)(pictures(*SIZE))
    assert [x.shape[1:3] for x in usual] == model.grids(SIZE)
    for x, end in zip(usual[:-1], ends, strict=False):  # all but the last map are not normalised
        np.testing.assert_array_equal(x, raw[end])
    want = normed[-1] if model.norms_tokens else raw[-1]
    np.testing.assert_allclose(both, normed, atol=1e-5)
    np.testing.assert_allclose([usual[-1], last[0]], [want, want], atol=1e-5)
    for current, following in itertools.pairwise(raw):
        assert current.shape != following.shape or np.abs(current - following).max() > 1e-2


# Schemes of all kinds that a family takes, and parameters that logits do not depend on: what a
# batch norm or a softmax takes away, and the patches behind CeiT's last LeFF.
POSITIONS = {
    "deit3_s16": "rope_mixed+ape",
    "cat_5": "gpe+lpe+rope_mixed",
    "cct_7_3x1": "ape+rpb",
    "ceit_t": "ape+rpb+rope_mixed+peg",
    "t2t_vit_7": "lape(ape)+rope_mixed+rpb",
    "swin_t": "lape(ape)+rope_mixed+rpb",
    "dinat_small": "ape+rope_mixed+rpb",
}
SILENT = re.compile(r"attention_pool\.bias|leff\.conv\d\.bias|blocks\.2\.leff")


TRAINED = [(name, POSITIONS.get(name)) for name in FAMILIES] + [("deit3_s16", "comrope")]


@pytest.mark.parametrize(("name", "position"), some_slow(TRAINED, [("deit3_s16", "comrope")]))
def test_training_in_bfloat16_reaches_every_parameter(name, position):
    def loss(model):
        logits = model(pictures(*SIZE, batch=4), train=True, key=jax.random.key(0))
        assert logits.dtype == jnp.bfloat16
        return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 1].mean()

    model = small(name, position=position, dtype=jnp.bfloat16)
    _, gradients = compile_gradient(model, loss)()
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    check_gradients(gradients, lambda path: SILENT.search(".".join(map(str, path))))


@pytest.mark.parametrize("name", some_slow(FAMILIES, ["deit3_s16", "cat_5"]))
def test_bfloat16_affects_activations_only(name):
    models = small(name), small(name, dtype=jnp.bfloat16)
    for leaves in zip(*(jax.tree.leaves(nnx.state(x)) for x in models), strict=True):
        np.testing.assert_array_equal(*leaves, strict=True)
    want, got = (run(model, pictures(*SIZE))[0] for model in models)
    # Some thirty roundings in a row to 2**-8, and no more than twice their square root.
    most = 2 * 30**0.5 * 2**-8 * np.abs(want).max()
    assert 0 < np.abs(got.astype(np.float32) - want).max() < most


DROPPING = [(name, None) for name in FAMILIES] + [("deit3_s16", "cape")]


@pytest.mark.parametrize(
    ("name", "position"),
    some_slow(DROPPING, [("deit3_s16", "cape")]),
)
def test_only_training_drops_and_only_with_a_key(name, position):
    model, images = small(name, position=position), pictures(*SIZE, batch=4)
    plain = run(model, images)[0]
    np.testing.assert_array_equal(run(model, images, key=jax.random.key(0))[0], plain)
    with pytest.raises(ValueError, match=r"needs a key for .*drop_path"):
        model(images, train=True)
    first, again, other = (run(model, images, True, jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != plain).any()
    steady = small(name, position=position, **dict.fromkeys(model.options.draws, 0.0))
    if name == "dinov3_s16" or position == "cape":  # which draws, too
        assert (run(steady, images, True, jax.random.key(0))[0] != plain).any()
        with pytest.raises(ValueError, match="needs a key for position"):
            steady(images, train=True)
    elif name != "ceit_t":  # whose batch norms train
        np.testing.assert_allclose(run(steady, images, True)[0], plain, rtol=0, atol=1e-6)


def pyramid():
    """A ViT with windows and ViTDet's maps."""
    options = PATCH | {"attention": "window", "window_size": 2, "global_blocks": (1,)}
    options |= {"class_token": False, "last_norm": False, "num_classes": 0, "image_size": SIZE}
    vit = rope_jax.create_model("deit_ti16", position="rope2d", dtype=jnp.bfloat16, **options)
    settings = {"outputs": 8, "scales": (4.0, 0.5), "dtype": jnp.bfloat16}
    return PyramidBackbone(vit, FeaturePyramid(24, rngs=nnx.Rngs(0), **settings))


def adapter():
    options = test_vit_adapter.SMALL | {"drop_path": 0.4, "depth": 2, "groups": (0, 1)}
    return rope_jax.create_model("vit_adapter_ti16", **options | {"added": "last"})


WITH_MAPS = {"pyramid": pyramid, "adapter": adapter}


@pytest.mark.parametrize("name", some_slow([*FAMILIES, *WITH_MAPS], [*WITH_MAPS]))
def test_maps_train_with_drop_path_and_gradients(name):
    model = fill(nnx.eval_shape(WITH_MAPS[name])) if name in WITH_MAPS else small(name)

    def loss(model, key):
        maps = model.features(pictures(32, 48), train=True, key=key)
        assert all(x.dtype == (jnp.bfloat16 if name == "pyramid" else jnp.float32) for x in maps)
        total = sum((x.astype(jnp.float32) ** 3).mean() for x in maps)
        return total, nnx.state(model, nnx.BatchStat)

    before, run = nnx.state(model, nnx.BatchStat), compile_gradient(model, loss, has_aux=True)
    ((first, after), gradients), ((second, _), _) = (run(jax.random.key(seed)) for seed in (0, 1))
    assert abs(first - second) > 1e-4 * abs(first)
    unused = ("head", "norm", "lca", "layer_embedding", "attention_pool")
    check_gradients(gradients, lambda path: path[0] in unused)
    moved = jax.tree.map(lambda x, y: np.any(np.asarray(x) != y), before, after)
    assert all(jax.tree.leaves(moved)) or name == "t2t_vit_7"  # whose random features stay


def test_stacked_blocks_give_the_same_maps():
    """Both start from the same weights (`test_blocks`)."""
    options = PATCH | {"image_size": SIZE, "layer_scale": 1.0}
    listed, scanned = (
        rope_jax.create_model("deit3_s16", scan_layers=scan, **options) for scan in (False, True)
    )
    settings = {"blocks": (0, 2), "norm": False, "train": True}
    read = lambda model, images, key: jnp.stack(model.features(images, key=key, **settings))
    key = jax.random.key(3)
    got, want = (compile_read(model, read)(pictures(*SIZE), key) for model in (scanned, listed))
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(("name", "block", "after"), [("swin_t", 1, 2), ("deit3_s16", 0, 1)])
def test_blocks_after_the_last_requested_one_do_not_run(name, block, after):
    model = small(name)
    blocks = model.blocks if name == "deit3_s16" else model.stages[0].blocks
    blocks[after].mlp = None  # such a block cannot even be traced
    shapes = jax.eval_shape(lambda images: model.features(images, blocks=(block,)), pictures(*SIZE))
    assert len(shapes) == 1
    with pytest.raises(TypeError):
        jax.eval_shape(lambda images: model.features(images, blocks=(after,)), pictures(*SIZE))


@pytest.mark.parametrize(
    ("name", "settings", "advice"),
    [
        ("deit3_s16", {"blocks": (1, 3)}, "blocks=(1, 3) must be 2 numbers of blocks"),
        ("deit3_s16", {"blocks": (1, 0)}, "in ascending order, from 0 to 2"),
        ("deit3_s16", {"blocks": ()}, "blocks=() must be"),
        ("swin_t", {"norm": True}, "has block 2 of an earlier one, of other channels"),
        ("swin_t", {"train": True}, "train=True needs a key for drop_path"),
    ],
)
def test_unsuitable_arguments_of_features_are_refused(name, settings, advice):
    model = small(name)
    with pytest.raises(ValueError, match=re.escape(advice)):
        nnx.eval_shape(lambda: model.features(pictures(*SIZE), **settings))


def test_a_model_without_a_last_norm():
    bare = small("deit3_s16", last_norm=False)
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(bare)) if path[0] == "norm"]
    with pytest.raises(ValueError, match="created with last_norm=False"):
        bare.features(pictures(*SIZE), norm=True)


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        ("cct_7_3x1", (32, 32), (16, 16)),
        ("cct_7_3x1", (33, 1), (17, 1)),
        ("cct_2_3x2", (32, 34), (8, 9)),
        ("cct_14_7x2", (224, 225), (14, 15)),
        ("cvt_7_4", (32, 36), (8, 9)),
        ("t2t_vit_7", (224, 224), (14, 14)),
        ("t2t_vit_7", (3, 6), (1, 1)),
        ("t2t_vit_7", (50, 37), (3, 3)),
        ("t2t_vit_7", (225, 227), (14, 15)),
    ],
)
def test_grids_predict_the_maps_of_the_stem(name, size, grid):
    model = abstract(name, depth=1, image_size=size)
    (maps,) = abstract_call(model, *size, "features")
    assert model.grids(size) == [grid]
    assert maps.shape[1:3] == grid


# Parameters at the start of training


# Parameters that are decayed, and that are not, where that does not follow from their name.
DECAYED = {
    "vit_lite_7_4": ([], ["class_token"]),
    "ceit_t": (["layer_embedding"], ["class_token", "patch_embed.bn.scale"]),
    "t2t_vit_7": (
        ["patch_embed.attention1.kqv.kernel"],
        ["class_token", "patch_embed.attention1.kqv.bias"],
    ),
    "dinov2_s14_reg": ([], ["class_token", "registers"]),
    "dinov3_s16": ([], ["class_token", "registers", "blocks.0.attn.qv_bias"]),
}


@pytest.mark.parametrize("name", DECAYED)
def test_decayed_weights_match_the_official_code(name):
    model = abstract(name, depth=1)
    leaves = jax.tree.leaves_with_path(decay_mask(nnx.state(model, nnx.Param)))
    mask = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    decayed, spared = DECAYED[name]
    assert all(mask[path] for path in decayed)
    assert not any(mask[path] for path in spared)


# Layers that start as torch's, and the number of their inputs; standard deviations; constants.
STARTS = {
    "vit_digits": (
        {"depth": 1, "position": "ape"},
        {"patch_embed.proj": 12},
        dict.fromkeys(
            ("position.embedding", "blocks.0.attn.qkv.kernel", "blocks.0.mlp.fc2.kernel"), 0.02
        )
        | {"head.kernel": 0.02},
        {"blocks.0.norm1.scale": 1, "blocks.0.norm1.bias": 0, "blocks.0.mlp.fc1.bias": 0},
    ),
    "deit3_ti16": ({"depth": 1}, {}, {}, {"blocks.0.scale1.gamma": 1e-4}),
    "deit_ti16": (
        test_dino.VIT | {"head": test_dino.HEAD},
        {},
        {"head.label_embed": 1, "head.transformer.level_embed": 1},
        {
            "head.transformer.classes.0.bias": -math.log(99),
            "head.transformer.boxes.2.layers.2.kernel": 0,
            "head.transformer.boxes.2.layers.2.bias": 0,
        },
    ),
    "nat_small": (
        {"width": 8, "depths": (1,), "heads": (1,), "dilations": (1,), "image_size": 16},
        {},
        {},
        {"stages.0.blocks.0.scale2.gamma": 1e-5},
    ),
    "cat_5": (
        {"depth": 1, "width": 240, "heads": 3, "patch_size": 2, "image_size": 8},
        {"blocks.0.attn.qkv": 240, "head": 240, "patch_embed.proj": 12},
        {},
        {},
    ),
    "cct_14_7x2": (
        {"depth": 1, "image_size": 32},
        {},
        {
            "patch_embed.convs.0.kernel": (2 / (49 * 3)) ** 0.5,
            "patch_embed.convs.1.kernel": (2 / (49 * 64)) ** 0.5,
            "attention_pool.kernel": 0.02,
        },
        {},
    ),
    "vit_lite_7_4": (
        {"depth": 1},
        {},
        {"patch_embed.proj.kernel": (2 / 48) ** 0.5, "position.embedding": 0.2},
        {"class_token": 0},
    ),
    "ceit_t": (
        {"depth": 1, "image_size": 32},
        {
            "patch_embed.conv": 147,
            "patch_embed.proj": 16 * 64,
            "blocks.0.leff.conv1": 192,
            "blocks.0.leff.conv2": 9,
            "blocks.0.leff.conv3": 768,
        },
        dict.fromkeys(
            ("blocks.0.attn.qkv.kernel", "lca.attn.proj.kernel", "lca.mlp.fc1.kernel"), 0.02
        )
        | {"head.kernel": 0.02},
        {"layer_embedding": 0}
        | {
            f"{bn}.{part}": start
            for bn in ("patch_embed.bn", *(f"blocks.0.leff.bn{n}" for n in (1, 2, 3)))
            for part, start in (("scale", 1), ("bias", 0), ("mean", 0), ("variance", 1))
        },
    ),
    "dinov2_s14_reg": (
        {"depth": 1, "width": 240, "heads": 3, "image_size": 28},
        {},
        {"class_token": 1e-6, "registers": 1e-6},
        {},
    ),
    "dinov3_s16": (
        {"depth": 1, "width": 240, "heads": 3},
        {},
        {"class_token": 0.02, "registers": 0.02},
        {},
    ),
    "swinv2_t": (
        {"width": 16, "depths": (2, 2), "heads": (2, 4), "image_size": 64, "window_size": 4},
        {},
        {"stages.1.position.kernel1": 0.02},
        {
            "stages.1.blocks.0.attn.logit_scale": math.log(10),
            "stages.1.blocks.0.attn.qv_bias": 0,
            "stages.1.blocks.0.norm1.scale": 0,
            "stages.1.blocks.0.norm2.scale": 0,
            "stages.0.downsample.norm.scale": 1,
            "stages.1.position.bias1": 0,
            "patch_embed.norm.scale": 1,
        },
    ),
    "nat_mini": (
        {"depths": (1, 1), "heads": (2, 4), "dilations": (1, 1), "image_size": 16},
        {
            "patch_embed.proj.0": 27,
            "patch_embed.proj.1": 9 * 32,
            "stages.0.downsample.reduction": 9 * 64,
        },
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_initial_weights_match_the_official_code(name):
    options, uniform, spreads, constants = STARTS[name]
    model = rope_jax.create_model(name, num_classes=100, **options)
    state = nnx.to_flat_state(nnx.state(model))
    params = {".".join(map(str, path)): np.asarray(x[...]) for path, x in state}
    for layer, inputs in uniform.items():  # within one over the root of the number of inputs
        for part, least in (("kernel", 0.99), ("bias", 0.9)):
            largest = np.abs(params.get(f"{layer}.{part}", inputs**-0.5)).max()
            assert least * inputs**-0.5 < largest <= inputs**-0.5, layer
    for path, spread in spreads.items():  # within four standard deviations
        drawn = params[path]
        assert drawn.std() == pytest.approx(spread, rel=4 / (2 * drawn.size) ** 0.5), path
    for path, constant in constants.items():
        np.testing.assert_array_equal(params[path], np.float32(constant), err_msg=path)
