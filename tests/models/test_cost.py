"""Costs of models with heads: counts by hand."""

import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.cost import cost

TINY = {"width": 8, "heads": 1, "depth": 4, "image_size": 64, "num_classes": 3}
SIZE = (64, 96)  # 4 x 6 tokens
BACKBONE = 24 * 768 * 8 + 4 * (25 * 12 * 8**2 + 2 * 25**2 * 8)
BLOCK = 27 * 12 * 8**2 + 2 * 27**2 * 8  # of Segmenter: 24 patches and 3 classes
SEGMENTER = 24 * 8**2 + 2 * BLOCK + 24 * 8**2 + 3 * 8**2 + 24 * 3 * 8
# Areas of UperNet's maps: 384, 96, 24 and 6.
UPERNET = {
    "pooling": (1 + 4 + 9 + 36) * 8 * 4 + 6 * 9 * (8 + 4 * 4) * 4,
    "laterals": (384 + 96 + 24) * 8 * 4,
    "smooth": (384 + 96 + 24) * 9 * 4**2,
    "fuse": 384 * 9 * (4 * 4) * 4,
    "classify": 384 * 4 * 3,
    "auxiliary": 24 * (9 * 8 * 5 + 5 * 3),
}
TRANSPOSED = 4 * 8**2  # of one token
NECK = 24 * TRANSPOSED + 24 * TRANSPOSED + 4 * 24 * TRANSPOSED


def abstract(name, head, **settings):
    return nnx.eval_shape(lambda: rope_jax.create_model(name, head=head, **TINY | settings))


def counts(model, depth):
    rows = cost(model, SIZE, depth=depth)
    return {row.module: row.multiply_adds for row in rows if row.multiply_adds}


@pytest.mark.parametrize(
    ("head", "neck", "want"),
    [
        ("linear(cells=2)", 0, 24 * 8 * 4 * 3),
        ("segmenter(depth=2,head_dim=4)", 0, SEGMENTER),
        ("upernet(width=4,auxiliary_width=5)", NECK, sum(UPERNET.values())),
    ],
)
def test_heads_match_counts_by_hand(head, neck, want):
    model = abstract("deit_ti16", head)
    wanted = {"backbone": BACKBONE, "head": want} | ({"neck": neck} if neck else {})
    assert counts(model, 1) == wanted
    if neck:
        products = counts(model, 2)
        assert UPERNET.items() <= {name[5:]: n for name, n in products.items()}.items()


@pytest.mark.parametrize("head", [None, "linear"])
def test_flax_tabulate_names_the_command_and_has_no_effect(head):
    with pytest.raises(NotImplementedError, match=r"python -m rope_jax\.models\.cost"):
        nnx.tabulate(abstract("deit_ti16", head), np.zeros((1, *SIZE, 3), np.float32))
    abstract("deit_ti16", head)  # can still be created


def test_vit_adapter_matches_counts_by_hand():
    settings = {"groups": (0, 1, 2, 3), "deform_heads": 1, "prior_width": 4}
    products = counts(abstract("vit_adapter_ti16", "upernet(width=4)", **settings), None)
    submodules = lambda name: {
        module.removeprefix(f"{name}."): n
        for module, n in products.items()
        if module.startswith(f"{name}.")
    }
    branch = 8 * 12 + 24 + 2 * 3  # tokens of strides 8, 16 and 32
    # 4 points in each of three maps, or in one; each has four corners.
    injector = {"offset": 24 * 8 * 24, "weight": 24 * 8 * 12, "value": branch * 8**2}
    injector |= {"out": 24 * 8**2}
    interaction = "backbone.interactions.1"
    assert submodules(f"{interaction}.injector.attn") == injector
    assert products[f"{interaction}.injector.attn"] == 24 * 12 * 4 * 8
    assert products[f"{interaction}.extractors.0.attn"] == branch * 4 * 4 * 8
    assert products[f"{interaction}.extractors.0.conv"] == branch * 9 * 2
    assert products["backbone.prior.convs.0.conv"] == 8 * 12 * 9 * 4 * 8


def test_all_products_of_queries_are_counted():
    """Including deformable attention and learned queries, which do not depend on the image."""
    small = "queries=5,width=8,heads=1,groups=1,depth=1,hidden=4,pixel_depth=1,pixel_hidden=4"
    products = counts(abstract("deit_ti16", f"mask2former({small})"), None)
    decoder = "head.decoder"
    assert products[f"{decoder}.layers.0.cross.q"] == 5 * 8**2
    assert products[f"{decoder}.layers.0.cross"] == 2 * 5 * 6 * 8  # the map of stride 32
    assert products[f"{decoder}.layers.0.attn"] == 2 * 5**2 * 8
    assert products[f"{decoder}.embed.0"] == 2 * 5 * 8**2  # before and after the layer
    tokens = 8 * 12 + 24 + 2 * 3  # of strides 8, 16 and 32; 4 points in each, of 4 corners
    assert products["head.pixel_decoder.layers.0.attn"] == tokens * 12 * 4 * 8
