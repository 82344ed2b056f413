"""Numbers of trainable parameters, those of the official code (1,000 classes, 224 pixels)."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.layers import layer_dtypes
from rope_jax.models.necks import FourScales
from rope_jax.models.pyramid import FeaturePyramid
from tests.models.small import create_head
from tests.parity.official import DATA
from tests.slow import some_slow

WINDOWS = {"class_token": False, "attention": "window", "last_norm": False}  # ViTDet's
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
        (f"{name}_isotropic_{size[0]}16", "rpb", GOLDEN[f"nat_isotropic_{size}"])
        for size in ("small", "base")
        for name in ("nat", "dinat")
    ],
]
_STAGES = json.loads((DATA / "golden.json").read_text())["params"]
SCHEMES = {"none_or_axial": "rope2d(base=50)", "mixed": "rope_mixed", "mixed_rpb": "rope_mixed+rpb"}
STAGES = [
    (name, SCHEMES.get(scheme, scheme.replace("_", "+")), count)
    for name, counts in _STAGES.items()
    for scheme, count in counts.items()
]
# The -s forms without dilation have the parameters of those with it.
STAGES += [
    (name.removeprefix("di"), scheme, count)
    for name, scheme, count in STAGES
    if name.startswith("dinat_s_")
]
# Trainable, of the official code; beit's and those of distilled models by timm 1.0.31.
OTHERS = {
    "beit_b16": 86_530_984,
    "beit_l16": 304_430_568,
    "cat_5": 32_691_256,  # with those of group norms
    "cct_14_7x2": 22_367_273,
    "cct_2_3x2": 283_723,
    "cct_7_3x1": 3_760_139,
    "ceit_b": 94_405_416,
    "ceit_s": 24_204_840,
    "ceit_t": 6_356_904,
    "cvt_7_4": 3_716_619,
    "deit_b16_distilled": 87_338_192,
    "deit_s16_distilled": 22_436_432,
    "deit_ti16_distilled": 5_910_800,
    # Of DeiT-S, less the table of 197 rows, plus the convolutions: a 3 x 3 kernel and a bias for
    # each of 384 channels, and in 12 layers of 64.
    "resformer_s16": 22_050_664 - 197 * 384 + 384 * 10 + 12 * 64 * 10,
    "swinv2_b": 87_918_816,
    "swinv2_s": 49_728_418,
    "swinv2_t": 28_347_154,
    "t2t_vit_7": 4_255_694,
    "vit_lite_6_4": 3_190_538,
    "vit_lite_7_4": 3_716_874,
}
WITHOUT_HEAD = {
    "dinov2_s14": 22_056_192,
    "dinov2_b14": 86_579_712,
    "dinov2_l14": 304_367_616,
    "dinov2_g14": 1_136_479_232,
    "dinov2_g14_reg": 1_136_483_840 + 1536,
    "dinov3_s16": 21_596_160,
    "dinov3_s16_plus": 28_692_480,
    "dinov3_b16": 85_659_648,
    "dinov3_l16": 303_128_576,
    "dinov3_h16_plus": 840_591_360,
}


# The demo, by hand.
_BLOCK = 2 * 2 * 96 + (96 * 288 + 288) + (96 * 96 + 96) + (96 * 192 + 192) + (192 * 96 + 96)
DIGITS = (2 * 2 * 3 * 96 + 96) + 2 * 96 + 4 * _BLOCK + 2 * 96 + (96 * 10 + 10)
MORE = [(name, {}, count) for name, count in OTHERS.items()]
MORE += [("cct_7_3x1", {"num_classes": 100}, 3_783_269)]
MORE += [(name, {"num_classes": 0}, count) for name, count in WITHOUT_HEAD.items()]
# The number of heads does not change that of parameters.
OWN = [("vit_s16_h6", {}, GOLDEN["vitrpb_small"]["none"]), ("vit_digits", {}, DIGITS)]
WITH_SCHEME, WITH_STAGES = (
    [(name, {"position": position}, count) for name, position, count in cases]
    for cases in (CASES, STAGES)
)
QUICK = MORE[::4] + OWN + WITH_SCHEME[::7] + WITH_STAGES[::18]


def count_parameters(make):
    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    return sum(math.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize(
    ("name", "options", "count"), some_slow(MORE + OWN + WITH_SCHEME + WITH_STAGES, QUICK)
)
def test_parameter_counts_match_the_official_code(name, options, count):
    assert count_parameters(lambda: rope_jax.create_model(name, **options)) == count


def head_maker(name, channels, **overrides):
    classes = 80 if name in ("dino", "mask_rcnn") else 150
    return lambda: create_head(name, channels, classes, **overrides)


def pyramid_maker(*scales):
    return lambda: FeaturePyramid(768, rngs=nnx.Rngs(0), **({"scales": scales} if scales else {}))


def neck_maker(channels):
    return lambda: FourScales(channels, rngs=nnx.Rngs(0), dtypes=FLOAT)


FLOAT = layer_dtypes(jnp.dtype(jnp.float32))
# Of UperNet: its channels and width, and parameters without and of its auxiliary head.
UPERNETS = [
    (768, 768, 67_963_542, 1_808_534),
    (1024, 1024, 120_764_566, 2_398_358),
    (192, 512, 27_614_358, 481_430),
    (384, 512, 29_187_222, 923_798),
]
PARTS = [
    *[
        (head_maker("upernet", [c] * 4, width=width), decoder + aux)
        for c, width, decoder, aux in UPERNETS
    ],
    *[
        (head_maker("upernet", [c] * 4, width=width, auxiliary_width=0), decoder)
        for c, width, decoder, _ in UPERNETS
    ],
    (head_maker("upernet", [768] * 4), sum(UPERNETS[0][2:])),  # the width is that of the maps
    (head_maker("segmenter", [192]), 1_029_996),
    (head_maker("segmenter", [384]), 4_050_348),
    (head_maker("segmenter", [768]), 16_063_020),
    (neck_maker(192), 443_328),
    (neck_maker(384), 1_771_392),
    (neck_maker(768), 7_081_728),
    (neck_maker(1024), 12_588_032),
    # DINO's neck and the rest of the head.
    (head_maker("dino", [256] * 4), 265_216 + 18_556_236),
    (head_maker("dino", [192, 384, 768]), 2_116_608 + 18_556_236),
    (head_maker("dino", [256, 512, 1024]), 2_821_120 + 18_556_236),
    # Mask R-CNN's pyramid, anchors, and heads of regions.
    (head_maker("mask_rcnn", [192] * 4), 2_557_952 + 593_935 + 16_949_985),
    (head_maker("mask_rcnn", [384] * 4), 2_754_560 + 593_935 + 16_949_985),
    # Mask2Former's pixel decoder and its decoder.
    (head_maker("mask2former", [96, 192, 384, 768]), 5_421_504 + 14_497_431),
    (head_maker("mask2former", [128, 256, 512, 1024]), 5_544_384 + 14_497_431),
    (pyramid_maker(), 5_560_000),
    (pyramid_maker(2.0, 1.0, 0.5), 3_444_096),
    # ViTDet's backbone; the class token's entry in the official table of positions is not used.
    (lambda: rope_jax.create_model("deit_b16", num_classes=0, **WINDOWS), 85_796_352 - 768),
]


@pytest.mark.parametrize(("make", "count"), some_slow(PARTS, PARTS[::4]))
def test_head_and_neck_counts_match_their_code(make, count):
    assert count_parameters(make) == count
