"""Official weights give official numbers: the logits of the official code.

Tolerances: two float32 implementations of one model differ by up to 4e-6 in logits of size 1, and
those of Swin V2, whose attention's logits reach 100, by up to 3e-5 (`limit` of a case). In float64
rounding leaves 1e-14, and a wrong epsilon of a layer norm shows with 4e-6 and more.

Unmarked tests run one case for each source and each kind of position; all others are slow.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.registry import find_model
from rope_jax.weights import export_state_dict
from rope_jax.weights.convert import SOURCES
from tests.models.small import compile_call
from tests.parity import official

# In float64; the source "cat" is in tests/models/test_cat.py.
QUICK = ["deit_ti16_224", "swin_t_rope_mixed_224", "nat_mini_224", "resformer_ti16_160"]
QUICK += ["timm_dinov3_64x96", "timm_dinov2_56x84", "timm_dinov2_g_reg_56"]
FLOAT64 = [
    "lape_deit_ti_sin1d_224",
    "swin_t_rpb_224",
    "cct_7_3x1_32",
    "ceit_t_224",
    "t2t_vit_7_224",
    "timm_beit_64x96",
    "heo_vit_s16_mixed_ape_224",
    "nat_s_tiny_224",
    "vit_lite_7_4_32",
    "resformer_s16_128",
    "swinv2_t_window8_256",
    "swinv2_t_window16_256",
    "swinv2_t_window8to6_192",
]


def convert(name, dtype=jnp.float32, *, scan=False):
    """The model of a case with its weights, all from the state dict, without initialisation.

    With `scan`, blocks are stacked if the family allows it, which compiles faster.
    """
    case = official.CASES[name]
    fixed = find_model(case["model"]).options.fixed
    settings = {
        "scan_layers": scan and "scan_layers" not in fixed,
        "position": case["position"],
        "num_classes": case["num_classes"],
        "image_size": tuple(case["create"]),
    }

    def make():
        return rope_jax.create_model(case["model"], dtype=dtype, **settings, **case["options"])

    model, weights = nnx.eval_shape(make), official.state_dict(name)
    rope_jax.convert_state_dict(model, weights, source=case["source"])
    if case.get("scale_windows"):
        model.scale_windows()
        model.resize(tuple(case["size"]))
    return model, weights


def check_logits(name, model, dtype, key, tolerance):
    images = jnp.asarray(official.images(*official.CASES[name]["size"]), dtype)
    with jax.default_matmul_precision("highest"):
        logits = compile_call(model)(images)
    assert logits.dtype == dtype
    assert np.abs(np.asarray(logits) - official.golden(name)[key]).max() < tolerance


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in FLOAT64)]
)
def test_float64_logits_match_the_official_code(name):
    model, weights = convert(name, jnp.float64, scan=True)
    # Some codes compute their sines in float32 whatever the model's dtype.
    tolerance = 2e-6 if official.CASES[name]["float32_tables"] else 1e-9
    check_logits(name, model, jnp.float64, "logits_f64", tolerance)
    if "dinov3" not in name and "beit" not in name:  # these lack, or add, tensors
        exported = export_state_dict(model, source=official.CASES[name]["source"])
        official.assert_equal({key: np.float32(x) for key, x in exported.items()}, weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", official.CASES)
def test_logits_match_the_official_code(name):
    model, _ = convert(name)
    check_logits(name, model, jnp.float32, "logits", official.CASES[name].get("limit", 2e-5))


def test_every_source_has_a_case():
    # DINO's own names are compared with timm's in tests/models/test_dino.py, ours are in
    # test_own.py, those of transformers in test_transformers.py, Google's in test_convert.py.
    elsewhere = {"cat", "dinov2", "dinov3", "rope_jax", "transformers", "augreg"}
    # In test_dense.py:
    elsewhere |= {"detectron2", "mmseg", "segmenter", "vit_adapter", "mask2former", "detrex"}
    assert {official.CASES[name]["source"] for name in (*QUICK, *FLOAT64)} == set(
        SOURCES
    ) - elsewhere
