import ast
import pathlib
import sys

import pytest

from benchmarks import _step, cpu

ROOT = pathlib.Path(__file__).parents[2]


def test_ratios_are_of_times_within_a_turn():
    seconds = {cpu.OURS: [1.0, 2.0, 8.0], cpu.PEER: [1.5, 3.0, 8.0]}
    found = cpu.ratios(seconds, cpu.OURS, cpu.PEER)
    assert found == {"low": 1.25, "median": 1.5, "high": 1.5}


def test_a_table_names_kinds_ratios_and_settings():
    quartiles = {"low": 900.0, "median": 1000.0, "high": 1100.0}
    result = {
        "settings": {"recipe": "digits", "changed": "batch_size=64", "loader": True},
        "images_per_second": {"one device": quartiles},
        "ratios": {"one device / eager PyTorch": {"low": 1.1, "median": 1.25, "high": 1.3}},
        "cores": 2,
    }
    text = cpu.table(result)
    assert "| one device | 1,000 | 900 to 1,100 |" in text
    assert "- one device / eager PyTorch: 1.25 (1.10 to 1.30)" in text
    assert text.endswith("`digits`, batch_size=64, 2 cores, with the loader.")


def test_the_peer_has_the_recipe_s_model_and_optimizer():
    asked = _step.peer_of(_step.config_of("digits", {"batch_size": 64, "optim.clip_norm": None}))
    assert (asked["width"], asked["depth"], asked["image_size"], asked["batch"]) == (96, 4, 8, 64)
    assert (asked["position"], asked["clip_norm"]) == ("rope_mixed", None)
    assert asked["learning_rate"] == 3e-3
    with pytest.raises(SystemExit, match="rope_mixed or none"):
        _step.peer_of(_step.config_of("digits", {"model.position": "ape"}))


def test_the_peer_runs_where_only_torch_is_installed():
    tree = ast.parse((ROOT / "benchmarks/_torch_vit.py").read_text())
    names = {alias.name for x in ast.walk(tree) if isinstance(x, ast.Import) for alias in x.names}
    names |= {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch"}
