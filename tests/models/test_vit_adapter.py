"""ViT-Adapter: properties that its golden (tests/parity/dense/vit_adapter.py) does not cover."""

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.layers import BatchNorm
from rope_jax.models.vit import ViT
from tests.models.small import pictures

SMALL = {"width": 24, "heads": 3, "depth": 4, "mlp_ratio": 2.0, "num_classes": 0, "prior_width": 4}
SMALL |= {"groups": (0, 1, 2, 3), "deform_heads": 2, "deform_points": 2, "image_size": 32}


def small(**changes):
    return rope_jax.create_model("vit_adapter_ti16", **SMALL | changes)


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


@pytest.mark.parametrize("settings", [{"blocks": (1,)}, {"norm": True}])
def test_blocks_and_norms_cannot_be_chosen(settings):
    with pytest.raises(ValueError, match=r"blocks=.*norm=.*ViT-Adapter"):
        nnx.eval_shape(small).features(pictures(32, 32), **settings)
