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
FLOAT32 = sorted(set(official.CASES) - {"nat_mini_224", "nat_s_tiny_224", "heo_vit_s16_mixed_224"})
FLOAT64 = ["deit_ti16_224", "heo_vit_s16_mixed_ape_224", "nat_s_tiny_224"]


def converted(name, dtype=jnp.float32):
    """The model of a case with its weights. All of them come from the state dict, so none is initialised before."""
    case = official.CASES[name]
    make = lambda: rope_jax.create_model(
        case["model"], position=case["position"], num_classes=case["num_classes"], image_size=tuple(case["create"]), dtype=dtype
    )
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
    assert largest_difference(name, jnp.float64, "logits_f64") < 1e-9


@pytest.mark.parametrize("name", ["heo_vit_s16_mixed_ape_224", "lape_deit_ti_learned_224", "swin_t_rope_mixed_224", "nat_mini_224"])
def test_official_weights_go_out_as_they_came_in(name):
    state_dict = official.state_dict(name)
    exported = export_state_dict(converted(name), source=official.CASES[name]["source"])
    assert exported.keys() == state_dict.keys()
    for key, array in state_dict.items():
        np.testing.assert_array_equal(exported[key], array, err_msg=key, strict=True)
