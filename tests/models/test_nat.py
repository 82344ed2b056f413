"""NAT and DiNAT: definition and settings; `test_swin` tests what they share with Swin."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax_kernels import Neighborhood
from tests.kernels.attention_pairs import mask
from tests.models.definition import convolve, norm
from tests.models.test_swin import (
    assert_is_its_definition,
    attend_on,
    axial,
    offsets,
    tiny,
)


def halve(x, layer):
    return convolve(x, layer, 2, padding=1)


def stem(embed, image):
    return norm(
        halve(halve(image, embed.proj[0]), embed.proj[1]),
        embed.norm,
        1e-5,
    )


def downsample(x, layer):
    return norm(halve(x, layer.reduction), layer.norm, 1e-5)


def neighbourhoods(kernel, dilations):
    """Pairs of tokens that meet in a block, of which every second one is dilated."""

    def make_mask(stage, block, grid):
        step = dilations[stage] if block % 2 else 1
        return mask(Neighborhood((kernel,) * 2, (step,) * 2), grid)

    return make_mask


CONVOLUTIONS = {"stem": stem, "downsample": downsample}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "position", "parts"),
    [
        ("nat_mini", "axial_rope", CONVOLUTIONS),
        pytest.param("dinat_base", "rpb", CONVOLUTIONS, marks=pytest.mark.slow),
        pytest.param("dinat_s_tiny", "axial_rope", {}, marks=pytest.mark.slow),
        pytest.param("nat_s_tiny", "rpb", {}, marks=pytest.mark.slow),
    ],
)
def test_nat_matches_its_definition_on_maps_of_any_size(name, position, parts):
    dilations = (3, 2) if name.startswith("di") else (1, 1)
    model = tiny(name, position, dtype=jnp.float64, kernel_size=3, dilations=dilations)

    def terms(stage, block, grid):
        if position == "rpb":
            return offsets(
                model, stage, block, grid, sign=-1, step=dilations[stage] if block % 2 else 1
            ), None
        return None, lambda head: axial(2 << stage)(grid, head)

    assert_is_its_definition(model, neighbourhoods(3, dilations), terms, **parts)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("position", ["rpb", pytest.param("lape(ape)", marks=pytest.mark.slow)])
def test_pad_compat_pads_as_natten_0_14(position):
    """Maps of 9 x 13 and 5 x 7 tokens, padded in every second block to 12 x 13 and 6 x 7."""
    dilations = (4, 2)
    model = tiny(
        "dinat_base",
        position,
        dtype=jnp.float64,
        kernel_size=3,
        dilations=dilations,
        pad_compat=True,
    )

    def terms(stage, block, grid):
        return (
            offsets(model, stage, block, grid, sign=-1, step=dilations[stage] if block % 2 else 1)
            if position == "rpb"
            else None
        ), None

    def attend(grid, x, block, heads, where, allowed, terms):
        if position != "rpb":
            x = x + np.asarray(model.stages[where[0]].position.terms(grid).layer(where[1]).add)
        span = 3 * (dilations[where[0]] if where[1] % 2 else 1)
        padded = tuple(max(n, span) for n in grid)
        zeros = np.zeros((*padded, x.shape[1]))
        zeros[: grid[0], : grid[1]] = x.reshape(*grid, -1)
        out = attend_on(padded, zeros.reshape(-1, x.shape[1]), block, heads, where, allowed, terms)
        return out.reshape(zeros.shape)[: grid[0], : grid[1]].reshape(x.shape)

    assert_is_its_definition(
        model, neighbourhoods(3, dilations), terms, attend=attend, **CONVOLUTIONS
    )


def test_dilations_match_the_papers():
    for name, depths in {
        "dinat_mini": (3, 4, 6, 5),
        "dinat_base": (3, 4, 18, 5),
        "dinat_s_small": (2, 2, 18, 2),
    }.items():
        model = nnx.eval_shape(lambda name=name: rope_jax.create_model(name))
        dilations = [
            [pattern.dilation[0] for pattern in model.patterns(stage, (56, 56))]
            for stage in range(4)
        ]
        assert dilations == [
            ([1, most] * depth)[:depth] for depth, most in zip(depths, (8, 4, 2, 1), strict=True)
        ]


def test_layer_scale_matches_the_official_code():
    scales = {}
    for name in rope_jax.list_models("*nat_[tsmb]*"):
        make = lambda name=name: rope_jax.create_model(name, depths=(1,), heads=(2,))
        scales[name] = nnx.eval_shape(make).stages[0].blocks[0].scale1 is not None
    assert {name for name, scaled in scales.items() if scaled} == {
        "nat_small",
        "nat_base",
        "dinat_base",
    }
    assert len(scales) == 14
    model = rope_jax.create_model(
        "nat_small", width=8, depths=(1,), heads=(1,), dilations=(1,), image_size=16, num_classes=2
    )
    np.testing.assert_array_equal(model.stages[0].blocks[0].scale2.gamma[...], np.float32(1e-5))
