"""The agreement of processes; `tests/faults/attacks/several.py` starts some that differ."""

import json

import jax
import pytest

from rope_jax.config import ConfigError, settings
from rope_jax.runs.run import start
from rope_jax.training import agreement
from rope_jax.training.setup import prepare
from tests.training.recipe import tiny


def simulate_others(monkeypatch, *facts):
    """Simulates the first of several processes; the others have these facts."""
    texts = [json.dumps(x) for x in facts]
    monkeypatch.setattr(agreement, "gather_texts", lambda text: [text, *texts])


def test_missing_weights_in_one_process_end_all(monkeypatch, tmp_path):
    setup, model = prepare(tiny(init_from=str(tmp_path)))
    sent = []
    monkeypatch.setattr(agreement, "gather_texts", lambda text: [sent.append(text) or text])
    with pytest.raises(ConfigError, match=r"without model\.safetensors"):
        start(setup, model)
    steps, failure = map(json.loads, sent)
    simulate_others(monkeypatch, failure)
    with pytest.raises(ConfigError, match=r"process 1 failed: .* without model\.safetensors"):
        agreement.require_equal({})
    simulate_others(monkeypatch, steps)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"in process 1 the steps of .* is \[\], not \['3'\]"):
        start(setup, model)


def test_settings_data_and_software_are_compared():
    facts = agreement.describe_run(*prepare(tiny()))
    software = {*agreement._PACKAGES, *agreement._OPTIONS, "python", "the sources of rope_jax"}
    assert {*(f"--config.{name}" for name in settings()), *software, "the state"} <= facts.keys()
    assert facts["jax"] == jax.__version__
    assert facts["--config.seed"] == "0"
    other = agreement.describe_run(*prepare(tiny(model__options="depth=1,width=32,heads=2")))
    changed = {name for name in facts if facts[name] != other[name]}
    assert changed == {"--config.model.options", "the state"}
