"""Dense prediction equals official code."""

import pytest

from rope_jax.weights import export_state_dict
from tests.parity.dense import check_outputs, goldens, load
from tests.parity.official import assert_equal
from tests.slow import some_slow

QUICK = ["dino_losses", "msda", "upernet_heads", "vit_adapter"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", some_slow(goldens(), QUICK))
def test_float64_outputs_match_the_official_code(name):
    check_outputs(name, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("name", goldens())
def test_outputs_match_the_official_code(name):
    check_outputs(name, "float32")


@pytest.mark.parametrize(
    ("name", "source"),
    some_slow(
        [
            ("vitdet_rel", "detectron2"),
            ("vit_adapter", "vit_adapter"),
            ("mask2former", "mask2former"),
            ("dino_transformer", "detrex"),
            ("upernet_vit_mln", "mmseg"),
            ("upernet_vit_plain", "mmseg"),
        ],
        [("vit_adapter", "vit_adapter"), ("upernet_vit_plain", "mmseg")],
    ),
)
def test_weights_round_trip(name, source):
    golden = goldens()[name]
    model = load(golden, "float32", source)
    # The class token's entry in tables is not used.
    used = lambda arrays: {
        key: array[:, 1:] if key.endswith("pos_embed") else array for key, array in arrays.items()
    }
    assert_equal(used(export_state_dict(model, source=source)), used(golden.weights))
