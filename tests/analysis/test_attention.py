import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

import rope_jax
from rope_jax.analysis.attention import (
    AttentionLayer,
    attention_maps,
    attention_statistics,
    attention_weights,
    row_statistics,
)
from rope_jax.models.attention import _spread
from rope_jax_kernels import rotate
from tests.models.small import fill, pictures, small_model


def token_distances(height, width):
    """Distances [L, L] between the tokens of a map."""
    places = np.stack(np.divmod(np.arange(height * width), width), 1)
    return np.linalg.norm(places[:, None] - places, axis=-1)


def equalise_logits(model):
    """Makes all logits of attention equal."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "qkv" in path:
            param.set_value(jnp.zeros_like(param[...]))
    return model


def small_hierarchy(name, size, **options):
    options |= {"heads": (2,), "width": 8}
    make = lambda: rope_jax.create_model(
        name, position="none", image_size=size, num_classes=2, **options
    )
    return equalise_logits(fill(nnx.eval_shape(make)))


def test_weights_on_prefix_tokens_are_left_out():
    weights = np.random.default_rng(0).dirichlet(np.ones(14), size=14)  # 2 prefix tokens, 3 x 4
    weights[5, 2:] = 0  # this query attends to the prefix alone: even attention on the map
    weights[6] = np.eye(14)[3]  # and this one to a single token: no entropy
    attend = lambda values: jnp.einsum("qk,bknd->bqnd", weights.astype(np.float32), values)
    layer = AttentionLayer(attend, (2, 14, 3, 5), (3, 4), 2, jnp.float32)
    distance, entropy = row_statistics(layer)  # summed over two images
    weights[5, 2:] = 1
    kept = weights[2:, 2:] / weights[2:, 2:].sum(1, keepdims=True)
    expected = (kept * token_distances(3, 4)).sum(1).mean()
    np.testing.assert_allclose(distance / 2, np.full(3, expected), rtol=1e-5)
    expected = scipy.special.entr(kept).sum(1).mean()
    np.testing.assert_allclose(entropy / 2, np.full(3, expected), rtol=1e-5)


def test_weights_of_a_padded_map_exclude_padding():
    weights = np.arange(81, dtype=np.float32).reshape(9, 9)  # 3 x 3 tokens, of which 3 x 2 exist
    attend = lambda values: jnp.einsum("qk,bknd->bqnd", weights, values.reshape(2, 9, 1, 4))
    layer = AttentionLayer(attend, (2, 3, 3, 1, 4), (3, 2), 0, jnp.float32)
    chunks = [attention_weights(layer, int(first))[0, :, 0] for first in layer.chunks]
    real_tokens = [0, 1, 3, 4, 6, 7]
    np.testing.assert_array_equal(
        np.concatenate(chunks, 1)[:, :6], weights[real_tokens][:, real_tokens]
    )
    assert not chunks[1][:, 2:].any()  # keys beyond the map


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        pytest.param("deit_ti16", {}, 15, marks=pytest.mark.slow),  # with a class token
        ("vit_s16", {"scan_layers": True, "remat": "blocks"}, 15),
        pytest.param("nat_isotropic_s16", {}, 9, marks=pytest.mark.slow),  # neighbourhoods of 3 x 3
    ],
)
def test_uniform_attention_has_the_entropy_of_its_tokens(name, changes, tokens):
    model = equalise_logits(small_model(name, "none", **changes))
    statistics = attention_statistics(model, [pictures(6, 10), pictures(6, 10)])
    assert statistics.images == 4
    assert statistics.grids == [(3, 5), (3, 5)]
    np.testing.assert_allclose(statistics.entropy, np.full((2, 3), math.log(tokens)), rtol=1e-5)


def test_statistics_exclude_padding():
    """3 x 2 tokens are padded to 3 x 3, and each attends to all of these."""
    model = small_hierarchy("nat_mini", (12, 8), depths=(1,), kernel_size=3, pad_compat=True)
    statistics = attention_statistics(model, [pictures(12, 8)])
    assert statistics.grids == [(3, 2)]
    np.testing.assert_allclose(statistics.entropy[0], math.log(6), rtol=1e-5)
    np.testing.assert_allclose(statistics.distance[0], token_distances(3, 2).mean(), rtol=1e-5)
    (maps,) = attention_maps(model, pictures(12, 8), query=(0.9, 0.9))
    np.testing.assert_allclose(maps, np.full((2, 2, 3, 2), 1 / 9), rtol=1e-5)


def softmax_weights(model, images, position):
    """Weights [B, N, L, L] of the first block: an explicit softmax of its projections."""
    terms, block = model.position.terms((3, 5)).layer(0), model.blocks[0]

    @jax.jit
    def project(images):
        tokens = model.embed(model.patch_embed(images), (3, 5), None)
        return block.attn.qkv(block.norm1(tokens)).reshape(2, 16, 3, 3, 16)

    qkv = project(images)
    q, k = qkv[:, :, 0], qkv[:, :, 1]
    if position == "axial_rope":
        q, k = rotate(q, k, terms.rotation, implementation="xla")
    logits = np.einsum("bqnd,bknd->bnqk", q, k) / 4
    if position == "rpb":
        logits += _spread(terms.bias, (3, 5), 1)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("position", "query"),
    [
        ("axial_rope", None),
        ("lpe", (0.5, 0.5)),  # its transform convolves the values
        pytest.param("rpb", (0.5, 0.5), marks=pytest.mark.slow),
        pytest.param("rpb", None, marks=pytest.mark.slow),
    ],
)
def test_maps_match_attention_weights(position, query):
    model, images = small_model("deit3_s16", position), pictures(6, 10)
    row = 0 if query is None else 1 + 1 * 5 + 2  # the class token, or the middle
    expected = softmax_weights(model, images, position)[:, :, row, 1:]
    maps = attention_maps(model, images, query=query)
    assert [layer.shape for layer in maps] == [(2, 3, 3, 5)] * 2
    np.testing.assert_allclose(maps[0].reshape(2, 3, 15), expected, atol=2e-6)


@pytest.mark.slow
def test_maps_support_query_dependent_biases():
    maps = attention_maps(small_model("deit3_s16", "irpe"), pictures(6, 10), query=(0.5, 0.5))
    assert 0 <= maps[0].min() < maps[0].sum((2, 3)).max() < 1


def test_missing_softmax_is_refused():
    make = lambda: rope_jax.create_model("cat_5", image_size=32, depth=1, width=64, heads=4)
    with pytest.raises(ValueError, match="CAT has no softmax"):
        attention_statistics(nnx.eval_shape(make), [pictures(32, 32)])


@pytest.mark.parametrize("padding", ["mask", "tokens"])
def test_windowed_and_global_layers(padding):
    """With equal logits a query attends to the tokens of its window, 2 x 2 on a map of 3 x 4."""
    options = {"attention": "window", "window_size": 2, "window_padding": padding}
    options |= {"class_token": False, "global_blocks": (1,)}
    model = equalise_logits(small_model("vit_s16", "decomposed", **options))
    statistics = attention_statistics(model, [pictures(6, 8)])
    assert statistics.grids == [(3, 4), (3, 4)]
    # The last row has windows of two tokens; padding is excluded here too.
    in_windows = (2 * math.log(4) + math.log(2)) / 3
    np.testing.assert_allclose(statistics.entropy[0], in_windows, rtol=1e-5)
    np.testing.assert_allclose(statistics.entropy[1], math.log(12), rtol=1e-5)


def test_uniform_attention_in_windows():
    model = small_hierarchy("swin_t", 16, depths=(2,), window_size=2)
    statistics = attention_statistics(model, [pictures(16, 16)])
    np.testing.assert_allclose(statistics.distance[0], (0 + 1 + 1 + math.sqrt(2)) / 4, rtol=1e-5)
    np.testing.assert_allclose(statistics.entropy[0], math.log(4), rtol=1e-5)
    assert (statistics.entropy[1] < math.log(4)).all()  # shifted windows are cut at the border
