"""Blocks in a list and blocks in a scan make the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.blocks import REMAT
from rope_jax.training.optim import decay_mask
from tests.models.small import abstract, compile_gradient, pictures, run
from tests.slow import some_slow

VIT = {"width": 24, "heads": 3, "depth": 2, "patch_size": 2, "mlp_ratio": 2.0, "drop_path": 0.4}
WINDOWS = {"class_token": False, "attention": "window", "window_size": 4, "global_blocks": (1,)}
# Two layers a round, and one left over: shifted windows, dilations, and a stage of one layer.
STAGES = {"width": 24, "heads": (3, 3), "depths": (3, 1), "drop_path": 0.4}
CASES = {
    "deit3_s16": (VIT, "rope_mixed+ape"),
    "deit_ti16": (VIT, "lape(ape)"),
    "deit_s16": (VIT | WINDOWS, "rpb"),
    "cct_7_3x1": (VIT | {"depth": 3}, "ape+rpb"),
    "t2t_vit_7": ({"width": 24, "heads": 3, "token_width": 8, "random_features": 4}, "rpb"),
    "swin_t": (STAGES | {"window_size": 4}, "rope_mixed+rpb"),
    "swinv2_t": (STAGES | {"window_size": 4}, "cpb(hidden=8)"),
    "dinat_small": (STAGES | {"kernel_size": 3, "dilations": (2, 1)}, "rpb+rope2d"),
}


def make(name, **more):
    options, position = CASES[name]
    return rope_jax.create_model(
        name, position=position, num_classes=5, image_size=(24, 32), **options, **more
    )


def stack_tree(tree):
    """Stacks parameters of blocks in lists as a scan has them."""
    if not isinstance(tree, dict):
        return tree
    tree = {key: stack_tree(value) for key, value in tree.items()}
    if "blocks" in tree:
        tree["blocks"] = jax.tree.map(lambda *leaves: np.stack(leaves), *tree["blocks"].values())
    return tree


def train(model, images):
    logits = model(images, train=True, key=jax.random.key(3))
    return -jax.nn.log_softmax(logits)[:, 0].mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_scan_gives_the_same_parameters_logits_and_gradients(name):
    listed, scanned = make(name), make(name, scan_layers=True)
    want, got = (nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (listed, scanned))
    jax.tree.map(np.testing.assert_array_equal, got, stack_tree(want))
    images = pictures(20, 28)
    np.testing.assert_allclose(run(scanned, images)[0], run(listed, images)[0], rtol=0, atol=2e-6)
    (want, want_gradients), (got, got_gradients) = (
        compile_gradient(model, train)(images) for model in (listed, scanned)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5),
        nnx.to_pure_dict(got_gradients),
        stack_tree(nnx.to_pure_dict(want_gradients)),
    )


RECOMPUTED = [(name, remat, scan) for name in CASES for remat in REMAT for scan in (False, True)]
FAST = [("deit3_s16", "blocks", True), ("swin_t", "dots", False)]


@pytest.mark.parametrize(("name", "remat", "scan"), some_slow(RECOMPUTED, FAST))
def test_recomputed_blocks_give_the_same_gradients(name, remat, scan):
    kept, recomputed = make(name, scan_layers=scan), make(name, scan_layers=scan, remat=remat)
    images = pictures(20, 28)
    graph, params, others = nnx.split(recomputed, nnx.Param, ...)
    loss = lambda params: nnx.merge(graph, params, others)(images).sum()
    assert " remat" in str(jax.make_jaxpr(jax.grad(loss))(params))
    want, got = (compile_gradient(model, train)(images) for model in (kept, recomputed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


def lower(depth, batch=1, **options):
    """The gradient of a model of this depth, before compilation."""
    model = abstract("deit3_ti16", **VIT | {"depth": depth}, **options)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    loss = lambda params, images: nnx.merge(graph, params, others)(images).sum()
    images = jax.ShapeDtypeStruct((batch, 56, 56, 3), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(params, images)


def test_recomputed_blocks_keep_less():
    """What a further block keeps: its input of 8 x 785 x 24 numbers and little more."""
    memory = lambda depth, remat: (
        lower(depth, 8, remat=remat).compile().memory_analysis().temp_size_in_bytes
    )
    each = {x: memory(3, x) - memory(2, x) for x in (*REMAT, None)}
    tokens = 4 * 8 * 785 * 24
    assert tokens <= each["blocks"] < 1.3 * tokens
    assert each["blocks"] < each["dots"] < each[None]


@pytest.mark.parametrize("name", CASES)
def test_stacked_parameters_are_decayed_as_in_a_list(name):
    models = (nnx.eval_shape(lambda x=x: make(name, scan_layers=x)) for x in (False, True))
    listed, scanned = (decay_mask(nnx.state(model, nnx.Param)) for model in models)
    jax.tree.map(np.testing.assert_array_equal, stack_tree(listed), scanned)


def test_the_program_of_a_scan_does_not_grow_with_depth():
    lines = lambda scan, depth: lower(depth, scan_layers=scan).as_text().count("\n")
    assert lines(True, 3) == lines(True, 6)
    assert lines(False, 6) > 1.5 * lines(False, 3)
