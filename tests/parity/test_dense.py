"""Dense prediction equals official code."""

import pytest

from rope_jax.weights import export_state_dict
from tests.parity.dense import differences, find_check, goldens, load
from tests.parity.official import assert_equal
from tests.slow import some_slow

QUICK = ["dino_losses", "msda", "upernet_heads", "vit_adapter"]
CHECKED = [name for name in goldens() if find_check(name)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", some_slow(CHECKED, QUICK))
def test_float64_outputs_match_the_official_code(name):
    for key, (difference, limit) in differences(goldens()[name], "float64").items():
        assert difference <= limit, key


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_outputs_match_the_official_code(name):
    for key, (difference, limit) in differences(goldens()[name], "float32").items():
        assert difference <= limit, key


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
