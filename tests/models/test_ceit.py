"""CeiT: definition in evaluation and training, batch statistics, weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.layers import BatchNorm, layer_dtypes
from tests.models.definition import attend, convolve, dense, extract_patches, gelu, mlp, norm, value
from tests.models.small import make_filled_model, pictures, run

SMALL = {
    "width": 32,
    "heads": 2,
    "depth": 2,
    "patch_size": 8,
    "mlp_ratio": 2.0,
    "stem_width": 6,
    "drop_path": 0.0,
    "image_size": (24, 40),
}


small = functools.partial(make_filled_model, "ceit_t", **SMALL)


# The definition


def each(function, images, *args):
    """Applies a function of the definition image by image."""
    return np.stack([function(image, *args) for image in images])


class Definition:
    """A model in NumPy; in training it collects the new statistics of batch norms."""

    def __init__(self, model, train):
        self.model, self.train, self.seen = model, train, {}

    def batch_norm(self, x, layer):
        mean, variance = value(layer.mean), value(layer.variance)
        if self.train:
            count = x.size // x.shape[-1]
            unbiased = count / (count - 1)
            mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
            self.seen[id(layer.mean)] = 0.9 * value(layer.mean) + 0.1 * mean
            kept = 0.9 * value(layer.variance)
            self.seen[id(layer.variance)] = kept + 0.1 * variance * unbiased
        return (x - mean) / np.sqrt(variance + 1e-5) * value(layer.scale) + value(layer.bias)

    def leff(self, x, layer, grid):
        maps = x[:, 1:].reshape(len(x), *grid, -1)
        maps = gelu(self.batch_norm(dense(maps, layer.conv1), layer.bn1))
        seen, kernel = each(extract_patches, maps, 3, 1, 1), value(layer.conv2.kernel)[:, :, 0]
        maps = np.einsum("bhwijc,ijc->bhwc", seen, kernel) + value(layer.conv2.bias)
        maps = gelu(self.batch_norm(maps, layer.bn2))
        maps = self.batch_norm(dense(maps, layer.conv3), layer.bn3)
        return np.concatenate([x[:, :1], maps.reshape(len(x), -1, maps.shape[-1])], axis=1)

    def logits(self, images, table):
        model, options = self.model, self.model.options
        stem, heads = model.patch_embed, options.heads
        x = self.batch_norm(each(convolve, images, stem.conv, 2, 3), stem.bn)
        x = each(extract_patches, x, 3, 2, 1, -np.inf).max(axis=(3, 4))
        x = each(convolve, x, stem.proj, options.patch_size // 4)
        grid = x.shape[1:3]
        token = np.broadcast_to(value(model.class_token), (len(x), 1, x.shape[-1]))
        x = np.concatenate([token, x.reshape(len(x), -1, x.shape[-1])], axis=1) + table
        class_tokens = []
        for block in model.blocks:
            x = x + each(attend, norm(x, block.norm1, 1e-6), block.attn, heads)
            x = x + self.leff(norm(x, block.norm2, 1e-6), block.leff, grid)
            class_tokens.append(x[:, 0])
        x = np.stack(class_tokens, axis=1) + value(model.layer_embedding)
        x = x + each(attend, norm(x, model.lca.norm1, 1e-6), model.lca.attn, heads)
        x = x + mlp(norm(x, model.lca.norm2, 1e-6), model.lca.mlp)
        return dense(norm(x[:, -1], model.norm, 1e-6), model.head)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("train", [False, True])
def test_logits_and_statistics_match_the_definition(train):
    model = small(dtype=jnp.float64)
    images = np.random.default_rng(3).standard_normal((3, 24, 40, 3))
    definition = Definition(model, train)
    expected_logits = definition.logits(images, value(model.position.embedding))
    expected_stats = [
        definition.seen.get(id(leaf), value(leaf))
        for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
    ]
    assert np.std(expected_logits) > 0.1
    logits, stats = run(model, jnp.asarray(images), train)
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-11)
    for (path, leaf), stat in zip(nnx.to_flat_state(stats), expected_stats, strict=True):
        np.testing.assert_allclose(leaf[...], stat, rtol=0, atol=1e-12, err_msg=str(path))
    assert len(expected_stats) == 2 * (1 + 3 * 2)


# Batch norm


def test_statistics_of_bfloat16_are_float32_and_of_several_values():
    layer = BatchNorm(3, dtypes=layer_dtypes(jnp.dtype(jnp.bfloat16)))
    x = 100 + pictures(9, 7).astype(jnp.bfloat16)
    assert layer(x, True).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(
        layer.mean[...], 0.1 * x.astype(jnp.float32).mean((0, 1, 2)), rtol=1e-6
    )
    with pytest.raises(ValueError, match="one value per channel: train with more images"):
        layer(x[:1, :1, :1], True)
