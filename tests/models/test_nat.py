"""NAT and DiNAT: definition and settings; `test_swin` tests what they share with Swin."""

import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Neighborhood
from tests.kernels.attention_pairs import mask
from tests.models.definition import convolve, norm
from tests.models.test_swin import (
    assert_is_its_definition,
    attend_on,
    make_terms,
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

    terms = make_terms(model, position, dilations)
    assert_is_its_definition(model, neighbourhoods(3, dilations), terms, **parts)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("position", ["rpb", pytest.param("lape(ape)", marks=pytest.mark.slow)])
def test_pad_compat_pads_as_natten_0_14(position):
    """Maps of 9 x 13 and 5 x 7 tokens, padded in every second block to 12 x 13 and 6 x 7."""
    dilations, options = (4, 2), {"kernel_size": 3, "pad_compat": True}
    model = tiny("dinat_base", position, dtype=jnp.float64, dilations=dilations, **options)

    def attend(grid, x, block, heads, where, allowed, terms):
        if position != "rpb":
            x = x + np.asarray(model.stages[where[0]].position.terms(grid).layer(where[1]).add)
        span = 3 * (dilations[where[0]] if where[1] % 2 else 1)
        padded = tuple(max(n, span) for n in grid)
        zeros = np.zeros((*padded, x.shape[1]))
        zeros[: grid[0], : grid[1]] = x.reshape(*grid, -1)
        out = attend_on(padded, zeros.reshape(-1, x.shape[1]), block, heads, where, allowed, terms)
        return out.reshape(zeros.shape)[: grid[0], : grid[1]].reshape(x.shape)

    terms = make_terms(model, position, dilations)
    assert_is_its_definition(
        model, neighbourhoods(3, dilations), terms, attend=attend, **CONVOLUTIONS
    )
