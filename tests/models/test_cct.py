"""ViT-Lite, CVT and CCT: definition, tokenizers, dropout, weights."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.models import attention
from rope_jax.weights.convert import name_table
from rope_jax_kernels import Global
from tests.models.definition import (
    attend,
    convolve,
    dense,
    extract_patches,
    mlp,
    norm,
    softmax,
    value,
)
from tests.models.small import abstract, make_filled_model, run
from tests.slow import some_slow

CONVS = {"conv_layers": 2, "conv_kernel": 7, "conv_stride": 2, "conv_width": 6, "patch_size": 16}


small = functools.partial(make_filled_model, image_size=(12, 20), width=32, heads=2, depth=2)


# The definition


def embed_image(model, image):
    options = model.options
    if not options.conv_layers:
        return convolve(image, model.patch_embed.proj, options.patch_size)
    for conv in model.patch_embed.convs:
        image = convolve(image, conv, options.conv_stride, options.conv_kernel // 2)
        image = extract_patches(np.maximum(image, 0), 3, 2, 1, -np.inf).max(axis=(2, 3))
    return image


def compute_logits(model, image, table):
    x = embed_image(model, image)
    x = x.reshape(-1, x.shape[-1])
    if model.options.class_token:
        x = np.concatenate([value(model.class_token)[0], x])
    x = x + table
    for block in model.blocks:
        x = x + attend(norm(x, block.norm1, 1e-5), block.attn, model.options.heads)
        x = norm(x, block.norm2, 1e-5)
        x = x + mlp(x, block.mlp)
    x = norm(x, model.norm, 1e-5)
    if model.options.class_token:
        return dense(x[0], model.head)
    return dense(softmax(dense(x, model.attention_pool)[:, 0]) @ x, model.head)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("vit_lite_7_4", (12, 20), {}),
        ("cvt_7_4", (12, 20), {}),
        ("cct_7_3x1", (9, 14), {}),
        ("cct_2_3x2", (21, 13), {"conv_width": 7}),
        ("cct_14_7x2", (45, 70), CONVS),
    ],
)
def test_logits_match_the_definition(name, size, options):
    model = small(name, image_size=size, dtype=jnp.float64, **options)
    images = np.random.default_rng(3).standard_normal((2, *size, 3))
    want = [compute_logits(model, image, value(model.position.embedding)) for image in images]
    assert np.std(want) > 0.1
    np.testing.assert_allclose(run(model, jnp.asarray(images))[0], want, rtol=0, atol=1e-11)


# Dropout of attention


def attend_once(drop, *, position="none", key=None):
    """The output of one attention layer."""
    model = small("vit_lite_7_4", position)
    layer = model.blocks[0].attn
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 32)), jnp.float32)
    terms = model.position.terms((3, 5)).layer(0)
    return jax.jit(lambda x: layer(x, (3, 5), Global(), terms, drop, key))(x)


@pytest.mark.parametrize(
    "position", some_slow(["none", "rope_mixed+rpb", "lape(ape)", "lpe", "irpe"], ["lpe"])
)
def test_dropout_computes_the_same_as_the_kernels(position):
    # At this rate nothing is dropped; the explicit computation is compared with the kernel's.
    np.testing.assert_allclose(
        attend_once(1e-12, position=position, key=jax.random.key(0)),
        attend_once(0.0, position=position),
        atol=2e-6,
    )


def test_dropout_drops_weights_after_the_softmax():
    q, k = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 40, 2, 40)), jnp.float32)
    show = jnp.broadcast_to(jnp.eye(40)[:, None], (3, 40, 2, 40))  # values that show the weights
    got = attention._dropping_attention(
        q, k, show, drop=0.25, key=jax.random.key(1), rotation=None, bias=None, scale=None
    )
    weights = softmax(np.einsum("bqnd,bknd->bqnk", q, k) / math.sqrt(40))
    kept = np.asarray(got) > 0
    np.testing.assert_allclose(got, np.where(kept, weights / 0.75, 0), rtol=1e-4, atol=1e-7)
    # A binomial fraction of 9,600: five standard deviations of sqrt(.75 * .25 / 9600) = 0.0044.
    assert abs(kept.mean() - 0.75) < 0.022
    assert (
        len({kept[b, :, n].tobytes() for b in range(3) for n in range(2)}) == 6
    )  # each head and image by itself


def test_equal_images_are_dropped_differently_with_a_bias_of_each_image():
    model = small("vit_lite_7_4", "irpe")
    layer, terms = model.blocks[0].attn, model.position.terms((3, 5)).layer(0)
    x = jnp.tile(
        jnp.asarray(np.random.default_rng(0).standard_normal((1, 15, 32)), "float32"), (2, 1, 1)
    )
    first, second = layer(x, (3, 5), Global(), terms, 0.5, jax.random.key(0))
    assert np.abs(first - second).max() > 0.01


# Weights


def test_preprocessing_follows_the_number_of_classes():
    crops = {
        n: name_table(abstract("cct_7_3x1", num_classes=n), "cct").preprocessing
        for n in (10, 100, 1000)
    }
    assert [p.crop for p in crops.values()] == [1.0, 1.0, 0.9]
    assert len({p.mean for p in crops.values()}) == 3
