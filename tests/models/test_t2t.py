"""T2T-ViT: definition, random features, scale of logits, sizes, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.cost import cost
from rope_jax.models.layers import STORED
from rope_jax.models.pretrained import export_state_dict
from rope_jax.models.t2t import RandomFeatures, dropout, soft_split
from rope_jax.training.optim import decay_mask
from tests.models.definition import attend, dense, mlp, norm, patches_of, sinusoids, value
from tests.models.small import filled, pictures

SMALL = {"width": 16, "heads": 4, "depth": 2, "token_width": 8, "random_features": 4}


def small(position=None, *, image_size=(40, 70), dtype=jnp.float32, **changes):
    options = SMALL | changes | {"num_classes": 5, "image_size": image_size, "dtype": dtype}
    return filled(
        nnx.eval_shape(lambda: rope_jax.create_model("t2t_vit_7", position=position, **options))
    )


def jitted(model):
    """The model's calls, compiled as one program."""
    graph, state = nnx.split(model)
    run = jax.jit(
        lambda state, *args, train, key: nnx.merge(graph, state)(*args, train=train, key=key),
        static_argnames="train",
    )
    return lambda *args, train=False, key=None: run(state, *args, train=train, key=key)


def gradients(model, *args, **options):
    """Of the sum of some log-probabilities, with respect to what is trained."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        logits = nnx.merge(graph, params, rest)(*args, **options)
        return jax.nn.log_softmax(logits.astype(jnp.float32))[:, 1].sum()

    return jax.jit(jax.grad(loss))(params)


# The definition


def unfolded(image, *split):
    """Patches as torch's Unfold orders their numbers: channel, row, column."""
    patches = patches_of(image, *split)
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
        x = unfolded(x, *split)
        x = performer(x.reshape(-1, x.shape[-1]), layer).reshape(*x.shape[:2], -1)
    x = dense(unfolded(x, 3, 2, 1), stem.project)
    x = np.concatenate([value(model.class_token)[0], x.reshape(-1, x.shape[-1])])
    x = x + sinusoids(*x.shape)
    for block in model.blocks:
        normed = norm(x, block.norm1, 1e-5)
        x = x + attend(normed, block.attn, model.options.heads, scale=scale)
        x = x + mlp(norm(x, block.norm2, 1e-5), block.mlp)
    return dense(norm(x, model.norm, 1e-5)[0], model.head)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("logit_scale", ["head", "width"])
def test_the_model_is_its_definition_on_an_image_that_is_not_square(logit_scale):
    model = small(dtype=jnp.float64, logit_scale=logit_scale)
    images = pictures(41, 70).astype(jnp.float64)  # 10 x 17 tokens, 5 x 9, 3 x 5
    scale = (4 if logit_scale == "head" else 16) ** -0.5
    want = [definition(model, image, scale) for image in np.asarray(images)]
    np.testing.assert_allclose(jitted(model)(images), want, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_half_of_the_queries_with_one_scale_are_the_queries_with_the_other():
    """Four heads: the square root of the width is twice that of a head's channels."""
    old, new = small(logit_scale="width", depth=1), small(depth=1)
    images = pictures(40, 70)
    want = jitted(old)(images)
    assert np.abs(np.subtract(want, jitted(new)(images))).max() > 1e-3
    for layer in new.blocks:
        kernel = layer.attn.qkv.kernel
        kernel.set_value(kernel[...].at[:, :16].multiply(0.5))
    np.testing.assert_allclose(
        jitted(new)(images), want, rtol=0, atol=1e-5
    )  # logits of size 1, some fifty roundings


def test_a_soft_split_is_torchs_unfold():
    x = np.random.default_rng(0).standard_normal((2, 7, 10, 3))
    for split in ((7, 4, 2), (3, 2, 1), (3, 1, 0)):
        np.testing.assert_array_equal(
            soft_split(jnp.asarray(x, jnp.float32), *split),
            [unfolded(image, *split).astype(np.float32) for image in x],
        )


# Random features


def test_random_features_are_orthogonal_stored_and_not_trained():
    model = rope_jax.create_model("t2t_vit_7", depth=1)
    count = lambda kind: sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, kind))
    )
    assert count(RandomFeatures) == 2 * 32 * 64
    assert count(STORED) == count(nnx.Param) + 2 * 32 * 64
    one, other = (
        layer.w[...] for layer in (model.patch_embed.attention1, model.patch_embed.attention2)
    )
    for w in (one, other):
        np.testing.assert_allclose(w @ w.T, 32 * np.eye(32), rtol=0, atol=1e-4)
    assert float(jnp.abs(one - other).max()) > 1
    again = rope_jax.create_model("t2t_vit_7", depth=1)
    np.testing.assert_array_equal(again.patch_embed.attention1.w[...], one)


