"""Parameters and multiply-adds as the literature counts them."""

import json
import math

import jax
import pytest
from flax import nnx

from rope_jax.commands import cost as command
from rope_jax.models.attention import attended_pairs
from rope_jax.models.cost import cost
from rope_jax_kernels import Neighborhood, Window
from tests.models.small import abstract as shapes
from tests.parity.official import DATA
from tests.slow import some_slow

GOLDEN = json.loads((DATA / "golden.json").read_text())
ISOTROPIC = {
    "deit_ti": "deit_ti16",
    "deit_s": "deit_s16",
    "deit_b": "deit_b16",
    "deit3_l": "deit3_l16",
    "vitrpb_s": "vit_s16",
    "vitrpb_b": "vit_b16",
}


@pytest.mark.parametrize("name", some_slow(GOLDEN["gmacs"], list(GOLDEN["gmacs"])[::4]))
def test_multiply_adds_match_the_literature(name):
    model = shapes(ISOTROPIC.get(name) or name.split("_official")[0].split("_matmul")[0])
    total = sum(row.multiply_adds for row in cost(model, 224)) / 1e9
    # Swin's own counter has norms in it, too.
    assert total == pytest.approx(GOLDEN["gmacs"][name], rel=1e-3 if "official" in name else 1e-9)


@pytest.mark.parametrize(
    ("name", "size", "products", "normalised", "giga"),
    [
        ("vit_lite_7_4", 32, 7 * 2 * 65**2 * 256, 0, 0.239),
        ("cvt_7_4", 32, 7 * 2 * 64**2 * 256, 0, 0.236),
        ("cct_7_3x1", 32, 7 * 2 * 256**2 * 256, 0, 0.947),
        # Table 1 of the paper counts 4 for each number that a norm normalises.
        ("cat_5", 224, 5 * 2 * 28**3 * 1024, 11 * 28**2 * 1024, 24.85),
        ("cat_vit_5", 224, 5 * 2 * 785**2 * 1024, 11 * 785 * 1024, 37.23),
    ],
)
def test_costs_without_attention_match_the_papers(name, size, products, normalised, giga):
    rows = cost(shapes(name), size)
    attention = sum(row.multiply_adds for row in rows if row.module.endswith(".attn"))
    assert attention == products
    layers = sum(row.multiply_adds for row in rows) - attention
    digits = 2 if normalised else 3
    assert round((layers + 4 * normalised) / 1e9, digits) == giga


@pytest.mark.parametrize("name", some_slow(["deit_ti16", "swin_t", "nat_mini"], ["deit_ti16"]))
def test_rows_add_up_at_every_depth_also_of_stacked_blocks(name):
    model, stacked = shapes(name), shapes(name, scan_layers=True)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    totals = set()
    for module, depth in ((model, 1), (model, 2), (model, 3), (model, None), (stacked, 2)):
        rows = cost(module, (64, 96), depth=depth)
        totals.add((sum(x.parameters for x in rows), sum(x.multiply_adds for x in rows)))
    assert [parameters for parameters, _ in totals] == [count]


def test_pairs_in_padded_windows_and_dilated_neighbourhoods_are_counted():
    # Two windows down and two across.
    assert attended_pairs(Window((2, 4)), (3, 5)) == 4 * 8**2
    # Rows: three of dilation 2 are classes of 2 and 1. Columns: five are classes of 3 and 2.
    assert attended_pairs(Neighborhood((3, 3), (2, 2)), (3, 5)) == (2 * 2 + 1) * (3 * 3 + 2 * 2)


def test_the_command_prints_the_table(capsys):
    sizes = ["--image_size=32x48", "--num_classes=10", "--depth=2"]
    command.main(["deit_ti16", "--position=none", "--head=linear", *sizes])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["module", "parameters", "multiply-adds"]
    rows = {name: (parameters, multiply_adds) for name, parameters, multiply_adds in lines[1:]}
    assert rows["backbone.patch_embed"] == ("147,648", f"{6 * 16 * 16 * 3 * 192:,}")
    assert rows["backbone.blocks"][1] == f"{12 * (7 * 12 * 192**2 + 2 * 7 * 7 * 192):,}"
    assert rows["head.classify"] == ("1,930", f"{6 * 192 * 10:,}")
