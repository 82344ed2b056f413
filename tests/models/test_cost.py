"""Costs of models with heads: counts by hand."""

import numpy as np
import pytest
from flax import nnx

from rope_jax.models.cost import cost
from tests.models.small import abstract

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


def make(name, head, **settings):
    return abstract(name, head=head, **TINY | settings)


def count(model, depth=None):
    return {row.module: row.multiply_adds for row in cost(model, SIZE, depth=depth)}


@pytest.mark.parametrize(
    ("head", "neck", "want"),
    [
        ("linear(cells=2)", {}, 24 * 8 * 4 * 3),
        ("segmenter(depth=2,head_dim=4)", {}, SEGMENTER),
        ("upernet(width=4,auxiliary_width=5)", {"neck": NECK}, sum(UPERNET.values())),
    ],
)
def test_heads_match_counts_by_hand(head, neck, want):
    products = {name: n for name, n in count(make("deit_ti16", head), 1).items() if n}
    assert products == {"backbone": BACKBONE, "head": want} | neck


@pytest.mark.parametrize("head", [None, "linear"])
def test_flax_tabulate_names_the_command_and_has_no_effect(head):
    with pytest.raises(NotImplementedError, match=r"python -m rope_jax\.models\.cost"):
        nnx.tabulate(make("deit_ti16", head), np.zeros((1, *SIZE, 3), np.float32))
    make("deit_ti16", head)  # can still be created


BRANCH = 8 * 12 + 24 + 2 * 3  # tokens of strides 8, 16 and 32
ADAPTER = {
    # 4 points in each of three maps, or in one; each has four corners.
    "backbone.interactions.1.injector.attn": 24 * 12 * 4 * 8,
    "backbone.interactions.1.injector.attn.offset": 24 * 8 * 24,
    "backbone.interactions.1.injector.attn.weight": 24 * 8 * 12,
    "backbone.interactions.1.injector.attn.value": BRANCH * 8**2,
    "backbone.interactions.1.injector.attn.out": 24 * 8**2,
    "backbone.interactions.1.extractors.0.attn": BRANCH * 4 * 4 * 8,
    "backbone.interactions.1.extractors.0.conv": BRANCH * 9 * 2,
    "backbone.prior.convs.0.conv": 8 * 12 * 9 * 4 * 8,
}
# Including deformable attention and learned queries, which do not depend on the image.
DECODER = {
    "head.decoder.layers.0.cross.q": 5 * 8**2,
    "head.decoder.layers.0.cross": 2 * 5 * 6 * 8,  # the map of stride 32
    "head.decoder.layers.0.attn": 2 * 5**2 * 8,
    "head.decoder.embed.0": 2 * 5 * 8**2,  # before and after the layer
    "head.pixel_decoder.layers.0.attn": BRANCH * 12 * 4 * 8,
}
MASK2FORMER = (
    "mask2former(queries=5,width=8,heads=1,groups=1,depth=1,hidden=4,pixel_depth=1,pixel_hidden=4)"
)
BARE = {"groups": (0, 1, 2, 3), "deform_heads": 1, "prior_width": 4}


@pytest.mark.parametrize(
    ("name", "head", "settings", "depth", "want"),
    [
        ("vit_adapter_ti16", "upernet(width=4)", BARE, None, ADAPTER),
        ("deit_ti16", MASK2FORMER, {}, None, DECODER),
        (
            "deit_ti16",
            "upernet(width=4,auxiliary_width=5)",
            {},
            2,
            {f"head.{name}": n for name, n in UPERNET.items()},
        ),
    ],
)
def test_modules_match_counts_by_hand(name, head, settings, depth, want):
    products = count(make(name, head, **settings), depth)
    assert {module: products[module] for module in want} == want