def test_random_features_are_in_files_of_weights(tmp_path):
    model, path = small(), str(tmp_path / "weights.safetensors")
    rope_jax.save_pretrained(model, path)
    again = rope_jax.create_model(path, seed=1)
    np.testing.assert_array_equal(
        again.patch_embed.attention2.w[...], model.patch_embed.attention2.w[...]
    )


def test_weights_go_out_and_come_back_with_the_table_that_official_files_hold():
    model = small(image_size=64)
    state_dict = export_state_dict(model, source="t2t")
    assert state_dict["tokens_to_token.attention2.mlp.2.weight"].shape == (8, 8)
    assert "pos_embed" not in state_dict
    other = rope_jax.create_model("t2t_vit_7", num_classes=5, image_size=64, seed=1, **SMALL)
    table = sinusoids(17, 16)[None].astype(np.float32)
    rope_jax.convert_state_dict(other, state_dict | {"pos_embed": table}, source="t2t")
    for one, two in zip(
        *(jax.tree.leaves(nnx.state(m, STORED)) for m in (model, other)), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(
        ValueError, match="pos_embed is computed here, and is not what the file holds"
    ):
        rope_jax.convert_state_dict(other, state_dict | {"pos_embed": table[:, ::-1]}, source="t2t")


# Numbers


def test_parameters_and_multiply_adds_are_those_of_the_official_model():
    model = nnx.eval_shape(lambda: rope_jax.create_model("t2t_vit_7"))
    rows = cost(model, 224)
    assert sum(row.parameters for row in rows) == 4_255_694
    total = sum(row.multiply_adds for row in rows)
    assert 1.05e9 < total < 1.15e9  # the paper says 1.1 G
    stem = {
        row.module: row.multiply_adds
        for row in cost(model, 224, depth=2)
        if row.module.startswith("patch_embed")
    }
    # 56 x 56 and 28 x 28 tokens of 64 channels from 147 and 576, with 32 features; then 14 x 14
    # of 256.
    performer = lambda inputs: 64 * 3 * inputs + 3 * 64**2 + 4 * 32 * 64 + 32
    assert stem == {
        "patch_embed.attention1": 56**2 * performer(147),
        "patch_embed.attention2": 28**2 * performer(576),
        "patch_embed.project": 14**2 * 576 * 256,
    }


@pytest.mark.parametrize(
    ("size", "grid"),
    [((224, 224), (14, 14)), ((3, 6), (1, 1)), ((50, 37), (3, 3)), ((225, 227), (14, 15))],
)
def test_images_of_any_size_become_tokens(size, grid):
    model = small(image_size=size)
    assert model.grids(size) == [grid]
    (features,) = jax.eval_shape(model.features, jnp.zeros((1, *size, 3)))
    assert features.shape == (1, *grid, 16)


def test_weight_decay_spares_the_class_token():
    mask = decay_mask(
        nnx.state(nnx.eval_shape(lambda: rope_jax.create_model("t2t_vit_7", depth=1)), nnx.Param)
    )
    assert not mask["class_token"]
    assert mask["patch_embed"]["attention1"]["kqv"] == {"kernel": True, "bias": False}


# Training


def test_numbers_are_dropped_one_by_one_and_the_mean_stays():
    x = jnp.ones((400, 50))
    dropped = dropout(x, 0.1, jax.random.key(0))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1) / np.float32(0.9)}
    assert abs(float((dropped == 0).mean()) - 0.1) < 5 * math.sqrt(
        0.09 / x.size
    )  # five standard deviations
    assert dropout(x, 0.1, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


# What is refused
