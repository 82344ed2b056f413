"""ViT-Adapter: properties that its golden (tests/parity/dense/vit_adapter.py) does not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.layers import BatchNorm
from rope_jax.models.vit import ViT
from tests.models.small import fill, pictures

SMALL = {"width": 24, "heads": 3, "depth": 4, "mlp_ratio": 2.0, "num_classes": 0, "prior_width": 4}
SMALL |= {"groups": (0, 1, 2, 3), "deform_heads": 2, "deform_points": 2, "image_size": 32}


def small(**changes):
    return rope_jax.create_model("vit_adapter_ti16", **SMALL | changes)


def test_maps_have_strides_4_to_32():
    images = jax.ShapeDtypeStruct((2, 48, 80, 3), jnp.float32)
    maps = jax.eval_shape(lambda images: small().features(images), images)
    assert [x.shape for x in maps] == [
        (2, 12, 20, 24),
        (2, 6, 10, 24),
        (2, 3, 5, 24),
        (2, 2, 3, 24),
    ]


@pytest.mark.slow
def test_added_maps_are_those_of_the_groups_or_the_last_one():
    """Injectors are 0 at the start: the ViT's maps are then those of the ViT alone."""
    graph, state = nnx.split(small())
    last = nnx.graphdef(small(added="last"))

    @jax.jit
    def run(state, images):
        model, last_map = nnx.merge(graph, state), nnx.merge(last, state)
        alone = ViT.features(model, images, blocks=model.options.groups)
        return model.features(images), last_map.features(images), alone

    groups, last, alone = run(state, pictures(32, 64))
    for level, (group_map, last_map) in enumerate(zip(groups, last, strict=True)):
        want = resize_maps(alone[level] - alone[-1], group_map.shape[1:3])
        scale = (1 + BatchNorm.epsilon) ** 0.5  # of the batch norm at the start
        np.testing.assert_allclose((group_map - last_map) * scale, want, atol=2e-5)


def test_all_parameters_and_statistics_train():
    model = fill(small(drop_path=0.4, depth=2, groups=(0, 1), added="last"))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, key):
        def loss(params):
            model = nnx.merge(graph, params, rest)
            maps = model.features(pictures(32, 64), train=True, key=key)
            return sum((x**3).mean() for x in maps), nnx.state(model, nnx.BatchStat)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, statistics), gradients = step(params, jax.random.key(0))
    assert value != step(params, jax.random.key(1))[0][0]
    for path, gradient in nnx.to_flat_state(gradients):
        assert 0 < np.abs(gradient[...]).max() < np.inf, path
    for path, before in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        assert np.abs(dict(nnx.to_flat_state(statistics))[path][...] - before[...]).max() > 0, path


@pytest.mark.parametrize("settings", [{"blocks": (1,)}, {"norm": True}])
def test_blocks_and_norms_cannot_be_chosen(settings):
    with pytest.raises(ValueError, match=r"blocks=.*norm=.*ViT-Adapter"):
        nnx.eval_shape(small).features(pictures(32, 32), **settings)
