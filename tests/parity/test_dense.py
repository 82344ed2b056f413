"""Dense prediction equals official code, and the runner of `python -m tests.parity.dense`."""

import json
import shutil

import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.weights import export_state_dict
from tests.models.small import some_slow
from tests.parity.dense import DATA, differences, find_check, goldens
from tests.parity.dense.__main__ import main

QUICK = ["dino_losses", "msda", "vit_adapter"]
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
    weights = golden.weights
    model = nnx.eval_shape(lambda: find_check(name).make_model(golden.case, weights, "float32"))
    rope_jax.convert_state_dict(model, weights, source=source)
    exported = export_state_dict(model, source=source)
    assert exported.keys() == weights.keys()
    for key, array in weights.items():
        if key.endswith("pos_embed"):  # the class token's entry is not used
            array, exported[key] = array[:, 1:], exported[key][:, 1:]
        np.testing.assert_array_equal(exported[key], array, err_msg=key)


def test_the_runner_fails_if_an_output_differs(tmp_path, capsys):
    for kind in ("json", "npz"):
        shutil.copy(DATA / f"msda.{kind}", tmp_path)
    cases = {"msda": goldens()["msda"].case, "other": {}}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    assert main([str(tmp_path), "--x64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["checked 1 of 2 goldens", "there is no check of other"]
    with np.load(tmp_path / "msda.npz") as file:
        arrays = dict(file)
    arrays["points"][0, 0, 0] += 1e-4
    np.savez(tmp_path / "msda.npz", **arrays)
    assert main([str(tmp_path)]) == 1
    assert "not as the official code: msda.points" in capsys.readouterr().out
