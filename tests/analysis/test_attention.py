import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.analysis.attention import Layer, attention_maps, attention_statistics, row_statistics
from rope_jax.models.attention import _spread
from rope_jax_kernels import rotate
from tests.models.small import pictures, small_model

pytestmark = pytest.mark.usefixtures("quick_compiles")


def layer_of(weights, grid, prefix=0, head_dim=4):
    """A layer whose weights [L, L] are given, the same in all heads."""
    shape = (2, len(weights), 3, head_dim)
    return Layer(lambda values: jnp.einsum("qk,bknd->bqnd", jnp.asarray(weights, jnp.float32), values), shape, grid, prefix, jnp.float32)


def test_looking_at_the_neighbour_is_a_distance_of_one_and_no_entropy():
    height, width = 3, 5
    tokens = np.arange(height * width).reshape(height, width)
    looked_at = np.concatenate([tokens[:, 1:2], tokens[:, :-1]], axis=1)  # one token left, and at the border one right
    distance, entropy = row_statistics(layer_of(np.eye(height * width)[looked_at.ravel()], (height, width)))
    np.testing.assert_allclose(distance, 2 * np.ones(3), rtol=1e-6)  # summed over two images
    np.testing.assert_allclose(entropy, np.zeros(3), atol=1e-6)


def test_weights_on_prefix_tokens_are_left_out():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(14), size=14)  # two prefix tokens, 3 x 4
    distance, entropy = row_statistics(layer_of(weights, (3, 4), prefix=2))
    kept = weights[2:, 2:] / weights[2:, 2:].sum(1, keepdims=True)
    places = np.stack(np.divmod(np.arange(12), 4), 1)
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    np.testing.assert_allclose(distance[0] / 2, (kept * apart).sum(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(entropy[0] / 2, -(kept * np.log(kept)).sum(1).mean(), rtol=1e-5)


def test_a_query_that_looks_at_the_prefix_alone_looks_evenly_at_the_map():
    weights = np.zeros((13, 13))
    weights[:, 0] = 1
    _, entropy = row_statistics(layer_of(weights, (3, 4), prefix=1, head_dim=5))
    np.testing.assert_allclose(entropy / 2, math.log(12), rtol=1e-6)


def even(model):
    """Makes all logits of attention equal."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "qkv" in path:
            param.set_value(jnp.zeros_like(param[...]))
    return model


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        pytest.param("deit_ti16", {}, 15, marks=pytest.mark.slow),  # with a class token
        ("vit_s16", {"scan_layers": True}, 15),
        pytest.param("nat_isotropic_s16", {}, 9, marks=pytest.mark.slow),  # neighbourhoods of 3 x 3
    ],
)
def test_even_attention_has_the_entropy_of_its_tokens(name, changes, tokens):
    found = attention_statistics(even(small_model(name, "none", **changes)), [pictures(6, 10), pictures(6, 10, batch=1)])
    assert found.images == 3
    assert found.grids == [(3, 5), (3, 5)]
    np.testing.assert_allclose(found.entropy, np.full((2, 3), math.log(tokens)), rtol=1e-5)


def test_even_attention_in_windows():
    options = {"depths": (2,), "heads": (2,), "width": 8, "window_size": 2}
    model = even(rope_jax.create_model("swin_t", position="none", image_size=16, num_classes=2, **options))
    found = attention_statistics(model, [pictures(16, 16)])
    apart = (0 + 1 + 1 + math.sqrt(2)) / 4
    np.testing.assert_allclose(found.distance[0], apart, rtol=1e-5)
    np.testing.assert_allclose(found.entropy[0], math.log(4), rtol=1e-5)
    assert (found.entropy[1] < math.log(4)).all()  # shifted windows are cut at the border of the map


def test_padding_of_a_map_is_not_part_of_it():
    """2 x 3 tokens, padded to 3 x 3 of which each token sees all: what is left for the real ones is even."""
    options = {"depths": (1,), "heads": (2,), "width": 8, "kernel_size": 3, "pad_compat": True}
    model = even(rope_jax.create_model("nat_mini", position="none", image_size=(8, 12), num_classes=2, **options))
    found = attention_statistics(model, [pictures(8, 12)])
    assert found.grids == [(2, 3)]
    np.testing.assert_allclose(found.entropy[0], math.log(6), rtol=1e-5)
    places = np.stack(np.divmod(np.arange(6), 3), 1)
    np.testing.assert_allclose(found.distance[0], np.linalg.norm(places[:, None] - places, axis=-1).mean(), rtol=1e-5)
    (maps,) = attention_maps(model, pictures(8, 12), query=(0.9, 0.9))
    np.testing.assert_allclose(maps, np.full((2, 2, 2, 3), 1 / 9), rtol=1e-5)


@pytest.mark.parametrize("position", ["axial_rope", "lpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rpb", "irpe"))])
def test_maps_are_the_weights_of_attention(position):
    """Against softmax of the projections of the first block, written out."""
    model = small_model("deit3_s16", position)
    images = pictures(6, 10)
    tokens, terms = model.embed(model.patch_embed(images), (3, 5), None), model.position.terms((3, 5)).layer(0)
    block = model.blocks[0]
    qkv = block.attn.qkv(block.norm1(tokens)).reshape(2, 16, 3, 3, 16)
    q, k, _ = jnp.moveaxis(qkv, 2, 0)
    if position == "axial_rope":
        q, k = rotate(q, k, terms.rotation, implementation="xla")
    logits = jnp.einsum("bqnd,bknd->bnqk", q, k) / 4
    if position == "rpb":
        logits += _spread(terms.bias, (3, 5), 1)
    weights = np.asarray(jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True))
    middle = 1 + 1 * 5 + 2
    maps = attention_maps(model, images, query=(0.5, 0.5))
    assert [layer.shape for layer in maps] == [(2, 3, 3, 5)] * 2
    if position == "irpe":  # its logits depend on the query: here only that they are weights
        assert (maps[0] >= 0).all()
        assert (maps[0].sum((2, 3)) < 1).all()
    else:
        np.testing.assert_allclose(maps[0].reshape(2, 3, 15), weights[:, :, middle, 1:], atol=2e-6)
        of_class = attention_maps(model, images)[0]
        np.testing.assert_allclose(of_class.reshape(2, 3, 15), weights[:, :, 0, 1:], atol=2e-6)


def test_what_cannot_be_looked_at_is_refused():
    model = rope_jax.create_model("cat_5", image_size=32, depth=1, width=64, heads=4)
    with pytest.raises(ValueError, match="CAT attends along rows without a softmax"):
        attention_statistics(model, [pictures(32, 32)])
    with pytest.raises(ValueError, match="there are no images"):
        attention_statistics(small_model("vit_s16"), [])
    with pytest.raises(ValueError, match=r"query=\(2.0, 0.0\) must be two numbers"):
        attention_maps(small_model("vit_s16"), pictures(6, 10), query=(2.0, 0.0))
