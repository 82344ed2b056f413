"""ViTDet: its files, and what its golden (tests/parity/dense/vitdet.py) does not show."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.pyramid import FeaturePyramid, PyramidBackbone
from rope_jax.weights import load_pretrained
from tests.models.small import SMALL, fill

WINDOWS = {"class_token": False, "attention": "window", "last_norm": False}


def test_a_saved_pyramid_fills_another(tmp_path, capsys):
    def make(**options):
        vit = rope_jax.create_model("deit_ti16", num_classes=0, **SMALL | WINDOWS | options)
        return PyramidBackbone(vit, FeaturePyramid(48, outputs=8, rngs=nnx.Rngs(0)))

    model, other = fill(nnx.eval_shape(make)), nnx.eval_shape(make)
    rope_jax.save_pretrained(model, tmp_path)
    load_pretrained(other, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(other), nnx.state(model))
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="does not describe its model"):
        rope_jax.create_model(tmp_path)
    with pytest.raises(ValueError, match="attention is window there and global here"):
        load_pretrained(nnx.eval_shape(lambda: make(attention="global")), tmp_path)


def test_scales_without_an_official_name_are_refused_by_its_source(tmp_path):
    vit = rope_jax.create_model("deit_ti16", num_classes=0, **SMALL | WINDOWS)
    model = PyramidBackbone(vit, FeaturePyramid(48, outputs=8, scales=(8.0, 1.0), rngs=nnx.Rngs(0)))
    rope_jax.save_pretrained(model, tmp_path)
    load_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"neck\.levels\.0"):
        rope_jax.save_pretrained(model, tmp_path / "theirs", source="detectron2")


@pytest.mark.parametrize("scales", [(), (1.0, 2.0), (3.0,), (8.0, 1.0), (0.25,)])
def test_impossible_scales_are_refused(scales):
    advice = f"scales={scales} must be powers of 2 in descending order, from 0.5 to one"
    with pytest.raises(ValueError, match=re.escape(advice)):
        FeaturePyramid(12, scales=scales, rngs=nnx.Rngs(0))
