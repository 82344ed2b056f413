"""T2T-ViT: definition, random features, sizes, dropout."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.layers import STORED
from rope_jax.models.t2t import RandomFeatures
from tests.models.definition import attend, dense, extract_patches, mlp, norm, sinusoids, value
from tests.models.small import make_filled_model, pictures, run

SMALL = {"width": 16, "heads": 4, "depth": 2, "token_width": 8, "random_features": 4}


small = functools.partial(make_filled_model, "t2t_vit_7", image_size=(40, 70), **SMALL)


# The definition


def unfold(image, *split):
    """Patches as torch's Unfold orders their numbers: channel, row, column."""
    patches = extract_patches(image, *split)
    return patches.transpose(0, 1, 4, 2, 3).reshape(*patches.shape[:2], -1)


def performer(x, layer):
    """Every query's weights written out; phi(q) . phi(k) are their numerators."""
    k, q, v = np.split(dense(norm(x, layer.norm1, 1e-5), layer.kqv), 3, axis=-1)
    w = value(layer.w)

    def phi(x):
        return np.exp(x @ w.T - (x**2).sum(axis=-1, keepdims=True) / 2) / math.sqrt(len(w))

    kernel = phi(q) @ phi(k).T
    x = v + dense(kernel / (kernel.sum(axis=-1, keepdims=True) + 1e-8) @ v, layer.proj)
    return x + mlp(norm(x, layer.norm2, 1e-5), layer.mlp)


def definition(model, image, scale):
    """Logits of one image, logits of attention being multiplied by `scale`."""
    stem, x = model.patch_embed, image
    for layer, split in ((stem.attention1, (7, 4, 2)), (stem.attention2, (3, 2, 1))):
        x = unfold(x, *split)
        x = performer(x.reshape(-1, x.shape[-1]), layer).reshape(*x.shape[:2], -1)
    x = dense(unfold(x, 3, 2, 1), stem.project)
    x = np.concatenate([value(model.class_token)[0], x.reshape(-1, x.shape[-1])])
    x = x + sinusoids(*x.shape)
    for block in model.blocks:
        normed = norm(x, block.norm1, 1e-5)
        x = x + attend(normed, block.attn, model.options.heads, scale=scale)
        x = x + mlp(norm(x, block.norm2, 1e-5), block.mlp)
    return dense(norm(x, model.norm, 1e-5)[0], model.head)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("logit_scale", ["head", "width"])
def test_the_model_matches_its_definition_on_rectangles(logit_scale):
    model = small(dtype=jnp.float64, logit_scale=logit_scale)
    images = pictures(41, 70).astype(jnp.float64)  # 10 x 17 tokens, 5 x 9, 3 x 5
    scale = (4 if logit_scale == "head" else 16) ** -0.5
    want = [definition(model, image, scale) for image in np.asarray(images)]
    np.testing.assert_allclose(run(model, images)[0], want, rtol=0, atol=1e-12)


# Random features


def test_random_features_are_orthogonal_and_stored_untrained():
    model = rope_jax.create_model("t2t_vit_7", depth=1)
    features = jax.tree.leaves(nnx.state(model, RandomFeatures))
    stored, trained = (len(jax.tree.leaves(nnx.state(model, kind))) for kind in (STORED, nnx.Param))
    assert stored == trained + 2
    first, second = map(np.asarray, features)
    for w in (first, second):
        np.testing.assert_allclose(w @ w.T, 32 * np.eye(32), rtol=0, atol=1e-4)
    assert np.abs(first - second).max() > 1
    again = rope_jax.create_model("t2t_vit_7", depth=1)
    np.testing.assert_array_equal(again.patch_embed.attention1.w[...], first)
