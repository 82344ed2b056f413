"""Numbers of trainable parameters, those of the official code (1,000 classes, 224 pixels)."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rope_jax
from tests.models.small import some_slow

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "golden_models.json").read_text())
HEO = {
    "axial": "rope2d",
    "mixed": "rope_mixed",
    "axial_ape": "rope2d+ape",
    "mixed_ape": "rope_mixed+ape",
}

CASES = [
    *[(f"deit_{size}16", None, GOLDEN[f"deit_{size}"]) for size in ("ti", "s", "b")],
    *[(f"deit3_{size}16", None, GOLDEN[f"deit3_{size}"]) for size in ("ti", "s", "b", "l")],
    *[
        (f"deit3_{size}16", scheme, GOLDEN[f"heo_vit_{size}"][name])
        for size in ("s", "b", "l")
        for name, scheme in HEO.items()
    ],
    *[(f"deit_{size}16", "lape(ape)", GOLDEN[f"lape_deit_{size}"]) for size in ("ti", "s", "b")],
    *[
        (f"vit_{size[0]}16", scheme, GOLDEN[f"vitrpb_{size}"][scheme])
        for size in ("small", "base")
        for scheme in ("rpb", "none")
    ],
    *[
        (f"nat_isotropic_{size[0]}16", "rpb", GOLDEN[f"nat_isotropic_{size}"])
        for size in ("small", "base")
    ],
]


def params_of(name, position):
    return nnx.state(
        nnx.eval_shape(lambda: rope_jax.create_model(name, position=position)), nnx.Param
    )


@pytest.mark.parametrize(("name", "position", "count"), some_slow(CASES, CASES[::7]))
def test_parameters_are_as_many_as_in_the_official_code(name, position, count):
    leaves = jax.tree.leaves(params_of(name, position))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


def test_every_golden_count_is_used():
    counts = {
        count
        for value in GOLDEN.values()
        for count in (value.values() if isinstance(value, dict) else [value])
    }
    assert counts == {count for _, _, count in CASES}


@pytest.mark.parametrize("name", ["vit_s16_h6", "vit_digits"])
def test_models_of_the_project_hold_no_position_parameters(name):
    """The head count does not change the number; the demo is counted by hand."""
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params_of(name, None)))
    block = 2 * 2 * 96 + (96 * 288 + 288) + (96 * 96 + 96) + (96 * 192 + 192) + (192 * 96 + 96)
    digits = (2 * 2 * 3 * 96 + 96) + 2 * 96 + 4 * block + 2 * 96 + (96 * 10 + 10)
    assert count == {"vit_s16_h6": GOLDEN["vitrpb_small"]["none"], "vit_digits": digits}[name]
