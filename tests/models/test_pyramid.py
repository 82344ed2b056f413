"""ViTDet: its size, and what its golden (tests/parity/dense/vitdet.py) does not show."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.pyramid import FeaturePyramid, PyramidBackbone
from rope_jax.weights import load_pretrained
from tests.models.small import SMALL, fill, pictures

WINDOWS = {"class_token": False, "attention": "window", "last_norm": False}


def test_maps_halve_at_every_level_even_if_odd():
    last = jax.ShapeDtypeStruct((1, 5, 9, 16), jnp.float32)
    maps = jax.eval_shape(lambda x: FeaturePyramid(16, outputs=8, rngs=nnx.Rngs(0))([x]), last)
    assert [x.shape[1:3] for x in maps] == [(20, 36), (10, 18), (5, 9), (2, 4), (1, 2)]


def test_a_saved_backbone_fills_a_pyramids(tmp_path, capsys):
    make = lambda: rope_jax.create_model("deit_ti16", num_classes=0, **SMALL | WINDOWS)
    vit = fill(nnx.eval_shape(make))
    rope_jax.save_pretrained(vit, tmp_path)
    pyramid = lambda: FeaturePyramid(48, outputs=8, rngs=nnx.Rngs(0))
    model = PyramidBackbone(nnx.eval_shape(make), nnx.eval_shape(pyramid))
    load_pretrained(model, tmp_path)
    kernel = vit.blocks[0].mlp.fc1.kernel[...]
    np.testing.assert_array_equal(model.backbone.blocks[0].mlp.fc1.kernel[...], kernel)
    assert capsys.readouterr().out == "weights of a classifier: new neck\n"


def test_a_saved_pyramid_fills_another(tmp_path, capsys):
    def make(**options):
        vit = rope_jax.create_model("deit_ti16", num_classes=0, **SMALL | WINDOWS | options)
        return PyramidBackbone(vit, FeaturePyramid(48, outputs=8, rngs=nnx.Rngs(0)))

    model, other = fill(nnx.eval_shape(make)), nnx.eval_shape(make)
    rope_jax.save_pretrained(model, tmp_path)
    load_pretrained(other, tmp_path)
    loaded, saved = (nnx.to_pure_dict(nnx.state(x)) for x in (other, model))
    jax.tree.map(np.testing.assert_array_equal, loaded, saved)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="does not describe its model"):
        rope_jax.create_model(tmp_path)
    with pytest.raises(ValueError, match="attention is window there and global here"):
        load_pretrained(nnx.eval_shape(lambda: make(attention="global")), tmp_path)


def test_the_pyramid_trains_in_bfloat16_with_drop_path():
    def make():
        options = {"drop_path": 0.4, "window_size": 2, "global_blocks": (1,), "num_classes": 0}
        vit = rope_jax.create_model(
            "deit_ti16", position="rope2d", dtype=jnp.bfloat16, **SMALL | WINDOWS | options
        )
        settings = {"outputs": 8, "scales": (4.0, 0.5), "dtype": jnp.bfloat16}
        pyramid = FeaturePyramid(48, rngs=nnx.Rngs(0), **settings)
        return PyramidBackbone(vit, pyramid)

    graph, params = nnx.split(fill(nnx.eval_shape(make)))

    @jax.jit
    @jax.value_and_grad
    def loss(params, key):
        maps = nnx.merge(graph, params).features(pictures(6, 10), train=True, key=key)
        assert all(x.dtype == jnp.bfloat16 for x in maps)
        return sum((x.astype(jnp.float32) ** 3).mean() for x in maps)

    value, gradients = loss(params, jax.random.key(0))
    assert value != loss(params, jax.random.key(1))[0]
    for path, gradient in nnx.to_flat_state(gradients):
        assert gradient[...].dtype == jnp.float32
        assert 0 < np.abs(gradient[...]).max() < np.inf, path


@pytest.mark.parametrize("scales", [(), (1.0, 2.0), (3.0,), (8.0, 1.0), (0.25,)])
def test_impossible_scales_are_refused(scales):
    advice = f"scales={scales} must be powers of 2 in descending order, from 0.5 to one"
    with pytest.raises(ValueError, match=re.escape(advice)):
        FeaturePyramid(12, scales=scales, rngs=nnx.Rngs(0))
