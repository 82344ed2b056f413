"""Official weights give official numbers: the logits of the official code, in float32 and in float64.

Tolerances: two float32 implementations of one model differ by up to 4e-6 in logits of size 1. In float64 rounding leaves 1e-14, and
a wrong epsilon of a layer norm shows with 4e-6 and more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.pretrained import export_state_dict
from tests.parity import official

pytestmark = pytest.mark.usefixtures("quick_compiles")

# What is left out differs from cases that are here in settings that these or other tests cover.
FLOAT32 = sorted(set(official.CASES) - {"nat_mini_224", "nat_s_tiny_224", "heo_vit_s16_mixed_224", "cat_released_224"})
FLOAT64 = [
    "deit_ti16_224",
    "heo_vit_s16_mixed_ape_224",
    "nat_s_tiny_224",
    "cct_7_3x1_32",
    "vit_lite_7_4_32",
    "ceit_t_224",
    "t2t_vit_7_224",
    "timm_dinov2_56x84",
    "timm_dinov2_g_reg_56",
    "timm_dinov3_64x96",
    "timm_beit_64x96",
]


def converted(name, dtype=jnp.float32):
    """The model of a case with its weights. All of them come from the state dict, so none is initialised before."""
    case = official.CASES[name]
    settings = {"position": case["position"], "num_classes": case["num_classes"], "image_size": tuple(case["create"])}
    make = lambda: rope_jax.create_model(case["model"], dtype=dtype, **settings, **case["options"])
    model = nnx.eval_shape(make)
    rope_jax.convert_state_dict(model, official.state_dict(name), source=case["source"])
    return model


def largest_difference(name, dtype, wanted):
    case = official.CASES[name]
    graph, state = nnx.split(converted(name, dtype))
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, jnp.asarray(official.images(*case["size"]), dtype))
    assert logits.dtype == dtype
    return np.abs(np.asarray(logits) - official.golden(name)[wanted]).max()


@pytest.mark.parametrize("name", FLOAT32)
def test_logits_are_those_of_the_official_code(name):
    assert largest_difference(name, jnp.float32, "logits") < 2e-5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FLOAT64)
def test_logits_in_float64_are_those_of_the_official_code(name):
    # Some codes compute their sines in float32 whatever the model's dtype.
    assert largest_difference(name, jnp.float64, "logits_f64") < (2e-6 if official.CASES[name]["float32_tables"] else 1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "heo_vit_s16_mixed_ape_224",
        "lape_deit_ti_learned_224",
        "swin_t_rope_mixed_224",
        "nat_mini_224",
        "cct_7_3x1_32",
        "ceit_t_224",
        "t2t_vit_7_224",
    ],
)
def test_official_weights_go_out_as_they_came_in(name):
    state_dict = official.state_dict(name)
    exported = export_state_dict(converted(name), source=official.CASES[name]["source"])
    assert exported.keys() == state_dict.keys()
    for key, array in state_dict.items():
        np.testing.assert_array_equal(exported[key], array, err_msg=key, strict=True)
