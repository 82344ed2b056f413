"""Models on meshes with Explicit axes, where the types of arrays have their shardings."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import rope_jax
from rope_jax.system import sharding
from rope_jax.system.sharding import replicate, split_batch, state_shardings, with_shardings
from tests.devices import run_on_devices
from tests.models import test_vit_adapter
from tests.models.heads import test_dino, test_mask2former, test_mask_rcnn
from tests.models.test_every_family import FAMILIES, SIZE
from tests.slow import some_slow

PATCHES = FAMILIES["deit3_s16"][0]
LOCAL = PATCHES | {"class_token": False, "embed_class_token": False}
# Name -> model, options, and size of images.
CASES = {name: (name, options, SIZE) for name, (options, _) in FAMILIES.items()} | {
    "shallow": ("ceit_t", PATCHES | {"depth": 1}, SIZE),
    "scan": ("deit3_s16", PATCHES | {"scan_layers": True, "position": "rope_mixed+rpb"}, SIZE),
    "windows": ("deit_s16", LOCAL | {"attention": "window", "window_size": 3}, SIZE),
    "adapter": ("vit_adapter_ti16", test_vit_adapter.SMALL, (32, 48)),
    "linear": ("deit_ti16", test_dino.VIT | {"head": "linear"}, (32, 48)),
    "segmenter": ("deit_ti16", test_dino.VIT | {"head": "segmenter(depth=1,head_dim=8)"}, (32, 48)),
    "upernet": ("swin_t", test_dino.SWIN | {"head": "upernet(width=16)"}, (64, 64)),
    "dino": ("deit_ti16", test_dino.VIT | {"head": test_dino.HEAD}, (32, 48)),
    "mask_rcnn": ("swin_t", test_dino.SWIN | {"head": test_mask_rcnn.HEAD}, (64, 64)),
    "mask2former": ("deit_ti16", test_mask2former.VIT | {"head": test_mask2former.SMALL}, (32, 48)),
}
QUICK = ["shallow", "linear"]


def create(name):
    model, options, _ = CASES[name]
    return rope_jax.create_model(model, **{"num_classes": 5, "image_size": 32} | options)


def gradient(graph, params, stats, rest, images, key):
    """The gradient of a model's results and maps, and these, and batch statistics."""

    def loss(params):
        model = nnx.merge(graph, params, stats, rest)
        outputs = model(images, train=model.head_notation is None, key=key)
        results = jax.tree.leaves((outputs, model.features(images)))
        total = sum((x.astype(np.float32) ** 2).mean() for x in results)
        return total, (results, nnx.state(model, nnx.BatchStat))

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("name", some_slow(CASES, QUICK))
def test_results_are_sharded_like_images_and_gradients_like_parameters(name, monkeypatch):
    monkeypatch.setattr(sharding, "SMALLEST", 64)
    mesh = AbstractMesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    model = nnx.eval_shape(lambda: create(name))
    graph, params, *others = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    params = with_shardings(params, state_shardings(params, mesh))
    others = [with_shardings(x, replicate(mesh)) for x in others]
    images = jax.ShapeDtypeStruct((4, *CASES[name][2], 3), np.float32, sharding=split_batch(mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    run = lambda *state: gradient(graph, *state)
    with jax.sharding.use_abstract_mesh(mesh):
        gradients, (results, stats) = jax.eval_shape(run, params, *others, images, key)
    for grad, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(params), strict=True):
        unsharded = (None,) * (param.ndim - len(param.sharding.spec))
        assert (*grad.sharding.spec,) == (*param.sharding.spec, *unsharded)
    assert {x.sharding.spec[0] for x in results} == {("data", "fsdp")}
    assert all(not any(x.sharding.spec) for x in jax.tree.leaves(stats))


VALUES = """
import jax, numpy as np, rope_jax
from flax import nnx
from rope_jax.system import sharding
from rope_jax.system.sharding import put_batch, state_shardings
from tests.models.small import fill, pictures
from tests.models.test_meshes import CASES, create, gradient

sharding.SMALLEST = 64
jax.config.update("jax_disable_most_optimizations", True)
mesh, key = jax.make_mesh((2, 2), ("data", "fsdp")), jax.random.key(0)
model = fill(nnx.eval_shape(lambda: create("shallow")))
graph, params, *others = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
images = pictures(*CASES["shallow"][2], batch=4)
run = jax.jit(lambda *state: gradient(graph, *state))
one = run(params, *others, images, key)
params = jax.device_put(params, state_shardings(params, mesh))
many = run(params, *others, put_batch({"image": images}, mesh)["image"], key)
for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
    # Sums in another order.
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
# Called outside of jit, where rotations without other channels crashed XLA.
model = rope_jax.create_model("vit_digits", position="rope_mixed", depth=1, width=16, heads=1)
images = pictures(8, 8, batch=4)
sharded = put_batch({"image": images}, mesh)["image"]
np.testing.assert_allclose(model(sharded), model(images), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.process
def test_values_match_one_device():
    run_on_devices(4, VALUES)


def test_predict_under_explicit_meshes_names_the_remedy():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    images = jax.ShapeDtypeStruct((2, 32, 48, 3), np.float32, sharding=split_batch(mesh))
    graph, state = nnx.split(nnx.eval_shape(lambda: create("dino")))
    loss = lambda state, images: nnx.merge(graph, state).predict(images).boxes.sum()
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(ValueError, match=r"auto_axes\(loss, .* of rope_jax\.system\.sharding"):
            jax.eval_shape(loss, state, images)
        jax.eval_shape(jax.sharding.auto_axes(loss, out_sharding=P()), state, images)
