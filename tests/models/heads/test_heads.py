import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.dense import third_blocks
from rope_jax.models.heads import (
    HEADS,
    PixelLogits,
    SegmentationHead,
    create_head,
    list_heads,
    register_head,
)
from rope_jax.models.heads.linear import LinearOptions
from rope_jax.models.layers import Linear, layer_dtypes
from rope_jax.weights import export_state_dict
from tests.parity.official import assert_equal

SMALL = {"width": 16, "heads": 2, "depth": 4, "image_size": 32, "patch_size": 8}
FLOAT = layer_dtypes(jnp.dtype(jnp.float32))


def test_third_blocks():
    wanted = {12: (3, 5, 7, 11), 24: (7, 11, 15, 23), 4: (0, 1, 2, 3)}
    assert {depth: third_blocks(depth) for depth in wanted} == wanted


def test_cells_of_a_token_are_adjacent():
    """Cell (a, b) of a token at (y, x) becomes the prediction at (2 y + a, 2 x + b)."""
    head = create_head(
        "linear", channels=[5], num_classes=3, rngs=nnx.Rngs(0), overrides={"cells": 2}
    )
    maps = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    logits = head([maps]).logits
    assert logits.shape == (2, 6, 8, 3)
    cells = np.asarray(head.classify(maps)).reshape(2, 3, 4, 2, 2, 3)
    for a, b in np.ndindex(2, 2):
        np.testing.assert_array_equal(logits[:, a::2, b::2], cells[..., a, b, :])


def test_training_draws_dropout_and_moves_batch_statistics():
    model = rope_jax.create_model("deit_ti16", head="upernet(width=8)", num_classes=3, **SMALL)
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    with pytest.raises(ValueError, match=r"needs a key for .*dropout"):
        model.predict(images, train=True)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, key):
        model = nnx.merge(graph, state)
        predictions = model.predict(images, train=True, key=key)
        return predictions, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    first, stats = run(state, jax.random.key(1))
    second, _ = run(state, jax.random.key(2))
    assert first.auxiliary.shape == (2, 4, 4, 3)
    assert first.auxiliary_weight == 0.4
    assert np.abs(first.logits - second.logits).max() > 1e-6
    before = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, stats)
    assert all(jax.tree.leaves(moved))


def test_registering_a_custom_head():
    class Mean(SegmentationHead):
        """Every pixel gets the logits of the mean token."""

        def __init__(self, options, *, channels, num_classes, rngs, dtypes):
            self.options, self.out_features = options, num_classes
            self.linear = Linear(channels[0], num_classes, rngs=rngs, **dtypes)

        def __call__(self, maps, *, train=False, key=None):
            return PixelLogits(self.linear(maps[-1].mean((1, 2), keepdims=True)))

    register_head("mean", Mean, LinearOptions())
    try:
        assert "mean" in list_heads()
        with pytest.raises(ValueError, match="a head named 'mean' exists already"):
            register_head("mean", Mean, LinearOptions())
        make = functools.partial(
            rope_jax.create_model, "deit_ti16", head="mean", num_classes=3, **SMALL
        )
        images = jax.ShapeDtypeStruct((1, 16, 8, 3), jnp.float32)
        logits = jax.eval_shape(lambda images: make()(images), images)
        assert logits.shape == (1, 16, 8, 3)
    finally:
        del HEADS["mean"]


def test_a_head_takes_a_fixed_number_of_maps():
    with pytest.raises(ValueError, match="'upernet' takes 4 maps, but 1 are given"):
        create_head("upernet", channels=[8], num_classes=3, rngs=nnx.Rngs(0))


def test_mmsegmentation_and_the_authors_name_the_same_segmenter():
    """Both name the same arrays: the names of one are translated to those of the other."""
    settings = {"head": "segmenter(head_dim=8)", "num_classes": 3, **SMALL}
    model = rope_jax.create_model("deit_ti16", seed=1, **settings)
    other = rope_jax.create_model("deit_ti16", **settings)
    exported = export_state_dict(model, source="mmseg")
    assert "backbone.layers.0.attn.attn.in_proj_weight" in exported
    assert exported["decode_head.patch_proj.weight"].shape == (16, 16)
    rope_jax.convert_state_dict(other, exported, source="mmseg")
    original = export_state_dict(model, source="segmenter")
    np.testing.assert_array_equal(
        original["decoder.proj_patch"], exported["decode_head.patch_proj.weight"].T
    )
    assert_equal(export_state_dict(other, source="segmenter"), original)
